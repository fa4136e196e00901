"""The directive ``proofs``: what the proofs in tests/ found on the GPU that pages show."""

import itertools
import json

import runs
from cards import link_to, paragraph, table, versions
from docutils import nodes
from lessons import find
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

COUNTS = ("cases", "refused", "failures")
TOOLS = ("memcheck", "racecheck")


def lesson_of(row: dict) -> str:
    return row["operator"].partition(" ")[0]


class Proofs(SphinxDirective):
    """``.. proofs::``: cases, refusals and failures by lesson, and what the sanitizer found."""

    def run(self):
        home = runs.COMMITTED / runs.recorded_gpu
        proofs, sanitizer = (self.load(home / f"{name}.json") for name in ("proofs", "sanitizer"))
        under = {row["operator"]: row for row in sanitizer["operators"]}
        header = [_("Lesson"), _("Operators"), _("Cases"), _("of them refused"), _("Failures")]
        lines = []
        for stem, group in itertools.groupby(proofs["operators"], lesson_of):
            runs.depend(self.env, stem)
            rows = [row | under[row["operator"]] | row for row in group]
            counts = [sum(row[name] for row in rows) for name in (*COUNTS, *TOOLS)]
            cells = [str(len(rows)), *(f"{count:,}" for count in counts)]
            if any(row["code"] != find()[stem].code_hash() for row in rows):
                cells = [_("stale")] + ["—"] * (len(header) + len(TOOLS) - 2)
            lines.append([nodes.paragraph("", "", link_to(find()[stem], self.env.docname)), *cells])
        where = _("Recorded on {gpu}, {date}").format(**proofs)
        card = nodes.container(classes=["run-card", "run-recorded"])
        card += [paragraph(where, "run-title"), paragraph(versions(proofs))]
        return [table(header + list(TOOLS), lines), card]

    def load(self, path):
        self.env.note_dependency(str(path))
        return json.loads(path.read_text("utf-8"))


def setup(app):
    app.add_directive("proofs", Proofs)
    return {"parallel_read_safe": True}
