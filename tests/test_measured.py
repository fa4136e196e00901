"""A ``measured`` query gives one number of the recording, or says why it cannot."""

import mini_site  # noqa: F401  (makes docs/_ext importable)
import pytest
from measured import Query, QueryError, quantity


def row(provider, n, value, metric="GB/s"):
    return {"provider": provider, "metric": metric, "N": n, "dtype": "float32", "value": value}


RESULTS = [
    row("triton", 2**20, 3000.0),
    row("torch", 2**20, 2000.0),
    row("triton", 2**22, 4000.0),
    row("torch", 2**22, 1000.0),
    row("torch.compile", 2**22, 4123.4),
    row("triton", 2**20, 10.0, "us"),
    row("torch", 2**20, 15.0, "us"),
    row("triton", 2**20, 3, "launches"),
    row("torch", 2**20, 9, "launches"),
]


@pytest.mark.parametrize(
    "query, answer",
    [
        ("triton metric=GB/s N=2**20", "3000\xa0GB/s"),
        ("triton metric=GB/s N=1048576 dtype=float32", "3000\xa0GB/s"),
        ("torch.compile metric=GB/s", "4120\xa0GB/s"),
        ("triton/torch metric=GB/s N=2**20", "1.50×"),
        ("triton/torch metric=us", "1.50×"),
        ("min(triton/torch) metric=GB/s", "1.50×"),
        ("min(triton/torch) metric=GB/s N>2**20", "4.00×"),
        ("geomean(triton/torch) metric=GB/s N>=2**20", "2.45×"),
        ("triton metric=launches", "3"),
    ],
)
def test_answer(query, answer):
    assert Query.parse(f"lesson {query}").answer(RESULTS) == answer


@pytest.mark.parametrize(
    "query, message",
    [
        ("triton metric=GB/s", "2 rows match"),
        ("triton metric=GB/s N=3", "no rows match"),
        ("vendor metric=GB/s", "no rows match"),
        ("triton/torch metric=GB/s", "2 rows match"),
        ("triton/torch.compile metric=GB/s", "not measured in the same cases"),
        ("min(triton/torch) metric=GB/s N>2**30", "no row matches"),
        ("triton/torch metric=launches", "a ratio needs a rate or a time"),
        ("triton metric=GB/s M=4", "no rows match"),
    ],
)
def test_no_answer(query, message):
    with pytest.raises(QueryError, match=message):
        Query.parse(f"lesson {query}").answer(RESULTS)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "write: lesson"),
        ("lesson", "write: lesson"),
        ("lesson triton", "name one metric"),
        ("lesson triton metric=us metric=GB/s", "name one metric"),
        ("lesson triton metric=us N", "write: lesson"),
        ("lesson max(triton/torch) metric=us", "write: lesson"),
        ("lesson min(triton) metric=us", "takes a ratio"),
        ("lesson min(triton/torch metric=us", "write: lesson"),
    ],
)
def test_malformed(text, message):
    with pytest.raises(QueryError, match=message):
        Query.parse(text)


@pytest.mark.parametrize(
    "value, metric, text",
    [
        (4318.2, "GB/s", "4320\xa0GB/s"),
        (999.6, "GB/s", "1000\xa0GB/s"),
        (58.349, "us", "58.3\xa0µs"),
        (7.2, "us", "7.20\xa0µs"),
        (0.01234, "TFLOP/s", "0.0123\xa0TFLOP/s"),
        (0, "GB/s", "0\xa0GB/s"),
        (16777216, "bytes", "16777216"),
    ],
)
def test_quantity(value, metric, text):
    assert quantity(value, metric) == text
