"""Cards: which run a page shows, what to download, which lessons there are."""

import itertools
from pathlib import Path

import recordings
import runs
from docutils import nodes
from figures import inked
from lessons import Lesson, exercises, find, of_docname
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.i18n import docname_to_domain


def lesson_named(directive: SphinxDirective, stem: str) -> Lesson:
    """The lesson of that stem; pages that show it are read again when it changes."""
    lesson = find().get(stem)
    if lesson is None:
        raise ExtensionError(f"{directive.env.docname}: there is no lesson '{stem}'")
    runs.depend(directive.env, stem)
    return lesson


def paragraph(text: str, *classes: str) -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.Text(text), classes=list(classes))


def versions(manifest: dict) -> str:
    """``torch 2.11.0 · triton 3.6.0 · …`` of a recording."""
    names = {"driver": _("driver"), "cuda": "CUDA", "torch": "torch", "triton": "triton"}
    names["python"] = "Python"
    return " · ".join(f"{name} {manifest[key]}" for key, name in names.items() if key in manifest)


class RecordedCard(SphinxDirective):
    """``.. recorded-card:: lesson``: GPU, date and versions of the run shown."""

    required_arguments = 1

    def run(self):
        lesson = lesson_named(self, self.arguments[0])
        run = runs.current(lesson.stem)
        card = nodes.container(classes=["run-card", f"run-{run.state}"])
        if run.recording:
            manifest = run.recording.manifest
            place = {"gpu": manifest["gpu"]["name"], "date": manifest["date"]}
        if run.state == "recorded":
            card += paragraph(_("Recorded on {gpu}, {date}").format(**place), "run-title")
        elif run.state == "executed":
            card += paragraph(_("Executed on {gpu}, {date}").format(**place), "run-title")
        elif run.state == "interpreter":
            card += paragraph(_("Not GPU output"), "run-title")
            card += paragraph(
                _(
                    "The recording does not fit the code of this page, so the outputs below come"
                    " from Triton's interpreter on a CPU. Values are real; speeds are left out."
                )
            )
        else:
            card += paragraph(_("Not executed"), "run-title")
            card += paragraph(_("No valid recording fits the code of this page."))
        if run.recording:
            card += paragraph(versions(manifest))
        if not run.on_gpu:
            card += nodes.paragraph("", "", nodes.literal("", run.reason))
        if of_docname(self.env.docname) == lesson:
            card += download_links(lesson, self.env.docname)
        return [card]


def download_links(lesson: Lesson, docname: str) -> nodes.paragraph:
    line = paragraph(_("Download: "), "downloads", "not-in-downloads")
    names = [f"{lesson.download}.{extension}" for extension in ("py", "ipynb", "zip")]
    for number, name in enumerate([*names, *(path.name for path in lesson.helpers())]):
        line += [nodes.Text(" · ")] * (number > 0)
        line += download_link(name, docname)
    return line


def download_link(name: str, docname: str) -> nodes.raw:
    uri = "../" * docname.count("/") + f"downloads/{name}"
    return nodes.raw(
        "", f'<a class="reference internal" href="{uri}" download>{name}</a>', format="html"
    )


class LessonDownloads(SphinxDirective):
    """``.. lesson-downloads::``: what to download, at the end of a lesson's page."""

    def run(self):
        links = download_links(of_docname(self.env.docname), self.env.docname)
        # In a container: what a directive returns itself would enter the catalogs.
        return [nodes.container("", links, classes=["not-in-downloads"])]


class LessonCards(SphinxDirective):
    """``.. lesson-cards:: part``: a card for each lesson of a part."""

    required_arguments = 1

    def run(self):
        cards = nodes.container(classes=["lesson-cards"])
        for lesson in find().values():
            if lesson.part == self.arguments[0]:
                cards += self.card(lesson)
        if not cards.children:
            raise self.error(f"no lesson in part '{self.arguments[0]}'")
        return [cards]

    def card(self, lesson):
        lesson_named(self, lesson.stem)
        domain = docname_to_domain(lesson.docname, self.config.gettext_compact)
        for folder in self.config.locale_dirs:
            catalog = Path(folder, self.config.language, "LC_MESSAGES", f"{domain}.po")
            if catalog.exists():  # a missing dependency would be read in every build
                self.env.note_dependency(str(catalog))
        card = nodes.container(classes=["lesson-card"], docname=lesson.docname)
        run = runs.current(lesson.stem)
        if run.recording and run.recording.figure(1).exists():
            card += nodes.image(uri=inked(lesson.stem, 1, "muted"), alt="")
        return card


def fill_lesson_cards(app, doctree, docname) -> None:
    """Write each card's title and first paragraph, translated by now."""
    for card in doctree.findall(nodes.container):
        if "lesson-card" not in card["classes"]:
            continue
        target = card["docname"]
        title = app.env.titles[target].astext()
        uri = app.builder.get_relative_uri(docname, target)
        link = nodes.reference("", title, refuri=uri, internal=True)
        intro = next(app.env.get_doctree(target).findall(nodes.paragraph)).astext()
        card += [nodes.paragraph("", "", link, classes=["lesson-title"]), paragraph(intro)]


def link_to(lesson: Lesson, docname: str, rawtext: str = "") -> addnodes.pending_xref:
    """A reference, from a page, that Sphinx will show as the lesson's translated title."""
    xref = addnodes.pending_xref(
        rawtext,
        refdomain="std",
        reftype="doc",
        reftarget="/" + lesson.docname,
        refexplicit=False,
        refdoc=docname,
        refwarn=True,
    )
    xref += nodes.inline(rawtext, lesson.stem, classes=["xref", "std", "std-doc"])
    return xref


class LessonRole(SphinxRole):
    """``:lesson:`softmax```: a link to a lesson by its stem, with its title."""

    def run(self):
        lesson = find().get(self.text)
        if lesson is None:
            raise ExtensionError(f"{self.env.docname}: there is no lesson '{self.text}'")
        return [link_to(lesson, self.env.docname, self.rawtext)], []


class ExerciseRole(SphinxRole):
    """``:exercise:`rotary```: the starter file of a project, to download."""

    def run(self):
        if self.text not in [path.stem for path in exercises()]:
            raise ExtensionError(f"{self.env.docname}: there is no exercise '{self.text}'")
        return [download_link(f"{self.text}.py", self.env.docname)], []


class Recordings(SphinxDirective):
    """``.. recordings::``: every recording there is, and whether it fits the code."""

    def run(self):
        header = [_("GPU"), _("Lesson"), _("Date"), _("Versions"), _("State")]
        rows = []
        folders = sorted(runs.COMMITTED.glob("*/"))
        for folder, lesson in itertools.product(folders, find().values()):
            home = folder / lesson.stem
            if not home.is_dir():
                continue
            self.env.note_dependency(str(home / "manifest.json"))
            runs.depend(self.env, lesson.stem)
            manifest, state = {}, _("valid")
            try:
                manifest = recordings.read(home).manifest
                runs.load(home, lesson)
            except recordings.RecordingError as error:
                state = f"{_('stale')}: {error}"
            gpu = manifest["gpu"]["name"] if manifest else home.parent.name
            link = nodes.paragraph("", "", link_to(lesson, self.env.docname))
            rows.append([gpu, link, manifest.get("date", "—"), versions(manifest), state])
        return [table(header, rows)]


def table(header: list[str], rows: list[list[str | nodes.Node]]) -> nodes.table:
    """A table; its cells are texts, or paragraphs that are made already."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in header), cols=len(header))
    for kind, lines in ((nodes.thead, [header]), (nodes.tbody, rows)):
        part = kind()
        for line in lines:
            cells = (paragraph(cell) if isinstance(cell, str) else cell for cell in line)
            part += nodes.row("", *(nodes.entry("", cell) for cell in cells))
        group += part
    return nodes.table("", group)


def setup(app):
    app.add_directive("recorded-card", RecordedCard)
    app.add_directive("lesson-downloads", LessonDownloads)
    app.add_directive("lesson-cards", LessonCards)
    app.add_directive("recordings", Recordings)
    app.add_role("lesson", LessonRole())
    app.add_role("exercise", ExerciseRole())
    app.connect("doctree-resolved", fill_lesson_cards)
    return {"parallel_read_safe": True}
