"""The directive ``proofs``: what the proofs in tests/ found on the GPU that pages show."""

import json

import runs
from cards import link_to, paragraph, table, versions
from docutils import nodes
from lessons import find
from recorded import cell
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

COUNTS = ("proven", "refused", "failures")
TOOLS = ("memcheck", "racecheck")


class Proofs(SphinxDirective):
    """``.. proofs::``: cases, refusals and failures by lesson, and what the sanitizer found."""

    def run(self):
        home = runs.COMMITTED / runs.recorded_gpu
        proofs, sanitizer = (self.load(home / f"{name}.json") for name in ("proofs", "sanitizer"))
        if not proofs or not sanitizer:
            # In a container: what a directive returns itself would enter the catalogs.
            return [nodes.container("", paragraph(_("No proofs are recorded for this GPU.")))]
        header = [_("Lesson"), _("Operators"), _("Cases"), _("of them refused"), _("Failures")]
        header += [_("under the sanitizer"), *map(cell, TOOLS)]
        lines = [self.line(stem, proofs, sanitizer) for stem in find()]
        where = _("Recorded on {gpu}, {date}").format(**proofs)
        card = nodes.container(classes=["run-card", "run-recorded"])
        card += [paragraph(where, "run-title"), paragraph(versions(proofs))]
        return [table(header, [line for line in lines if line]), card]

    def line(self, stem, *summaries):
        """What both summaries say about a lesson's operators."""
        proven, sanitized = (
            [row for row in summary["operators"] if row["operator"].partition(" ")[0] == stem]
            for summary in summaries
        )
        if not proven + sanitized:
            return []
        runs.depend(self.env, stem)
        link = nodes.paragraph("", "", link_to(find()[stem], self.env.docname))
        if any(row["code"] != find()[stem].code_hash() for row in proven + sanitized):
            return [link, _("stale"), *["—"] * (len(COUNTS) + len(TOOLS) + 1)]
        cells = []
        for rows, names in ((proven, COUNTS), (sanitized, TOOLS)):
            sums = [len(rows), *(sum(row[name] for row in rows) for name in names)]
            cells += [f"{count:,}" if rows else "—" for count in sums]
        return [link, *cells]

    def load(self, path):
        if path.exists():  # a missing dependency would be read in every build
            self.env.note_dependency(str(path))
        return json.loads(path.read_text("utf-8")) if path.exists() else None


def setup(app):
    app.add_directive("proofs", Proofs)
    return {"parallel_read_safe": True}
