"""What the proofs launch also compiles for each kind of GPU, and fits its shared memory.

The variants are those that really occur: the proofs' cases are launched, but instead of being
interpreted, the arguments are kept, and specialised as Triton does.
"""

import contextlib
import random

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from cases import check, draw  # noqa: E402
from compile_only import TARGETS, Job, compile_kernels  # noqa: E402
from operators import OPERATORS  # noqa: E402
from test_compile import SHARED  # noqa: E402
from test_operators import INTERPRETED, lesson_of  # noqa: E402
from triton.runtime import interpreter, jit  # noqa: E402

CASES, COMPILED = 200, 2  # drawn, and of their variants compiled, for each operator
NVIDIA_ONLY = {"gemm gemm in TF32"}


def specialised(value):
    """The type of an argument, ":16" behind it if a pointer or number is a multiple of 16."""
    kind = jit.mangle_type(value)
    number = value.data_ptr() if hasattr(value, "data_ptr") else value
    whole = isinstance(number, int) and not isinstance(number, bool) and number % 16 == 0
    return f"{kind}:16" if whole else kind


def variant(executor, positional, named) -> tuple:
    """Arguments, constants and options of a launch, to compare."""
    values = dict(zip(executor.arg_names, positional)) | named
    arguments, constants = {}, {}
    for name in executor.arg_names:
        value = values.pop(name)
        if isinstance(value, triton.language.dtype):
            value = {"dtype": value.name}
        integer = isinstance(value, int) and not isinstance(value, bool)
        if name in executor.constexprs or value is None or integer and value == 1:
            constants[name] = value
        else:
            arguments[name] = specialised(value)
    options = {k: v for k, v in values.items() if k in ("num_warps", "num_stages", "maxnreg")}
    return arguments, constants, options


def launched(operator, monkeypatch) -> dict[str, list]:
    """The different variants of each kernel that drawn cases launch."""
    found = {}

    def keep(executor, *positional, **named):
        variants = found.setdefault(executor.fn.__name__, [])
        new = variant(executor, positional, named)
        if new not in variants:
            variants.append(new)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", keep)
    lesson, rng = lesson_of(operator), random.Random(operator.name)
    for _ in range(CASES):
        with contextlib.suppress(AssertionError):  # nothing is computed
            check(operator, lesson, draw(rng, operator), "cpu")
    return found


@pytest.mark.full
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
@pytest.mark.parametrize("name", INTERPRETED)
def test_what_is_launched_compiles(device, name, monkeypatch):
    operator = OPERATORS[name]
    found = launched(operator, monkeypatch)
    every = [(kernel, *v) for kernel, variants in found.items() for v in variants]
    assert every
    rng = random.Random(name)
    chosen = rng.sample(every, min(COMPILED, len(every)))
    targets = [t for t in TARGETS if t.startswith("sm_") or name not in NVIDIA_ONLY]
    jobs = [Job(operator.lesson, k, t, a, c, o) for k, a, c, o in chosen for t in targets]
    for job, report in zip(jobs, compile_kernels(jobs)):
        assert report.shared <= SHARED[job.target], job
