"""What stands around the code: workflows, the CI script, README, and the pages' commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
README = ROOT / "README.md"
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if "lessons" not in p.parts)


@pytest.mark.parametrize("schema", ["vendor", "custom"])
def test_workflows_follow_the_schema(schema):
    name = {
        "vendor": "vendor.github-workflows",
        "custom": "custom.github-workflows-require-timeout",
    }
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", name[schema]]
    run = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert WORKFLOWS
    assert run.returncode == 0, run.stdout + run.stderr


def test_actions_are_official_and_pinned_to_a_major_version():
    for workflow in WORKFLOWS:
        for action in re.findall(r"uses: *(\S+)", workflow.read_text("utf-8")):
            assert re.fullmatch(r"actions/[\w-]+@v\d+", action), f"{workflow.name}: {action}"


def test_ci_script_parses():
    run = subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_readme_tree_is_the_top_level():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout: what belongs to the project is unknown")
    paths = [path for path in files.stdout.splitlines() if not path.startswith(".")]
    top = {path.split("/")[0] + "/" * ("/" in path) for path in paths}
    trees = re.findall(r"```text\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(trees) == 2, "one tree in English, one in Chinese"
    for tree in trees:
        assert {line.split()[0] for line in tree.splitlines()} == top


def test_make_targets_named_in_texts_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))
    for page in [README, *PAGES]:
        named = make_targets(page.read_text("utf-8"))
        assert named <= targets, f"{page.relative_to(ROOT)}: no target {named - targets}"


def make_targets(text: str) -> set[str]:
    """The targets of ``make`` in the code of a Markdown text."""
    code = re.findall(r"^\s*make\b(.*)$|`make\b([^`\n]*)`", text, re.MULTILINE)
    words = re.findall(r"\S+", " ".join(re.sub("#.*", "", "".join(pair)) for pair in code))
    return {word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)}


def test_make_targets_finds_them():
    text = "Run `make html X=1`.\n```bash\nmake   # lists\n  make serve    # shows\nmake PYTHON=p lint\n```"
    assert make_targets(text) == {"html", "serve", "lint"}
    assert make_targets("We make no claim.") == set()
