"""Directives that show a recording's texts and measurements on any page."""

from functools import partial

import runs
from cards import lesson_named, table
from docutils import nodes
from docutils.parsers.rst import directives
from measured import Query, QueryError, ask, quantity
from recordings import case
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

log = logging.getLogger(__name__)


class RecordedExcerpt(SphinxDirective):
    """``.. recorded-excerpt:: lesson name`` with ``:language:`` for its colours."""

    required_arguments = 2
    option_spec = {"language": directives.unchanged}

    def run(self):
        stem, name = self.arguments
        lesson_named(self, stem)
        run = runs.current(stem)
        path = run.recording and run.recording.excerpt(name)
        if not path or not path.exists():
            message = f"{self.env.docname}: {stem} has no recorded excerpt '{name}' {run.reason}"
            if run.state == "recorded":
                raise ExtensionError(message)
            log.warning("%s", message, type="recordings")
            return [nodes.paragraph("", "", nodes.Text("—"))]
        text = path.read_text("utf-8")
        return [nodes.literal_block(text, text, language=self.options.get("language", "none"))]


class RecordedTable(SphinxDirective):
    """``.. recorded-table:: lesson metric=GB/s KEY=value``: cases × providers."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        stem, _, conditions = self.arguments[0].partition(" ")
        lesson_named(self, stem)
        where = f"{self.env.docname}: recorded-table '{self.arguments[0]}'"
        try:
            query = Query.parse(f"{stem} any {conditions}")
        except QueryError as error:
            raise ExtensionError(f"{where}: {error}") from None
        header, lines = ask(query, partial(cases, query), where) or (["—"], [["—"]])
        return [table(header, lines)]


def cases(query: Query, results: list[dict]) -> tuple[list, list[list]]:
    """Header and lines: a column for each varying case key, then one per provider."""
    everyone = dict.fromkeys(row["provider"] for row in results)
    rows = [row for provider in everyone for row in query.rows(results, provider)]
    if not rows:
        raise QueryError("no row matches")
    keys = [k for k in case(rows[0]) if k != "bytes" and len({row.get(k) for row in rows}) > 1]
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    values = {}
    for row in rows:
        line = values.setdefault(tuple(row.get(key) for key in keys), {})
        line[row["provider"]] = quantity(row["value"], row["metric"])
    lines = [[*map(cell, k), *(line.get(p, "") for p in providers)] for k, line in values.items()]
    return [*map(cell, keys), *providers], lines


def cell(value) -> nodes.paragraph:
    """A number as it is; a name, which is the same in each language, as code."""
    text = nodes.literal("", value) if isinstance(value, str) else nodes.Text(str(value))
    return nodes.paragraph("", "", text)


def setup(app):
    app.add_directive("recorded-excerpt", RecordedExcerpt)
    app.add_directive("recorded-table", RecordedTable)
    return {"parallel_read_safe": True}
