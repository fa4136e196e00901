"""Valid HTML: every page against the standard and against html-validate's recommendations."""

import json
import re
import subprocess

STYLE = (  # valid either way
    "attribute-boolean-style",  # checked="checked"
    "doctype-style",  # <!doctype html>
    "no-trailing-whitespace",
    "void-style",  # <link/>
)
CONFIG = {
    "root": True,
    "extends": ["html-validate:standard", "html-validate:recommended"],
    "rules": dict.fromkeys(STYLE, "off") | {"valid-id": ["error", {"relaxed": True}]},
}

# What markup that is not ours does against a recommendation. None of it is invalid HTML.
# (rule, pattern of the selector's end, whose markup and why it does no harm)
THIRD_PARTY = [
    ("no-implicit-button-type", "> button", "Furo: the theme toggle, in no form"),
    ("no-implicit-input-type", r"form > input\S*", "Furo: the search box, a text field"),
    ("no-inline-style", r"> colgroup > col\S*", "docutils: widths of columns"),
    ("prefer-native-element", "#furo-main-content", "Furo: role=main on an article"),
    ("prefer-native-element", r"> aside .*> p\S*", "Sphinx: navigation captions, role=heading"),
    ("unique-landmark", "> aside", "Furo: the two side bars, with named navigation inside"),
]


def validate(node_modules, folder, pages) -> list[tuple[str, str, str]]:
    """(rule, selector, description with the page) of each message."""
    config, report = folder / "config.json", folder / "report.json"
    config.write_text(json.dumps(CONFIG))
    command = ["node", node_modules / "html-validate" / "bin" / "html-validate.mjs"]
    command += ["--config", config, "--formatter", f"json={report}", *pages]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr
    found = []
    for page in json.loads(report.read_text("utf-8")) if run.returncode else []:
        for message in page["messages"]:
            place = f"{page['filePath']}:{message['line']}: {message['message']}"
            found.append((message["ruleId"], message.get("selector") or "", place))
    return found


def test_pages_are_valid(site, node_modules, tmp_path):
    pages = [site.html / "index.html", *site.all_pages()]
    found = validate(node_modules, tmp_path, pages)
    ours, unused = [], set(THIRD_PARTY)
    for rule, selector, place in found:
        excuses = {e for e in THIRD_PARTY if e[0] == rule and re.search(e[1] + "$", selector)}
        unused -= excuses
        if not excuses:
            ours.append(f"{place} ({rule}, {selector})")
    assert not ours, "\n".join(ours)
    assert not unused, f"no longer needed: {unused}"


def test_an_invalid_page_would_be_found(node_modules, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><html lang="en"><head><title>t</title></head><body>'
        '<p id="a"><div id="a"></div></p><img src="x.png"><ul><b>c</b></ul></body></html>'
    )
    rules = {rule for rule, *_ in validate(node_modules, tmp_path, [page])}
    assert {"no-dup-id", "close-order", "wcag/h37", "element-permitted-content"} <= rules
