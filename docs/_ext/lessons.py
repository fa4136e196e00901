"""Lessons: found on disk, named by their stem, hashed by their code."""

import ast
import hashlib
import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HASH_VERSION = 1


@dataclass(frozen=True)
class Lesson:
    path: Path

    @property
    def stem(self) -> str:
        """The lesson's name: the file name without its number."""
        return self.path.stem.split("_", 1)[1]

    @property
    def part(self) -> str:
        return self.path.parent.name

    @property
    def download(self) -> str:
        """The name of its downloads: a script copy.py would hide Python's module copy."""
        return f"triton_{self.stem}" if self.stem in sys.stdlib_module_names else self.stem

    @property
    def docname(self) -> str:
        return f"lessons/{self.part}/{self.path.stem}"

    def blocks(self):
        """The text and code blocks, as Sphinx-Gallery splits them."""
        from sphinx_gallery.py_source_parser import split_code_and_text_blocks

        return split_code_and_text_blocks(str(self.path))[1]

    def code(self) -> list[str]:
        return [block.content for block in self.blocks() if block.type == "code"]

    def helpers(self) -> list[Path]:
        """The files in examples/tools that its code names; its run depends on them."""
        code = "\n".join(self.code())
        tools = self.path.parents[1] / "tools"
        return [path for path in sorted(tools.glob("*.py")) if path.name in code]

    def code_hash(self) -> str:
        return code_hash([*self.code(), *(path.read_text("utf-8") for path in self.helpers())])


def find(examples: Path = ROOT / "examples") -> dict[str, Lesson]:
    """All lessons by stem, in course order.

    Raises ValueError where two lessons share a stem.
    """
    lessons: dict[str, Lesson] = {}
    for path in sorted(examples.glob("[0-9]_*/[0-9][0-9]_*.py")):
        lesson = Lesson(path)
        if lesson.stem in lessons:
            both = " and ".join(
                str(p.relative_to(examples)) for p in (lessons[lesson.stem].path, path)
            )
            raise ValueError(
                f"two lessons have the stem '{lesson.stem}': {both}; rename one,"
                " for a stem names one recording"
            )
        lessons[lesson.stem] = lesson
    return lessons


def exercises(examples: Path = ROOT / "examples") -> list[Path]:
    """The starter files of projects: downloads, and no pages."""
    return sorted((examples / "exercises").glob("*.py"))


def select(names: str) -> list[Lesson]:
    """The lessons that a ``LESSON="a b"`` names; all of them when it is empty.

    Raises ValueError with the known names where one is unknown.
    """
    lessons = find()
    unknown = [name for name in names.split() if name not in lessons]
    if unknown:
        raise ValueError(
            f"no lesson named {', '.join(unknown)}; LESSON takes some of: {' '.join(lessons)}"
        )
    return [lessons[name] for name in names.split()] or list(lessons.values())


def code_hash(cells: list[str]) -> str:
    """SHA-256 of the cells without comments, blank lines and docstrings.

    Prose, comments and docstrings can change without a new recording. Blank
    lines inside other strings count. Syntax trees and tokens differ between
    Python versions, so the text itself is hashed.
    """
    digest = hashlib.sha256()
    for cell in cells:
        digest.update("\n".join(_code_lines(cell)).encode() + b"\0")
    return digest.hexdigest()


def _code_lines(cell: str) -> list[str]:
    lines = cell.splitlines()
    try:
        tree = ast.parse(cell)
        tokens = list(tokenize.generate_tokens(io.StringIO(cell + "\n").readline))
    except (SyntaxError, tokenize.TokenError):
        return lines
    docstrings, kept = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                docstrings.update(range(first.lineno - 1, first.end_lineno))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            kept.update(range(node.lineno - 1, node.end_lineno))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return [
        line if i in kept else line.rstrip()
        for i, line in enumerate(lines)
        if i not in docstrings and (line.strip() or i in kept)
    ]


def of_docname(docname: str) -> Lesson | None:
    """The lesson that a page of the gallery shows, if it shows one."""
    match = re.fullmatch(r"lessons/\d_\w+/\d\d_(\w+)", docname)
    return find().get(match[1]) if match else None
