"""Measured numbers in prose: the ``measured`` role reads them from a recording.

softmax triton metric=GB/s N=4096 dtype=bfloat16      a value with its unit
softmax triton/torch metric=GB/s N=4096               a speed-up
softmax min(triton/torch) metric=GB/s N>=2**20        the worst of several
softmax geomean(triton/torch) metric=us               their geometric mean
"""

import math
import operator
import re
from dataclasses import dataclass

import runs
from docutils import nodes
from lessons import find
from recordings import case
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

log = logging.getLogger(__name__)

UNITS = {"GB/s": "GB/s", "TFLOP/s": "TFLOP/s", "us": "µs"}
OPERATORS = {
    "=": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
WHAT = re.compile(r"(?:(?P<how>min|geomean)\()?(?P<a>[^\s/()]+)(?:/(?P<b>[^\s/()]+))?(?(how)\))")
CONDITION = re.compile(r"(?P<key>\w+)(?P<op>>=|<=|=|>|<)(?P<value>\S+)")


class QueryError(ValueError):
    """A query that is malformed or does not match the results."""


@dataclass(frozen=True)
class Query:
    lesson: str
    how: str | None
    a: str
    b: str | None
    metric: str
    conditions: tuple

    @classmethod
    def parse(cls, text: str) -> "Query":
        lesson, what, *conditions = text.split() + [""] * (2 - len(text.split()))
        match = WHAT.fullmatch(what)
        parsed = [CONDITION.fullmatch(c) for c in conditions]
        if not match or not all(parsed):
            raise QueryError("write: lesson provider[/provider] metric=… KEY=value …")
        if match["how"] and not match["b"]:
            raise QueryError(f"{match['how']}() takes a ratio of two providers")
        parts = [(c["key"], c["op"], _value(c["value"])) for c in parsed]
        metrics = [value for key, op, value in parts if key == "metric" and op == "="]
        if len(metrics) != 1:
            raise QueryError("name one metric, as in metric=GB/s")
        conditions = tuple(part for part in parts if part[0] != "metric")
        return cls(lesson, match["how"], match["a"], match["b"], metrics[0], conditions)

    def rows(self, results: list[dict], provider: str) -> list[dict]:
        return [
            row
            for row in results
            if (row["provider"], row["metric"]) == (provider, self.metric)
            and all(k in row and OPERATORS[op](row[k], v) for k, op, v in self.conditions)
        ]

    def answer(self, results: list[dict]) -> str:
        """The number as text. Raises QueryError as `value` does."""
        value = self.value(results)
        return f"{value:.2f}×" if self.b else quantity(value, self.metric)

    def value(self, results: list[dict]) -> float:
        """The number. Raises QueryError unless exactly one row or pair matches."""
        rows = self.rows(results, self.a)
        if self.b is None:
            return _only(rows)["value"]
        if self.metric not in UNITS:
            raise QueryError(f"a ratio needs a rate or a time, not {self.metric}")
        others = {_key(row): row for row in self.rows(results, self.b)}
        if {_key(row) for row in rows} != set(others):
            raise QueryError(f"{self.a} and {self.b} were not measured in the same cases")
        ratios = [row["value"] / others[_key(row)]["value"] for row in rows]
        if self.metric == "us":
            ratios = [1 / ratio for ratio in ratios]
        if not ratios:
            raise QueryError("no row matches")
        if self.how == "min":
            return min(ratios)
        if self.how == "geomean":
            return math.prod(ratios) ** (1 / len(ratios))
        return _only(ratios)


def quantity(value: float, metric: str) -> str:
    """Three digits and the unit; counts as they are."""
    if metric not in UNITS:
        return f"{value:.10g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{digits}f}\N{NO-BREAK SPACE}{UNITS[metric]}"


def _value(text: str):
    if match := re.fullmatch(r"(\d+)(?:\*\*(\d+))?", text):
        return int(match[1]) ** int(match[2] or 1)
    try:
        return float(text)
    except ValueError:
        return text


def _key(row: dict) -> tuple:
    return tuple(sorted(case(row).items()))


def _only(rows: list):
    if len(rows) != 1:
        raise QueryError(f"{len(rows) or 'no'} rows match; the query must match exactly one")
    return rows[0]


class Measured(SphinxRole):
    def run(self):
        if self.env.app.builder.name == "gettext":
            return [nodes.inline(self.rawtext, self.text)], []
        where = f"{self.env.docname}: measured '{self.text}'"
        try:
            query = Query.parse(self.text)
        except QueryError as error:
            raise ExtensionError(f"{where}: {error}") from None
        if query.lesson not in find():
            raise ExtensionError(f"{where}: there is no lesson '{query.lesson}'")
        runs.depend(self.env, query.lesson)
        answer = ask(query, query.answer, where) or "—"
        return [nodes.inline(self.rawtext, answer, classes=["measured"])], []


def ask(query: Query, question, where: str):
    """``question(results)`` of the run shown, or None with a warning where it has no answer.

    The committed recording must have it: there a QueryError stops the build.
    Another GPU may lack a case, because it has too little memory, say.
    """
    run = runs.current(query.lesson)
    if not run.on_gpu:
        log.warning("%s: %s", where, run.reason, type="measured")
        return None
    try:
        return question(run.recording.results)
    except QueryError as error:
        if run.state == "recorded":
            raise ExtensionError(f"{where}: {error}") from None
        log.warning("%s: %s (this GPU's run)", where, error, type="measured")
        return None


def setup(app):
    app.add_role("measured", Measured())
    return {"parallel_read_safe": True}
