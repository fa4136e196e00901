"""Every kernel compiles for GPUs of four kinds: no register is spilled, loads are wide.

A new lesson adds a function to KERNELS that yields its variants, first the one
that matters most: that one `make test` compiles, and `make test-full` all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import lesson_code
import pytest

pytest.importorskip("triton")
from compile_only import TARGETS, Job, Report, compile_kernels  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """Arguments of a kernel as they occur, and what to expect of the code on NVIDIA."""

    name: str
    arguments: dict
    constants: dict
    options: dict
    loads: set | None = None  # bits that single loads from global memory move
    stores: set | None = None
    only: str = ""  # how the names of the targets begin


def copy() -> Iterator[Variant]:
    lesson = lesson_code.load("copy")
    for word, bits in {"i64": 64, "i32": 32, "i16": 16, "i8": 8}.items():
        constants = {"BLOCK_SIZE": lesson.BLOCK_BYTES * 8 // bits}
        for kind, n, width in (f"{word}:16", "i32:16", 128), (word, "i32", bits):
            arguments = {"x_ptr": f"*{kind}", "out_ptr": f"*{kind}", "n": n}
            options = {"num_warps": lesson.WARPS}
            yield Variant(f"{kind} {n}", arguments, constants, options, {width}, {width})


def fma() -> Iterator[Variant]:
    arguments = {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n": "i32:16", "a": "fp32"}
    for k in (1024, 1, 16, 100):
        yield Variant(f"K = {k}", arguments, {"K": k, "BLOCK_SIZE": 1024}, {}, {128}, {128})


def tickets() -> Iterator[Variant]:
    arguments = dict.fromkeys(("next_ptr", "begin_ptr", "end_ptr", "sm_ptr"), "*i32:16")
    yield Variant("no clock", arguments, {"NANO": 0}, {})
    yield Variant("a clock", arguments, {"NANO": 20_000}, {}, only="sm_")


def vector_add() -> Iterator[Variant]:
    lesson = lesson_code.load("vector_add")
    warps = {"num_warps": lesson.NUM_WARPS}

    def variant(name, x, y, out, n, loads, stores):
        arguments = {"x_ptr": f"*{x}", "y_ptr": f"*{y}", "out_ptr": f"*{out}", "n": n}
        constants = {"BLOCK_SIZE": lesson.BLOCK_BYTES * 8 // bits}
        if n == "1":  # Triton makes a constant of it
            constants["n"] = 1
        return Variant(f"{kind} {name}", arguments, constants, warps, loads, stores)

    for kind, bits in {"fp32": 32, "fp16": 16, "bf16": 16, "fp64": 64}.items():
        wide = f"{kind}:16"
        yield variant("aligned", wide, wide, wide, "i32:16", {128}, {128})
        yield variant("ragged n", wide, wide, wide, "i32", {bits}, {bits})
        yield variant("unaligned x", kind, wide, wide, "i32:16", {bits, 128}, {128})
        yield variant("unaligned out", wide, wide, kind, "i32:16", {128}, {bits})
        yield variant("n beyond 32 bits", wide, wide, wide, "i64:16", {128}, {128})
        yield variant("n beyond 32 bits, ragged", kind, kind, kind, "i64", {bits}, {bits})
        yield variant("n = 1", wide, wide, wide, "1", {bits}, {bits})


def lanes(arguments, constants=(), options=(), loads=None, stores=None, only=""):
    yield Variant("as launched", arguments, dict(constants), dict(options), loads, stores, only)


def twice(ragged_loads) -> Iterator[Variant]:
    """A kernel that doubles, with 16 bytes for each of 128 threads."""
    for kind, bits in {"fp16": 16, "fp32": 32, "fp64": 64}.items():
        for n, loads in ("i32", ragged_loads(bits)), ("i32:16", {128}), ("i64:16", {128}):
            arguments = {"x_ptr": f"*{kind}:16", "out_ptr": f"*{kind}:16", "n": n}
            constants = {"BLOCK_SIZE": 8 * 2048 // bits}
            yield Variant(f"{kind} {n}", arguments, constants, {"num_warps": 4}, loads, loads)


LOADS_AND_MASKS = {
    "address_kernel": lambda: lanes(
        {"x_ptr": "*fp16:16", "out_ptr": "*i64:16", "n": "i32"}, {"BLOCK_SIZE": 8}
    ),
    "window_kernel": lambda: lanes(
        {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n_load": "i32", "n_store": "i32:16"}
    ),
    "summary_kernel": lambda: lanes(
        {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n": "i32", "other": "fp32"},
        {"BLOCK_SIZE": 1024},
    ),
    # The lesson shows that these two refuse any other length.
    "runtime_range_kernel": lambda: lanes({"out_ptr": "*fp32:16"}, {"n": 1}),
    "odd_range_kernel": lambda: lanes({"out_ptr": "*fp32:16"}, {"N": 1024}, stores={128}),
    "twice_kernel": lambda: twice(lambda bits: {bits}),
    "twice_full_kernel": lambda: twice(lambda bits: {bits, 128}),
    "twice_promised_kernel": lambda: twice(lambda bits: {128}),
}


PROGRAMS = {
    "owner_kernel": lambda: lanes({"out_ptr": "*i32:16", "n": "i32"}, {"BLOCK_SIZE": 128}),
    "receive_kernel": lambda: lanes(
        {"x_ptr": "*fp32", "out_ptr": "*fp32:16", "n": "i32"}, {"BLOCK": 8, "SHOW": False}
    ),
    "ticket_kernel": tickets,
    "thread_kernel": lambda: lanes(
        {"out_ptr": "*i32:16"}, {"BLOCK_SIZE": 1024}, stores={128}, only="sm_"
    ),
}


FP32 = {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16"}
INT8 = {"x_ptr": "*i8:16", "out_ptr": "*i8:16", "stride_xm": "i32:16"}
INT64 = {"x_ptr": "*i64:16", "out_ptr": "*i64:16"}
DEBUGGING = {  # broken, yet the compiler takes them
    "missing_mask_kernel": lambda: lanes(FP32 | {"n": "i32"}, {"BLOCK": 256}),
    "shape_as_stride_kernel": lambda: lanes(INT64 | {"N": "i32", "stride_xm": "i32"}, {"BLOCK": 8}),
    "int32_overflow_kernel": lambda: lanes(INT8),
    "one_place_kernel": lambda: lanes(FP32, {"BLOCK": 256}),
    "wrong_other_kernel": lambda: lanes(FP32 | {"n": "i32"}, {"BLOCK": 8}),
    "wrong_axis_kernel": lambda: lanes(INT64, {"M": 4, "N": 4}),
}


def measuring() -> Iterator[Variant]:
    options = {"num_warps": 4}
    for kind, bits in {"fp32": 32, "fp16": 16}.items():
        wide = {"x_ptr": f"*{kind}:16", "out_ptr": f"*{kind}:16"}
        for k in (1, 64, 8192):
            constants = {"K": k, "BLOCK": 1024}
            yield Variant(f"{kind} {k}", wide | {"n": "i32:16"}, constants, options, {128}, {128})
        ragged = {bits}
        yield Variant(f"{kind} ragged", wide | {"n": "i32"}, constants, options, ragged, ragged)


def gemm() -> Iterator[Variant]:
    """Loads go to shared memory by cp.async where they are wide, so no width is named."""

    def variant(kind, tile, b="rows", ragged=False, precision="ieee", promote=None, only="", c=""):
        one = {"stride_ak", "stride_cn", "stride_bn" if b == "rows" else "stride_bk"}
        size = "i32" if ragged else "i32:16"
        arguments = {f"{name}_ptr": f"*{kind}:16" for name in "ab"} | {"c_ptr": f"*{c or kind}:16"}
        strides = {f"stride_{s}" for s in ("am", "ak", "bk", "bn", "cm", "cn")}
        arguments |= dict.fromkeys({"M", "N", "K"} | strides - one, size)
        constants = dict.fromkeys(one, 1) | {"PRECISION": precision, "PROMOTE": promote}
        constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile))
        options = {"num_warps": tile[3], "num_stages": tile[4]}
        name = f"{kind} {tile} {b} {'ragged' * ragged} {precision} {promote}"
        return Variant(name, arguments, constants, options, only=only)

    large, small = (128, 128, 64, 8, 3), (64, 64, 64, 4, 3)
    yield variant("fp16", small)
    for kind in ("fp16", "bf16"):
        for b in ("rows", "columns"):
            yield variant(kind, (128, 256, 64, 8, 3), b, only="sm_9")
            yield variant(kind, large, b)
        yield variant(kind, small, ragged=True)
        yield variant(kind, small, "columns", only="sm_9")
    for b in ("rows", "columns"):
        for ragged in (False, True):
            for precision in ("ieee", "tf32x3", "tf32"):
                only = "sm_" * (precision != "ieee")
                tile = (64, 64, 16, 4, 3)
                yield variant("fp32", tile, b, ragged, precision, only=only)
        yield variant("fp32", (128, 128, 32, 8, 3), b, precision="tf32", only="sm_9")
        yield variant("fp32", (128, 64, 32, 8, 3), b, precision="tf32x3", only="sm_9")
        for kind in ("fp8e4nv", "fp8e5"):
            for promote in (None, 32, 128):
                tile = (128, 128, 128, 8, 3)
                yield variant(kind, tile, b, False, "ieee", promote, "sm_9", "bf16")
                yield variant(kind, (64, 64, 128, 4, 3), b, True, "ieee", promote, "sm_9", "fp32")


KERNELS = {("vector_add", "vector_add_kernel"): vector_add}
KERNELS |= {("loads_and_masks", name): f for name, f in LOADS_AND_MASKS.items()}
KERNELS |= {("debugging", name): f for name, f in DEBUGGING.items()}
KERNELS |= {("measuring", "chain_kernel"): measuring}
KERNELS |= {("programs", name): f for name, f in PROGRAMS.items()}
KERNELS |= {("copy", "copy_kernel"): copy, ("copy", "fma_kernel"): fma}
KERNELS |= {("copy", "empty_kernel"): lambda: lanes({}, only="sm_")}
KERNELS |= {("gemm", "gemm_kernel"): gemm}
HELPERS = set()  # (lesson, function) of @triton.jit functions that only kernels call


def check(kernel, targets, variants) -> list[Report]:
    """Compile all variants for all targets, in one process, and look at each."""
    pairs = [(t, variant) for t in targets for variant in variants if t.startswith(variant.only)]
    jobs = [Job(*kernel, t, v.arguments, v.constants, v.options) for t, v in pairs]
    reports = compile_kernels(jobs)
    for (target, variant), report in zip(pairs, reports):
        where = f"{kernel[1]}, {target}, {variant.name}"
        assert report.spills == 0 and report.stack == 0, f"{where}: registers are spilled"
        assert 0 < report.registers <= 255, where
        for what, expected in (("load", variant.loads), ("store", variant.stores)):
            found = report.widths(what)
            if expected and target.startswith("sm_"):
                assert found == expected, f"{where}: {what}"
            elif expected:  # where a warp has 64 threads, each one owns fewer elements
                assert found and max(found) <= max(expected), f"{where}: {what}"
    return reports


@pytest.mark.parametrize("kernel", KERNELS, ids="/".join)
def test_first_variant(kernel):
    check(kernel, TARGETS, [next(KERNELS[kernel]())])


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids="/".join)
def test_all_variants(kernel, target):
    check(kernel, [target], list(KERNELS[kernel]()))


def test_every_kernel_is_compiled():
    written = {(stem, name) for stem in lesson_code.find() for name in lesson_code.kernels(stem)}
    assert written == set(KERNELS) | HELPERS


def test_vector_add_loses_wide_loads_at_a_ragged_length():
    """What its page explains, for a GPU of NVIDIA and one of AMD."""
    aligned, ragged = list(vector_add())[:2]
    kernel, lesson = ("vector_add", "vector_add_kernel"), lesson_code.load("vector_add")
    reports = check(kernel, ["sm_90", "gfx942"], [aligned, ragged])
    owned = lesson.BLOCK_BYTES * 8 // (lesson.NUM_WARPS * 64)  # bits of one AMD thread
    assert [r.widths("load") for r in reports] == [{128}, {32}, {min(128, owned)}, {32}]


@pytest.mark.parametrize(
    "kernel, arguments, constants, message",
    [
        ("runtime_range_kernel", {"out_ptr": "*fp32", "n": "i32"}, {}, "must be of type"),
        ("odd_range_kernel", {"out_ptr": "*fp32"}, {"N": 1003}, "range must be a power of 2"),
    ],
)
def test_a_shape_is_a_constant_power_of_two(kernel, arguments, constants, message):
    with pytest.raises(RuntimeError, match="does not compile") as caught:
        compile_kernels([Job("loads_and_masks", kernel, "sm_90", arguments, constants)])
    assert message in str(caught.value)


def with_block(size: int) -> Job:
    """A launch of one warp with another block."""
    arguments, constants = next(vector_add()).arguments, {"BLOCK_SIZE": size}
    return Job("vector_add", "vector_add_kernel", "sm_90", arguments, constants, {"num_warps": 1})


def test_an_error_of_the_compiler_is_told():
    """The interpreter runs a block of 7; the compiler refuses it."""
    with pytest.raises(RuntimeError, match="BLOCK_SIZE.*does not compile") as caught:
        compile_kernels([with_block(7)])
    assert "power of 2" in str(caught.value)


def test_spills_are_seen():
    """A block far too large for the registers of its warp."""
    [report] = compile_kernels([with_block(2**14)])
    assert report.spills > 0
