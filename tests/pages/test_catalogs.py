"""The Chinese catalogs: complete, with the markup of the English text, in clean typography."""

import ast
import re
from collections import Counter

import polib
import pytest
from languages import THEME_STRINGS
from site_build import CHINESE, ROOT, copy_tree, once, run

LOCALE = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES"
OWN = "sphinx.po"  # written by hand: strings of the extensions, the templates and the theme

# What is not prose, in reStructuredText (lessons) and in MyST (the other pages).
TOKEN = re.compile(
    r"""
      :(?P<role>[a-z:]+):`(?P<role_text>[^`]+)`
    | \{(?P<myst>[a-z:]+)\}`(?P<myst_text>[^`]+)`
    | ``(?P<double>.+?)``(?!`)
    | `(?P<reference>[^`]+)`__?(?!\w)
    | `(?P<single>[^`]+)`
    | (?<=\])\((?P<target>[^()\s]+)\)
    | <?(?P<url>https?://[^>\s，。；、）]+)>?
    | \[(?P<note>[#\d]\w*)\]_
    | \|(?P<substitution>\w+)\|
    | \$(?P<math>[^$]+)\$
    | \\(?P<command>[A-Za-z]+)
    | (?<![\\A-Za-z}])\{(?P<placeholder>\w+)\}
    | %\((?P<field>\w+)\)s
    """,
    re.VERBOSE,
)
LATIN, TITLE = "\ue000", "\ue001"  # stand for code or a number, and for a title in Chinese
TITLED = re.compile(r"(?P<title>.+?)\s*<(?P<target>[^<>]+)>")

HAN = "[\u3400-\u9fff]"
PROSE = {
    rf"{HAN}[,;:!?()\"]|[,;:!?()\"]{HAN}|{HAN}\.(?!\w)": "half-width punctuation beside Chinese",
    rf"{LATIN}[,;:](?: |$)": "half-width punctuation after code",
    rf"{HAN}[A-Za-z0-9{LATIN}]|[A-Za-z0-9{LATIN}]{HAN}": "no space between Chinese and Latin",
    r" [，。；：！？、）》]|[，。；：！？、（《] ": "a space beside full-width punctuation",
    # one term, one translation
    r"步幅|跨步": "stride is 步长",
    r"(?<!张量)核心|核函数": "kernel is 内核",
    r"遮罩|掩膜|蒙版": "mask is 掩码",
    r"规约": "reduction is 归约",
    r"瓦片|平铺": "tile is 分块",
    r"吞吐率": "throughput is 吞吐量",
    r"占有率": "occupancy is 占用率",
    r"装饰器函数|封装函数|包装函数": "wrapper is 包装器",
    r"线程捆|线程组": "warp is 线程束",
    r"偏移量": "offset is 偏移",
    r"自动调谐|自动调参": "autotuning is 自动调优",
}


def parts(text: str) -> tuple[Counter, str]:
    """What must be the same in both languages, and the prose around it."""
    kept = Counter()

    def mask(match):
        found = {kind: value for kind, value in match.groupdict().items() if value}
        kind, value = list(found.items())[-1]
        role = found.get("role") or found.get("myst")
        titled = TITLED.fullmatch(value) if kind == "reference" or role else None
        kept[role or kind, titled["target"] if titled else value] += 1
        if titled:
            return titled["title"]
        if role in ("lesson", "doc", "ref"):
            return TITLE
        return "" if kind in ("target", "note") else LATIN

    prose = TOKEN.sub(mask, text.replace("[](", f"[{TITLE}]("))
    return kept, re.sub(r"[*\[\]]", "", prose)


def faults(msgid: str, msgstr: str) -> list[str]:
    """What is wrong with a translation, as far as a program can tell."""
    (wanted, _), (kept, prose) = parts(msgid), parts(msgstr)
    found = [f"lacks {kind} '{value}'" for kind, value in wanted - kept]
    found += [f"has {kind} '{value}' too often" for kind, value in kept - wanted]
    if msgid.startswith("Figure.") != msgstr.startswith("图："):
        found.append("a caption begins with Figure. in English, 图： in Chinese")
    if "\\" not in msgid and len(re.findall(r"\b[a-z]{2,}\b", parts(msgid)[1])) > 2:
        if not CHINESE.search(msgstr):
            found.append("has no Chinese")
    for pattern, reason in PROSE.items():
        for match in re.finditer(pattern, prose):
            start, end = match.span()
            found.append(f"{reason}: …{prose[max(0, start - 6) : end + 6]}…")
    return found


def incomplete(pot: polib.POFile, po: polib.POFile) -> list[str]:
    """How a catalog differs from a complete one."""
    wanted = {entry.msgid for entry in pot}
    entries = {entry.msgid: entry for entry in po if not entry.obsolete}
    found = [f"missing: {msgid}" for msgid in wanted - set(entries)]
    found += [f"no such text any more: {msgid}" for msgid in set(entries) - wanted]
    found += [f"obsolete: {entry.msgid}" for entry in po.obsolete_entries()]
    found += [f"fuzzy: {entry.msgid}" for entry in entries.values() if entry.fuzzy]
    found += [f"not translated: {e.msgid}" for e in entries.values() if not e.msgstr.strip()]
    return sorted(found)


@pytest.fixture(scope="module")
def gettext(tmp_path_factory):
    """A copy of the tree after `make gettext`."""

    def make(tree):
        copy_tree(tree)
        result = run(tree, "gettext", "-q")
        assert result.returncode == 0, result.stderr

    return once(tmp_path_factory, "gettext", make)


def catalogs() -> dict[str, polib.POFile]:
    return {p.relative_to(LOCALE).as_posix(): polib.pofile(str(p)) for p in LOCALE.rglob("*.po")}


def test_catalogs_are_complete(gettext):
    pots = gettext / "_build" / "gettext"
    wanted = {p.relative_to(pots).with_suffix(".po").as_posix(): p for p in pots.rglob("*.pot")}
    ours = catalogs()
    assert set(ours) == set(wanted) | {OWN}
    found = [
        f"{name}: {line}"
        for name, pot in wanted.items()
        for line in incomplete(polib.pofile(str(pot)), ours[name])
    ]
    assert not found, "\n".join(found)


def test_make_gettext_leaves_complete_catalogs_as_they_are(gettext):
    home = gettext / "docs" / "locale" / "zh_CN" / "LC_MESSAGES"
    for name, ours in catalogs().items():
        theirs = polib.pofile(str(home / name))
        assert {(e.msgid, e.msgstr, e.fuzzy, e.obsolete) for e in theirs} == {
            (e.msgid, e.msgstr, e.fuzzy, e.obsolete) for e in ours
        }, name


def test_translations_have_no_fault():
    found = [
        f"{name}: {entry.msgid[:60]!r}: {fault}"
        for name, catalog in catalogs().items()
        for entry in catalog.translated_entries()
        for fault in faults(entry.msgid, entry.msgstr)
    ]
    assert not found, "\n".join(found)


def own_strings() -> set[str]:
    """The strings that extensions, templates and the theme's replaced texts need."""
    found = {re.search("{(.*)}", text)[1] for text in THEME_STRINGS}
    for path in (ROOT / "docs" / "_ext").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_":
                if isinstance(node.args[0], ast.Constant):
                    found.add(node.args[0].value)
    for path in (ROOT / "docs" / "_templates").glob("*.html"):
        found |= set(re.findall(r"_\('([^']+)'\)", path.read_text("utf-8")))
    return found


def test_own_strings_are_translated():
    assert {"Language", "driver", "Recorded on {gpu}, {date}", "Light mode"} <= own_strings()
    catalog = polib.pofile(str(LOCALE / OWN))
    assert own_strings() <= {entry.msgid for entry in catalog.translated_entries()}
    assert incomplete(catalog, catalog) == []


GOOD = [
    ("A *mask* of ``n`` bits.", "*掩码*（mask）有 ``n`` 位。"),
    (":measured:`a b metric=us N>=2**20` and :doc:`/x`", ":measured:`a b metric=us N>=2**20` 与:doc:`/x`"),
    ("See {lesson}`add`, [the method](m.md), [](n.md).", "参见{lesson}`add`、[方法](m.md)和[](n.md)。"),
    ("`Tutorial <https://a.org>`_ by them", "他们的`教程 <https://a.org>`_"),
    ("Recorded on {gpu}, {date}", "{gpu} 实测记录，{date}"),
    ("Figure. Four programs.", "图：四个程序实例。"),
    (r"\text{rate} = \frac{a}{b}", r"\text{速率} = \frac{a}{b}"),
]  # fmt: skip
BAD = [
    ("Recorded on {gpu}, {date}", "{gpu} 实测记录，{data}", "lacks placeholder 'date'"),
    ("{measured}`a b metric=us` fast", "很快", "lacks measured"),
    (":measured:`a b metric=us N=1` fast", ":measured:`a b metric=us N=2` 快", "too often"),
    ("See {lesson}`add`.", "见课程。", "lacks lesson 'add'"),
    ("See `this <https://a.org>`_.", "见`此 <https://b.org>`_。", "lacks reference"),
    ("See [this](a.md).", "见[此](b.md)。", "lacks target 'a.md'"),
    ("Paper: https://a.org/b", "论文：https://a.org", "lacks url"),
    ("From ``x`` on", "从 ``y`` 起", "lacks double 'x'"),
    ("Let :math:`x` be", "设 :math:`y`", "lacks math 'x'"),
    (r"\text{rate} = \frac{a}{b}", r"\text{速率} = a / b", "lacks command 'frac'"),
    ("Figure. A line.", "一条线。", "图："),
    ("not translated at all", "not translated at all", "no Chinese"),
    ("a, b", "甲,乙", "half-width"),
    ("So `x`, then", "所以 `x`, 然后", "half-width punctuation after code"),
    ("the end.", "结束.", "half-width"),
    ("a GPU", "一个GPU", "no space"),
    ("a `x`", "一个`x`", "no space"),
    ("a, `x`", "甲， `x`", "a space beside"),
    ("a kernel", "核函数", "内核"),
]


@pytest.mark.parametrize("msgid, msgstr", GOOD)
def test_good_translations_pass(msgid, msgstr):
    assert faults(msgid, msgstr) == []


@pytest.mark.parametrize("msgid, msgstr, fault", BAD)
def test_bad_translations_are_found(msgid, msgstr, fault):
    assert any(fault in line for line in faults(msgid, msgstr))


def test_incomplete_catalogs_are_found():
    def catalog(**entries):
        po = polib.POFile()
        for msgid, more in entries.items():
            po.append(polib.POEntry(msgid=msgid, **more))
        return po

    pot = catalog(a={}, b={}, c={}, d={})
    po = catalog(
        a={"msgstr": "甲"},
        b={"msgstr": "乙", "flags": ["fuzzy"]},
        c={},
        e={"msgstr": "戊"},
        f={"msgstr": "己", "obsolete": True},
    )
    assert incomplete(pot, po) == [
        "fuzzy: b",
        "missing: d",
        "no such text any more: e",
        "not translated: c",
        "obsolete: f",
    ]
