"""debugging: each error shows its symptom, the checker finds those of addresses, repairs repair."""

import re

import lesson_code
import pytest
from alone import run_alone

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SCRIPT = lesson_code.find()["debugging"]
CHECKER = lesson_code.EXAMPLES / "tools" / "triton_memcheck.py"
WINDOW = [[8 * row + col for col in range(6)] for row in range(4)]
# What a case returns, on any device.
SYMPTOMS = {
    "missing_mask": "doubled 1024, as they were 0",
    "shape_as_stride": [[6 * row + col for col in range(6)] for row in range(4)],
    "wrong_other": 0.0,
    "wrong_axis": "[24, 28, 32, 36], expected [6, 22, 38, 54]",
}
# What is reported, and what a repaired kernel returns.
REPORTS = {
    "missing_mask": {"load of x_ptr out of bounds", "store of out_ptr out of bounds"},
    "shape_as_stride": {"load of x_ptr out of bounds"},
    "int32_overflow": {"load of x_ptr out of bounds"},
    "one_place": {"load of out_ptr in conflict", "store of out_ptr in conflict"},
}
REPAIRED = {
    "missing_mask": "doubled 1003, as they were 21",
    "shape_as_stride": str(torch.tensor(WINDOW)).splitlines()[0],
    "one_place": "16384 of 16384",
    "wrong_other": "-1.0",
    "wrong_axis": "[6, 22, 38, 54], expected [6, 22, 38, 54]",
}


@pytest.mark.parametrize("case", SYMPTOMS)
def test_symptoms(device, case):
    found = getattr(lesson_code.load("debugging"), case)()
    assert (found.tolist() if torch.is_tensor(found) else found) == SYMPTOMS[case]


def test_sums_are_right_or_lost(device):
    total = lesson_code.load("debugging").one_place()
    assert total == "16384 of 16384" if device == "cpu" else total.endswith(" of 16384")


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    (folder / CHECKER.name).write_bytes(CHECKER.read_bytes())
    return run_alone("debugging", folder)


def test_what_the_checker_reports(printed):
    for case, expected in REPORTS.items():
        found = re.findall(
            rf"^{case}\.py:\d+: (\w+ of \w+ (?:out of bounds|in conflict))", printed, re.M
        )
        assert set(found) == expected and len(found) == len(expected)
    assert set(re.findall(r"^(\w+?)(?:_changed)?\.py:\d+: ", printed, re.M)) == set(REPORTS)


def test_what_repairs_do(printed):
    repaired = re.findall("^repaired: (.*)$", printed, re.M)
    overflow = repaired.pop(2)
    assert repaired == list(REPAIRED.values())
    assert overflow == "MemcheckError: 2 found"  # its tensor is too short on purpose
    offsets = re.findall(r"x_ptr\[(-?\d{10})\]", printed)
    assert list(map(int, offsets)) == [2**30, -(2**31), 2**30, 2**31]


def test_breakpoint_print_and_assert(printed):
    assert re.search(r"^\(pdb\) p x\narray\(\[-1.* 0\.,  0\.,  0\.\]", printed, re.M)
    assert "sums:  [24 28 32 36]" in printed
    assert "static_assert: InterpreterError: AssertionError" in printed


def test_no_path_or_address_is_printed(printed):
    assert not re.search(r"/tmp|/home|/root|0x|\w+/\w+\.py|-- end --", printed)


def test_without_the_checker(tmp_path):
    said = run_alone(
        "debugging", tmp_path, PYTHONBREAKPOINT="0", TRITON_INTERPRET=""
    )  # set by somebody else
    assert re.search("^Left out.*triton_memcheck.py", said, re.M)
    assert "Memcheck" not in said and "pdb" in said
