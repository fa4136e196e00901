"""The directive ``proofs``: what the proofs in tests/ found on the GPU that pages show."""

import json

import runs
from cards import link_to, paragraph, table, versions
from docutils import nodes
from lessons import find
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
        lines = [self.line(stem, proofs, sanitizer) for stem in find()]
        where = _("Recorded on {gpu}, {date}").format(**proofs)
        card = nodes.container(classes=["run-card", "run-recorded"])
        card += [paragraph(where, "run-title"), paragraph(versions(proofs))]
        return [table(header + list(TOOLS), [line for line in lines if line]), card]

    def line(self, stem, *summaries):
        """What both summaries say about a lesson's operators."""
        rows = [row for summary in summaries for row in summary["operators"]]
        rows = [row for row in rows if row["operator"].partition(" ")[0] == stem]
        if not rows:
            return []
        runs.depend(self.env, stem)
        link = nodes.paragraph("", "", link_to(find()[stem], self.env.docname))
        operators = {row["operator"] for row in rows}
        if any(row["code"] != find()[stem].code_hash() for row in rows):
            return [link, str(len(operators)), _("stale"), *["—"] * (len(COUNTS) + len(TOOLS) - 1)]
        counts = [sum(row[name] for row in rows if name in row) for name in COUNTS + TOOLS]
        return [link, str(len(operators)), *(f"{count:,}" for count in counts)]

    def load(self, path):
        if path.exists():  # a missing dependency would be read in every build
            self.env.note_dependency(str(path))
        return json.loads(path.read_text("utf-8")) if path.exists() else None


def setup(app):
    app.add_directive("proofs", Proofs)
    return {"parallel_read_safe": True}
