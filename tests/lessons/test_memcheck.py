"""The memory checker: it finds what is wrong, is silent on what is right, and says what it needs."""

import inspect
import itertools
import math
import os
import re
import subprocess
import sys

import lesson_code
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

TOOLS = lesson_code.EXAMPLES / "tools"
sys.path.append(str(TOOLS))
import triton_memcheck  # noqa: E402
from triton_memcheck import MemcheckError, memcheck  # noqa: E402


def problems(kernel, grid, *arguments, **options):
    """What is found in one launch; the error holds the same list."""
    try:
        with memcheck() as found:
            kernel[grid](*arguments, **options)
    except MemcheckError as error:
        assert error.problems is found and found
        return found
    assert not found
    return found


def seen(found):
    return [(p.kind, p.tensor, p.offsets, p.program, p.rival) for p in found]


def line_of(kernel, text):
    lines, first = inspect.getsourcelines(kernel.fn)
    [number] = [i for i, line in enumerate(lines) if text in line]
    return first + number


# Out of bounds


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x, mask=offs < n)


def test_load_and_store():
    room = torch.full((40,), -1.0)
    x, out = torch.arange(10.0), room[8:18]
    found = problems(copy_kernel, (2,), x, out, 12, BLOCK=8)
    assert seen(found) == [
        ("load", "x_ptr", [10, 11], (1, 0, 0), None),
        ("store", "out_ptr", [10, 11], (1, 0, 0), None),
    ]
    assert torch.equal(out, x) and torch.equal(room[18:], torch.full((22,), -1.0))
    assert {p.file for p in found} == {__file__}
    assert [p.line for p in found] == [line_of(copy_kernel, t) for t in ("tl.load", "tl.store")]


def test_message():
    with pytest.raises(MemcheckError) as caught, memcheck():
        copy_kernel[(5,)](torch.ones(1), torch.ones(40), 40, BLOCK=8)
    line = line_of(copy_kernel, "tl.load")
    assert str(caught.value).splitlines() == [
        "5 found",
        f"test_memcheck.py:{line}: load of x_ptr out of bounds: shape (1,), stride (1,)",
        "        x = tl.load(x_ptr + offs, mask=offs < n)",
        "    program (0, 0, 0): x_ptr[1 .. 7]",
        "    program (1, 0, 0): x_ptr[8 .. 15]",
        "    program (2, 0, 0): x_ptr[16 .. 23]",
        "    and 2 more here",
    ]


def test_offsets_with_gaps_are_counted():
    found = problems(probe_kernel, (1,), torch.ones(6, 8)[:2, :6], 0, BLOCK=16)
    assert str(found[0]) == "program (0, 0, 0): x_ptr[6 .. 15, 4 of them]"


def test_silent_and_right_where_all_is_right():
    x, out = torch.randn(1003), torch.full((1003,), math.nan)
    assert not problems(copy_kernel, (4,), x, out, 1003, BLOCK=256)
    assert torch.equal(out, x)


@triton.jit
def far_kernel(x_ptr, n, far):
    tl.store(x_ptr + far, tl.load(x_ptr - far))
    tl.atomic_add(x_ptr + far, 1)
    tl.atomic_cas(x_ptr + far, 0, 1)
    tl.store(x_ptr + n, 5)


@pytest.mark.parametrize("far", [1, 2, 2**20, 2**40, -(2**40), 2**61 - 1])
def test_any_distance_and_the_kernel_goes_on(far):
    x = torch.zeros(1, dtype=torch.int32)
    found = problems(far_kernel, (1,), x, 0, far)
    assert [p.kind for p in found] == ["load", "store", "atomic", "atomic"]
    assert [p.offsets for p in found][:2] == [[-far], [far]]
    assert x.item() == 5


@triton.jit
def swap_kernel(x_ptr, old_ptr):
    offs = tl.arange(0, 4)
    old = tl.atomic_cas(x_ptr + offs, offs, offs + 10)
    tl.store(old_ptr + offs, old)


def test_compare_and_swap_is_done_where_it_is_right():
    room, old = torch.arange(4, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    [found] = problems(swap_kernel, (1,), room[:3], old)
    assert found.offsets == [3]
    assert room.tolist() == [10, 11, 12, 3] and old.tolist() == [0, 1, 2, 3]


# Views


@triton.jit
def probe_kernel(x_ptr, first, BLOCK: tl.constexpr):
    tl.load(x_ptr + first + tl.arange(0, BLOCK))


def out_of_bounds(view, first=-32, block=128):
    found = problems(probe_kernel, (1,), view, first, BLOCK=block)
    return {offset for p in found for offset in p.offsets}


def cells(view):
    indices = itertools.product(*map(range, view.shape))
    return {sum(i * s for i, s in zip(index, view.stride())) for index in indices}


VIEWS = {
    "whole": lambda t: t,
    "offset": lambda t: t[3:],
    "window": lambda t: t[1:4, 2:5],
    "strided": lambda t: t[::2, ::3],
    "transposed": lambda t: t[:, 1:3].t(),
    "column": lambda t: t[:, 4],
    "stride 0": lambda t: t[:1].expand(5, 8),
    "scalar": lambda t: t[2, 2],
    "empty": lambda t: t[2:2],
    "3-D": lambda t: t.view(2, 3, 8)[:, ::2, 1:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.bfloat16])
def test_a_view_has_only_its_own_cells(view, dtype):
    view = view(torch.ones(6, 8, dtype=dtype))
    assert out_of_bounds(view) == set(range(-32, 96)) - cells(view)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    strides=st.tuples(*[st.integers(0, 9)] * 3),
    start=st.integers(0, 8),
)
def test_any_strides(shape, strides, start):
    view = torch.ones(96).as_strided(shape, strides[: len(shape)], start)
    assert out_of_bounds(view) == set(range(-32, 96)) - cells(view)


def test_a_neighbour_in_the_same_buffer_is_out_of_bounds():
    room = torch.zeros(16)
    found = problems(copy_kernel, (1,), room[:4], room[4:12], 8, BLOCK=8)
    assert seen(found) == [("load", "x_ptr", [4, 5, 6, 7], (0, 0, 0), None)]


# Ways to make a pointer


@triton.jit
def loop_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    for _ in tl.static_range(STEPS):
        tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)
        x_ptr += BLOCK
        out_ptr += BLOCK
        n -= BLOCK


@pytest.mark.parametrize("steps", [3, 4])
def test_pointers_that_move_in_a_loop(steps):
    x, out = torch.randn(23), torch.empty(32)[:23]
    assert not problems(loop_kernel, (1,), x, out, 23, BLOCK=8, STEPS=steps)
    assert torch.equal(x, out)
    found = problems(loop_kernel, (1,), x, torch.empty(32), 24, BLOCK=8, STEPS=3)
    assert seen(found) == [("load", "x_ptr", [23], (0, 0, 0), None)]


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, N, sxm, sxn, som, son, BLOCK: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * sxm + offs_n[None, :] * sxn, mask=mask)
    tl.store(out_ptr + offs_n[:, None] * som + offs_m[None, :] * son, x.T, mask=mask.T)


@pytest.mark.parametrize(
    "x", [torch.randn(7, 9), torch.randn(9, 20)[:, 3:16:2].t()], ids=["", "view"]
)
def test_two_dimensional_views(x):
    out = torch.full((20, 9), math.nan)[2:11, 1:8]
    strides = *x.stride(), *out.stride()
    assert not problems(transpose_kernel, (2, 3), x, out, 7, 9, *strides, BLOCK=4)
    assert torch.equal(out, x.t())
    assert problems(transpose_kernel, (2, 3), x, out, 7, 10, *strides, BLOCK=4)
    assert problems(transpose_kernel, (2, 3), x, out, 7, 9, *strides[:2], 7, 1, BLOCK=4)


@triton.jit
def double_at(ptr):
    tl.store(ptr, 2 * tl.load(ptr))


@triton.jit
def calling_kernel(x_ptr, at):
    double_at(x_ptr + at)


def test_the_line_is_in_the_function_that_was_called():
    found = problems(calling_kernel, (1,), torch.ones(2), 2)
    assert {p.line for p in found} == {line_of(double_at, "tl.store")}
    assert not problems(calling_kernel, (1,), torch.ones(2), 1)


@triton.jit
def where_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.load(tl.where(offs % 2 == 0, x_ptr, y_ptr) + offs, mask=offs < n)


def test_a_choice_between_two_tensors_may_be_either():
    x, y = torch.ones(7), torch.ones(8)
    assert not problems(where_kernel, (1,), x, y, 8, BLOCK=8)
    [found] = problems(where_kernel, (1,), x[:2], y[:2], 2**20, BLOCK=8)
    assert (found.tensor, found.rule) == ("?", "at an address in no tensor argument")
    assert not problems(where_kernel, (1,), x, x, 7, BLOCK=8)


@triton.jit
def merge_kernel(x_ptr, y_ptr, JOIN: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    if JOIN:
        tl.load(tl.join(x_ptr + offs, y_ptr + offs))
    else:
        tl.load(tl.cat(x_ptr + offs, y_ptr + offs, can_reorder=True))


@pytest.mark.parametrize("join", [True, False])
def test_joined_pointers_may_be_into_either(join):
    x, y = torch.ones(4), torch.ones(4)
    assert not problems(merge_kernel, (1,), x, y, join, BLOCK=4)
    [found] = problems(merge_kernel, (1,), x[:2], x[:2], join, BLOCK=4)
    assert found.tensor == "?"


@triton.jit
def number_kernel(x_ptr, at):
    address = x_ptr.to(tl.int64) + 4 * at
    tl.load(address.to(tl.pointer_type(tl.float32)))


def test_a_pointer_that_was_a_number():
    assert not problems(number_kernel, (1,), torch.ones(4), 3)
    [found] = problems(number_kernel, (1,), torch.ones(4), 4)
    assert found.tensor == "?"


@triton.jit
def recast_kernel(x_ptr, at):
    tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at)


def test_an_access_wider_than_an_element():
    x = torch.ones(7, dtype=torch.float16)
    assert not problems(recast_kernel, (1,), x, 2)
    [found] = problems(recast_kernel, (1,), x, 3)
    assert (found.tensor, found.offsets) == ("x_ptr", [6])
    [found] = problems(recast_kernel, (1,), x[1:], 0)  # its address is no multiple of 4
    assert found.offsets == [0]


@triton.jit
def extremes_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_max(x_ptr + offs % 8, offs.to(tl.float32), mask=offs < n)
    tl.atomic_min(x_ptr + offs, 3.0, mask=offs < n)


def test_atomics_on_floats():
    x = torch.zeros(12)
    assert not problems(extremes_kernel, (3,), x, 12, BLOCK=16)
    assert {p.kind for p in problems(extremes_kernel, (3,), x, 13, BLOCK=16)} == {"atomic"}


@triton.jit
def tuple_kernel(tensors, at):
    tl.load(tensors[0] + at)
    tl.load(tensors[1] + at)


def test_tuples():
    found = problems(tuple_kernel, (1,), (torch.ones(3), torch.ones(2)), 2)
    assert seen(found) == [("load", "tensors[1]", [2], (0, 0, 0), None)]


def test_keywords_and_reinterpreted_tensors():
    x, out = torch.ones(8, dtype=torch.int8), torch.zeros(4)
    found = problems(copy_kernel, (1,), triton.reinterpret(x, tl.uint8), n=5, out_ptr=out, BLOCK=8)
    assert seen(found) == [("store", "out_ptr", [4], (0, 0, 0), None)]


@triton.jit
def block_pointer_kernel(x_ptr, M, N, GUARDED: tl.constexpr):
    block = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (4, 4), (1, 0))
    block = tl.advance(block, (0, 4))
    if GUARDED:
        tl.load(block, boundary_check=(0, 1))
    else:
        tl.load(block)


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9),
    reason="this Triton has no block pointers",
)
def test_block_pointers():
    x = torch.ones(3, 6)
    assert not problems(block_pointer_kernel, (1,), x, 3, 6, GUARDED=True)
    [found] = problems(block_pointer_kernel, (1,), x, 3, 6, GUARDED=False)
    assert (found.tensor, found.offsets) == ("x_ptr", [18, 19, 22, 23, 24, 25])  # past the last row


@triton.jit
def descriptor_kernel(x, row):
    x.store([row, 4], 2 * x.load([row, 4]))


@triton.jit
def made_descriptor_kernel(x_ptr, M, N, row):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[2, 4])
    x.store([row, 4], 2 * x.load([row, 4]))


def test_tensor_descriptors():
    x = torch.ones(3, 8)
    descriptor = TensorDescriptor.from_tensor(x, [2, 4])
    assert not problems(descriptor_kernel, (1,), descriptor, 2)
    assert not problems(made_descriptor_kernel, (1,), x, 3, 8, 2)
    assert x.sum().item() == 24 + 4 + 8
    false = TensorDescriptor(x[:2], [3, 8], [8, 1], [2, 4])
    for found in (
        problems(descriptor_kernel, (1,), false, 1),
        problems(made_descriptor_kernel, (1,), x[:2], 3, 8, 1),
    ):
        assert [(p.kind, p.offsets) for p in found] == [
            ("load", [20, 21, 22, 23]),
            ("store", [20, 21, 22, 23]),
        ]


# Conflicts between programs


@triton.jit
def shared_kernel(x_ptr, y_ptr, FIRST: tl.constexpr, SECOND: tl.constexpr, at_first=0, at_second=0):
    if tl.program_id(0) == 0:
        if FIRST == "load":
            tl.load(x_ptr + at_first)
        elif FIRST == "store":
            tl.store(x_ptr + at_first, 1)
        else:
            tl.atomic_add(x_ptr + at_first, 1)
    if tl.program_id(0) == 1:
        if SECOND == "load":
            tl.load(y_ptr + at_second)
        elif SECOND == "store":
            tl.store(y_ptr + at_second, 1)
        else:
            tl.atomic_add(y_ptr + at_second, 1)


KINDS = "load", "store", "atomic"
HARMLESS = {("load", "load"), ("atomic", "atomic")}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_pairs(first, second):
    room = torch.zeros(9)
    for x, y in [(room, room), (room[1:5], room[1:7]), (room[2:4], room[2:4])]:
        found = problems(shared_kernel, (3,), x, y, first, second)
        if (first, second) in HARMLESS:
            assert not found
        else:
            assert seen(found) == [(second, "y_ptr", [0], (1, 0, 0), (0, 0, 0))]
    assert not problems(shared_kernel, (2,), room, room, first, second, 3, 4)


def test_parts_of_an_element():
    room = torch.zeros(8, dtype=torch.int32)
    halves = room.view(torch.int16)
    assert problems(shared_kernel, (2,), room, halves, "store", "load", 2, 5)
    assert not problems(shared_kernel, (2,), room, halves, "store", "load", 2, 6)


@triton.jit
def turns_kernel(x_ptr, WRITER: tl.constexpr):
    pid = tl.program_id(0)
    if pid == WRITER:
        tl.store(x_ptr, 1)
    else:
        tl.load(x_ptr)


@pytest.mark.parametrize("writer", range(4))
def test_one_writer_among_readers(writer):
    found = problems(turns_kernel, (4,), torch.zeros(1), writer)
    before, after = writer > 0, 3 - writer
    assert [p.kind for p in found] == ["store"] * before + ["load"] * after


def test_a_reader_is_not_forgotten_when_the_writer_reads_too():
    @triton.jit
    def kernel(x_ptr):
        tl.load(x_ptr)
        if tl.program_id(0) == 1:
            tl.store(x_ptr, 1)

    [found] = problems(kernel, (2,), torch.zeros(1))
    assert (found.kind, found.program, found.rival) == ("store", (1, 0, 0), (0, 0, 0))


@triton.jit
def arrive_kernel(x_ptr, count_ptr, LATE: tl.constexpr):
    pid = tl.program_id(0)
    if pid != LATE:
        tl.atomic_add(count_ptr, 1)
    if pid < 3:
        tl.load(x_ptr)
    else:
        tl.store(x_ptr, 1)


@pytest.mark.parametrize("late", range(3))
def test_a_reader_in_no_order_is_not_forgotten_behind_others(late):
    x, count = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    [found] = problems(arrive_kernel, (4,), x, count, late)
    assert (found.kind, found.program, found.rival) == ("store", (3, 0, 0), (late, 0, 0))
    assert not problems(arrive_kernel, (4,), x, count, -1)


def test_launches_come_one_after_the_other():
    x = torch.ones(8)
    with memcheck():
        for _ in range(2):
            copy_kernel[(2,)](x, x, 8, BLOCK=4)
        copy_kernel[(4,)](x, x, 8, BLOCK=2)


def test_programs_of_a_grid_in_three_dimensions():
    @triton.jit
    def kernel(x_ptr):
        if tl.program_id(0) == 1:
            tl.store(x_ptr, 1)

    found = problems(kernel, (2, 2, 2), torch.ones(1))
    assert [(p.program, p.rival) for p in found] == [
        ((1, 0, 1), (1, 0, 0)),
        ((1, 1, 0), (1, 0, 1)),
        ((1, 1, 1), (1, 1, 0)),
    ]


@triton.jit
def last_one_kernel(x_ptr, parts_ptr, out_ptr, count_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts_ptr + pid, tl.sum(tl.load(x_ptr + offs)))
    if tl.atomic_add(count_ptr, 1, sem=SEM) == 3:
        tl.store(out_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, 4))))
        tl.store(count_ptr, 0)


@pytest.mark.parametrize("sem", ["acq_rel", "relaxed"])
def test_the_last_program_reads_what_others_wrote(sem):
    x, out = torch.ones(32), torch.zeros(1)
    parts, count = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    found = problems(last_one_kernel, (4,), x, parts, out, count, sem, BLOCK=8)
    assert out.item() == 32 and count.item() == 0
    assert {p.tensor for p in found} == (set() if sem == "acq_rel" else {"parts_ptr", "count_ptr"})


@triton.jit
def locked_kernel(lock_ptr, total_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)
    tl.atomic_xchg(lock_ptr, 0)


def test_a_lock():
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    assert not problems(locked_kernel, (5,), lock, total)
    assert total.item() == 5


@triton.jit
def read_back_kernel(total_ptr, out_ptr):
    tl.atomic_add(total_ptr, 1.0)
    tl.store(out_ptr + tl.program_id(0), tl.load(total_ptr))


def test_an_atomic_sum_is_not_finished_when_it_is_read_back():
    found = problems(read_back_kernel, (3,), torch.zeros(1), torch.zeros(3))
    assert {p.tensor for p in found} == {"total_ptr"}


# What it does around the kernel


def test_errors_of_the_block():
    with pytest.raises(ZeroDivisionError), memcheck():
        raise ZeroDivisionError
    with pytest.raises(MemcheckError) as caught, memcheck():
        copy_kernel[(1,)](torch.ones(1), torch.ones(2), 2, BLOCK=2)
        raise ZeroDivisionError
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_block_in_a_block_is_refused():
    with pytest.raises(RuntimeError, match="one block at a time"), memcheck(), memcheck():
        pass
    assert problems(copy_kernel, (1,), torch.ones(1), torch.ones(2), 2, BLOCK=2)


def private_names():
    from triton.runtime import interpreter

    found = {}
    for name in triton_memcheck.PRIVATE:
        owner, _, attribute = ("." + name).rpartition(".")
        owner = getattr(interpreter, owner[1:]) if owner else interpreter
        found[name] = owner, attribute
    return found


def test_all_is_as_before_at_the_end():
    before = {name: getattr(*place) for name, place in private_names().items()}
    test_message()
    assert before == {name: getattr(*place) for name, place in private_names().items()}


@pytest.mark.parametrize("name", triton_memcheck.PRIVATE)
def test_a_private_name_that_is_gone(name, monkeypatch):
    monkeypatch.delattr(*private_names()[name])
    with pytest.raises(RuntimeError, match=f"written for Triton 3.6 and 3.7. .* has no {name}"):
        with memcheck():
            pass


@pytest.mark.parametrize("name", [n for n, p in triton_memcheck.PRIVATE.items() if p])
def test_a_parameter_that_is_gone(name, monkeypatch):
    monkeypatch.setattr(*private_names()[name], lambda *args: None)
    with pytest.raises(RuntimeError, match=f"has no {name}"), memcheck():
        pass


def run(code, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", **variables}
    environment["PYTHONPATH"] = str(TOOLS)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "first, why",
    [("", "not set"), ("import os, triton; os.environ['TRITON_INTERPRET']='1'", "too late")],
)
def test_outside_of_the_interpreter(first, why):
    child = run(f"{first}\nfrom triton_memcheck import memcheck\nwith memcheck(): pass")
    last = child.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: memcheck works in Triton's interpreter") and why in last


CHECK_LESSON = """
import runpy, sys
from triton.runtime import interpreter
from triton_memcheck import MemcheckError, memcheck
call = interpreter.GridExecutor.__call__
def launched(self, *args, **kwargs):
    print("launched", self.fn.__name__)
    return call(self, *args, **kwargs)
interpreter.GridExecutor.__call__ = launched
try:
    with memcheck():
        runpy.run_path(sys.argv[1], run_name="__main__")
except MemcheckError as error:
    if error.__cause__:
        raise
    for problem in error.problems:
        print("found", problem.place().splitlines()[0].split(": ", 1)[1], problem)
"""
GPU_ONLY = {"empty_kernel", "thread_kernel", "twice_promised_kernel", "specialised_kernel"}
# What a lesson does to show what happens then, or never in this process.
ON_PURPOSE = {
    "debugging": ".*",  # see test_debugging.py
    "diagnosis": r".* of [abc]_ptr .* shape \((24|32|40), (32|40|56)\).*",  # wrong masks
    "gemm": r".* of [abc]_ptr .* shape \((24, 40|40, 56|24, 56)\).*",  # masks in wrong places
    "programs": r"load of x_ptr .* shape \((2, 3|3, 2)\), .* x_ptr\[3\]",
}


@pytest.mark.parametrize("stem", lesson_code.find())
def test_no_false_alarm_in_a_lesson(stem, tmp_path):
    """A lesson as a reader without a GPU runs it; each of its kernels is launched."""
    child = run(CHECK_LESSON, str(lesson_code.find()[stem]), TRITON_INTERPRET="1")
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    found = [line for line in lines if line.startswith("found ")]
    allowed = re.compile("found " + ON_PURPOSE.get(stem, "nothing"))
    assert not [line for line in found if not allowed.fullmatch(line)]
    launched = {line.split()[1] for line in lines if line.startswith("launched ")}
    if stem != "debugging":
        assert set(lesson_code.kernels(stem)) <= launched | GPU_ONLY
