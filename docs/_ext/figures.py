"""Figures: drawn once in a neutral ink, shown in a light and a dark one, captioned."""

from pathlib import Path

import runs
from docutils import nodes
from lessons import ROOT, find
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

log = logging.getLogger(__name__)

STYLE = Path(__file__).with_name("figures.mplstyle")
INK = "#010203"  # figures.mplstyle draws text and axes in it
INKS = {"light": "#1f2328", "dark": "#d0d7de"}
MUTED = "#7f8790"  # readable on both grounds, for cards
LIMIT = 150_000
PREFIXES = ("Figure.", "图：")


def scrape(block, block_vars, gallery_conf) -> str:
    """Save the cell's figure for Sphinx-Gallery and return the reST that shows it."""
    import matplotlib.pyplot as plt

    numbers = plt.get_fignums()
    if not numbers:
        return ""
    if len(numbers) > 1:
        plt.close("all")
        raise ValueError("a cell draws at most one figure, for one caption follows it")
    path = Path(next(block_vars["image_path_iterator"])).with_suffix(".svg")
    plt.figure(numbers[0]).savefig(path, transparent=True, metadata={"Date": None})
    plt.close("all")
    if path.stat().st_size > LIMIT:
        raise ValueError(
            f"the figure takes {path.stat().st_size:,} bytes as SVG, {LIMIT:,} are allowed;"
            " draw its dense part with rasterized=True"
        )
    stem = Path(block_vars["src_file"]).stem.split("_", 1)[1]
    return f"\n.. recorded-figure:: {stem} {len(block_vars['image_path_iterator'])}\n"


def inked(stem: str, number: int, ink: str) -> str:
    """Write a copy of a recorded figure in an ink; return its path for Sphinx."""
    source = runs.current(stem).recording.figure(number)
    color = INKS.get(ink, MUTED)
    target = ROOT / "docs" / "lessons" / "figures" / f"{stem}-{number}-{ink}.svg"
    text = source.read_text("utf-8").replace(INK, color)
    if not target.exists() or target.read_text("utf-8") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    return "/" + target.relative_to(ROOT / "docs").as_posix()


class RecordedFigure(SphinxDirective):
    """``.. recorded-figure:: lesson n`` with the caption as content.

    On a lesson's page, where Sphinx-Gallery's output holds it, the caption is
    the paragraph after the cell (see `Captions`).
    """

    required_arguments = 2
    has_content = True

    def run(self):
        stem, number = self.arguments[0], int(self.arguments[1])
        if stem not in find():
            raise self.error(f"no lesson named {stem}")
        run = runs.current(stem)
        runs.depend(self.env, stem)
        figure = nodes.figure(classes=["recorded-figure"])
        if self.env.app.builder.name == "gettext":
            return self.caption(figure)
        if run.recording is None or not run.recording.figure(number).exists():
            message = f"{self.env.docname}: {stem} has no figure {number}: {run.reason}"
            if run.state == "recorded":
                raise ExtensionError(message)
            log.warning("%s", message, type="recordings")
            return [nodes.paragraph("", "", nodes.Text("—"))]
        identity = nodes.make_id(f"figure-{stem}-{number}")
        figure["ids"].append(identity)
        for ink in INKS:
            image = nodes.image(uri=inked(stem, number, ink), classes=[f"only-{ink}"], alt="")
            self.set_source_info(image)
            figure += image
        return self.caption(figure)

    def caption(self, figure):
        if not self.content:
            return [figure]
        text = " ".join(self.content)
        inline, messages = self.parse_inline(text, lineno=self.content_offset + 1)
        caption = nodes.caption(text, "", *inline)
        self.set_source_info(caption)
        figure += caption
        return [figure, *messages]


class Captions(SphinxTransform):
    """Make the paragraph after a lesson's figure its caption; set all alt texts."""

    default_priority = 400  # after translation

    def apply(self):
        if self.app.builder.name == "gettext":
            return
        for figure in list(self.document.findall(nodes.figure)):
            if "recorded-figure" not in figure["classes"]:
                continue
            if not list(figure.findall(nodes.caption)):
                self.adopt_caption(figure)
            alt = next(figure.findall(nodes.caption)).astext()
            for image in figure.findall(nodes.image):
                image["alt"] = alt
        for paragraph in list(self.document.findall(nodes.paragraph)):
            if paragraph.astext().startswith(PREFIXES) and self.env.docname.startswith("lessons/"):
                self.drop_caption(paragraph)

    def adopt_caption(self, figure):
        skipped = (nodes.comment, nodes.literal_block, nodes.container)
        following = figure.parent[figure.parent.index(figure) + 1 :]
        paragraph = next((n for n in following if not isinstance(n, skipped)), None)
        text = paragraph.astext() if isinstance(paragraph, nodes.paragraph) else ""
        prefix = next((p for p in PREFIXES if text.startswith(p)), None)
        if prefix is None:
            raise ExtensionError(
                f"{self.env.docname}: a figure has no caption; the text after its cell"
                f" must begin with '{PREFIXES[0]}' ('{PREFIXES[1]}' in Chinese)"
            )
        first = next(paragraph.findall(nodes.Text))
        first.parent.replace(first, nodes.Text(first.removeprefix(prefix).lstrip()))
        figure += nodes.caption("", "", *paragraph.children)
        paragraph.parent.remove(paragraph)

    def drop_caption(self, paragraph):
        """Without a GPU a lesson may leave out a figure; its caption goes too."""
        run = runs.current(self.env.docname.split("_", 2)[-1])
        if run.on_gpu:
            raise ExtensionError(
                f"{self.env.docname}: a caption follows no figure: {paragraph.astext()[:60]}"
            )
        paragraph.parent.remove(paragraph)


def setup(app):
    app.add_directive("recorded-figure", RecordedFigure)
    app.add_transform(Captions)
    return {"parallel_read_safe": True}
