"""Downloads in the language of the page: script, notebook, both zipped, and all.

They are made from the finished pages into ``_build/downloads/<language>`` and
published as ``<language>/downloads``. The code is the lesson's own, unchanged.
The starter files of exercises lie beside them, in English as code is.
"""

import json
import shutil
import zipfile
from pathlib import Path

import languages
import markdown
from docutils import nodes
from lessons import ROOT, Lesson, exercises, find, of_docname

MARK = "GENERATED FROM PYTHON SOURCE LINES"


def parts(doctree: nodes.document) -> list[list[tuple[nodes.Node, int]]]:
    """The nodes of each block of a lesson's page, with their section depth.

    A figure stands in its code's block; its caption goes to the text after it.
    """
    found, captions = [[]], []

    def walk(node, depth):
        for child in node.children:
            if isinstance(child, nodes.comment) and child.astext().startswith(MARK):
                found.append(captions.copy())
                captions.clear()
            elif isinstance(child, nodes.section):
                walk(child, depth + 1)
            elif isinstance(child, nodes.figure):
                captions.extend((caption, depth) for caption in child.findall(nodes.caption))
            else:
                found[-1].append((child, depth))

    walk(doctree, 0)
    return found


def cells(lesson: Lesson, doctree: nodes.document) -> list[tuple[str, str]]:
    """(kind, content) of each cell: the page's text and the lesson's own code."""
    content = []
    for block, part in zip(lesson.blocks(), parts(doctree), strict=True):
        if block.type == "code":
            content.append(("code", block.content.strip("\n")))
        else:
            texts = (markdown.blocks(node, depth) for node, depth in part)
            content.append(("text", "\n\n".join(text for text in texts if text)))
    return content


def script(content: list[tuple[str, str]]) -> str:
    parts = []
    for number, (kind, text) in enumerate(content):
        if kind == "code":
            parts.append(f"# %%\n{text}" if content[number - 1][0] == "code" else text)
        elif number == 0:
            parts.append(f'r"""\n{text}\n"""')
        else:
            lines = "\n".join(f"# {line}".rstrip() for line in text.split("\n"))
            parts.append(f"# %% [markdown]\n{lines}\n\n# %%")
    return "\n\n".join(parts).replace("# %%\n\n", "# %%\n").removesuffix("\n\n# %%") + "\n"


def notebook(content: list[tuple[str, str]], language: languages.Language) -> str:
    listed = [
        {"cell_type": "markdown", "id": f"cell-{n}", "metadata": {}, "source": text}
        if kind == "text"
        else {
            "cell_type": "code",
            "id": f"cell-{n}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": text,
        }
        for n, (kind, text) in enumerate(content)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "lang": language.tag}
    document = {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def archive(target: Path, members: list[Path]) -> None:
    """Zip files with a fixed date, so that the same content gives the same bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for member in members:
            file.writestr(zipfile.ZipInfo(member.name), member.read_bytes(), zipfile.ZIP_DEFLATED)


def folder(app) -> Path:
    return ROOT / "_build" / "downloads" / languages.of(app.config.language).code


def write(app, doctree, docname) -> None:
    """Write a lesson's downloads when its page is written and they would differ."""
    lesson = of_docname(docname)
    if lesson is None or app.builder.format != "html":
        return
    home = folder(app)
    home.mkdir(parents=True, exist_ok=True)
    content = cells(lesson, doctree)
    files = {path.name: path.read_text("utf-8") for path in lesson.helpers()}
    files[f"{lesson.download}.py"] = script(content)
    files[f"{lesson.download}.ipynb"] = notebook(content, languages.of(app.config.language))
    if all(_holds(home / name, text) for name, text in files.items()):
        return
    for name, text in files.items():
        (home / name).write_text(text, "utf-8")
    archive(home / f"{lesson.download}.zip", [home / name for name in sorted(files)])


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


def publish(app, exception) -> None:
    """Drop what no lesson stands behind, zip all, and copy everything into the site."""
    if exception or app.builder.format != "html":
        return
    home, known = folder(app), set()
    for lesson in find().values():
        known.update(path.name for path in lesson.helpers())
        known.update(f"{lesson.download}{suffix}" for suffix in (".py", ".ipynb", ".zip"))
    for path in exercises():
        known.add(shutil.copyfile(path, home / path.name).name)
    for path in home.iterdir():
        if path.name not in known:
            path.unlink()
    members = [home / name for name in sorted(known) if not name.endswith(".zip")]
    archive(home / "all.zip", [path for path in members if path.exists()])
    shutil.copytree(home, Path(app.outdir) / "downloads", dirs_exist_ok=True)


def setup(app):
    app.connect("doctree-resolved", write, priority=900)  # after references are resolved
    app.connect("build-finished", publish)
    return {"parallel_read_safe": True}
