"""Downloads: complete, in the language of the page, with the lesson's own code and clean text."""

import ast
import json
import re
import sys
import zipfile

import downloads
import markdown
import nbformat
import pytest
from docutils import nodes
from docutils.core import publish_doctree
from lessons import exercises, find
from site_build import CHINESE, CODES

LESSONS = list(find().values())
RAW = re.compile(r":[a-z]+:`|^\s*\.\. |::$|``[^`]|\{[a-z]+\}`|`_", re.MULTILINE)


def each(name="code, lesson"):
    cases = [(code, lesson) for code in CODES for lesson in LESSONS]
    return pytest.mark.parametrize(name, cases, ids=[f"{c}-{lesson.stem}" for c, lesson in cases])


@pytest.fixture
def home(site, code):
    return site.html / code / "downloads"


def own_code(lesson) -> list[str]:
    return [text.strip("\n") for text in lesson.code()]


def members(lesson) -> set[str]:
    """What a lesson's zip holds: script, notebook, and the helper files that its code names."""
    own = {f"{lesson.download}.py", f"{lesson.download}.ipynb"}
    return own | {path.name for path in lesson.helpers()}


@pytest.mark.parametrize("code", CODES)
def test_lessons_and_exercises_can_be_downloaded_and_nothing_else(home):
    starters = exercises()
    for path in starters:
        assert (home / path.name).read_bytes() == path.read_bytes()
    files = {path.name for path in starters}.union(*map(members, find().values()))
    zips = {f"{lesson.download}.zip" for lesson in find().values()}
    assert {path.name for path in home.iterdir()} == files | zips | {"all.zip"}
    holds(home / "all.zip", files)


@each()
def test_zip_holds_script_notebook_and_helpers(home, lesson):
    holds(home / f"{lesson.download}.zip", members(lesson))
    for path in lesson.helpers():
        assert (home / path.name).read_bytes() == path.read_bytes()


def holds(path, names):
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == sorted(names)
        for name in names:
            assert archive.read(name) == (path.parent / name).read_bytes()


def test_no_download_hides_a_module():
    """A script copy.py would be imported wherever Python means its own module copy."""
    names = {lesson.download for lesson in find().values()} | {p.stem for p in exercises()}
    assert len(names) == len(find()) + len(exercises())
    assert not names & (set(sys.stdlib_module_names) | {"torch", "triton", "matplotlib", "numpy"})


@each()
def test_notebook_is_valid_and_its_code_is_the_lessons(home, lesson):
    notebook = nbformat.read(home / f"{lesson.download}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code == own_code(lesson)
    assert [cell.cell_type for cell in notebook.cells] == [
        "code" if block.type == "code" else "markdown" for block in lesson.blocks()
    ]


def split(script: str) -> tuple[list[str], str]:
    """The code cells of a downloaded script, and its texts without comment signs."""
    head, mark, rest = script.partition('"""')[2].partition('\n"""\n\n')
    code, texts = [], [head]
    for cell in re.split(r"^# %%(?= |$)", mark and rest, flags=re.MULTILINE):
        if cell.startswith(" [markdown]\n"):
            texts.append(re.sub(r"^# ?", "", cell.partition("\n")[2], flags=re.MULTILINE))
        elif cell.strip():
            code.append(cell.strip("\n"))
    return code, texts


@each()
def test_script_compiles_and_its_code_is_the_lessons(home, lesson):
    script = (home / f"{lesson.download}.py").read_text("utf-8")
    tree = ast.parse(script)
    code, texts = split(script)
    assert code == own_code(lesson)
    assert ast.get_docstring(tree).strip() == texts[0].strip()


def prose(home, lesson) -> list[str]:
    notebook = json.loads((home / f"{lesson.download}.ipynb").read_text("utf-8"))
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


@each()
def test_script_and_notebook_say_the_same(home, lesson):
    texts = split((home / f"{lesson.download}.py").read_text("utf-8"))[1]
    assert [text.strip() for text in texts] == [text.strip() for text in prose(home, lesson)]


@each()
def test_no_markup_of_the_page_is_left(home, lesson):
    for text in prose(home, lesson):
        assert not RAW.search(text), text
        assert "—" != text.strip()


@each()
def test_texts_are_in_the_language_of_the_page(home, lesson, code):
    for text in prose(home, lesson):
        assert bool(CHINESE.search(text)) == (code == "zh"), text


@each()
def test_notebook_says_its_language(home, lesson, code):
    notebook = json.loads((home / f"{lesson.download}.ipynb").read_text("utf-8"))
    assert notebook["metadata"]["lang"] == {"en": "en", "zh": "zh-CN"}[code]


def test_equal_content_makes_equal_zips(tmp_path):
    member = tmp_path / "a.py"
    zips = []
    for text in ("x", "x", "y"):
        member.write_text(text)
        downloads.archive(tmp_path / "a.zip", [member])
        zips.append((tmp_path / "a.zip").read_bytes())
    assert zips[0] == zips[1] != zips[2]


# --- Markdown of single constructs

CASES = {
    "paragraph": ("One\ntwo.", "One two."),
    "title": ("Title\n=====\n\nA\n-\n\nText.\n\nB\n-\n\nMore.", "# Title\n\n## A\n\nText.\n\n## B\n\nMore."),
    "emphasis": ("*a* **b**", "*a* **b**"),
    "literal": ("``a`` and ``b`c``", "`a` and ``b`c``"),
    "literal that begins with a backtick": ("```a```", "`` `a` ``"),
    "signs of Markdown": (r"2 \* 3 \* 4, a_b, \_c, \`d\`", r"2 \* 3 \* 4, a_b, \_c, \`d\`"),
    "maths": (r":math:`a_b`", "$a_b$"),
    "maths in a block": (".. math:: a\n   + b", "$$\na\n+ b\n$$"),
    "list": ("- a\n- b\n\n  more", "- a\n- b\n\n  more"),
    "numbered list": ("3. a\n4. b", "3. a\n4. b"),
    "nested list": ("- a\n\n  1. b\n  2. c\n\n- d", "- a\n\n  1. b\n  2. c\n- d"),
    "definition": ("a\n  b", "**a**\n\nb"),
    "code": ("::\n\n  x = 1\n\n  y", "```\nx = 1\n\ny\n```"),
    "quote": ("a\n\n  b\n\n  c", "a\n\n> b\n>\n> c"),
    "note": (".. note:: a", "> **Note**\n>\n> a"),
    "titled box": (".. admonition:: T\n\n   a", "> **T**\n>\n> a"),
    "rubric": (".. rubric:: R", "**R**"),
    "link": ("`a <https://a.org>`_ https://b.org", "[a](https://a.org) <https://b.org>"),
    "table": (
        ".. list-table::\n   :header-rows: 1\n\n   * - a\n     - b|c\n   * - ``d``\n     - e",
        "| a | b\\|c |\n| --- | --- |\n| `d` | e |",
    ),
    "table without a head": (
        ".. list-table::\n\n   * - a\n     - b",
        "|  |  |\n| --- | --- |\n| a | b |",
    ),
    "comment": ("a\n\n.. b\n\nc", "a\n\nc"),
}  # fmt: skip


@pytest.mark.parametrize("source, wanted", CASES.values(), ids=CASES)
def test_markdown(source, wanted):
    settings = {"doctitle_xform": False, "report_level": 5, "syntax_highlight": "none"}
    document = publish_doctree(source, settings_overrides=settings)
    assert markdown.join(document.children, 0) == wanted


def test_markdown_of_code_names_its_language():
    code = nodes.literal_block("x", "x", language="python")
    assert markdown.blocks(code, 0) == "```python\nx\n```"


def test_markdown_of_an_unknown_construct_stops_the_build():
    with pytest.raises(NotImplementedError, match="footnote"):
        markdown.blocks(nodes.footnote("", nodes.paragraph("", "text")), 0)
