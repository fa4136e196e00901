"""Every kernel compiles for GPUs of four kinds: no register is spilled, loads are wide.

A new lesson adds a function to KERNELS that yields its variants, first the one
that matters most: that one `make test` compiles, and `make test-full` all.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

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
    only: str | tuple = ""  # how the names of the targets begin


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


def reductions() -> Iterator[Variant]:
    """Rows and columns as ``launch`` tiles them; of partial results at the end."""
    names = ("K", "R", "span", "stride_xk", "stride_xr", "stride_os", "stride_ok")

    def variant(kind, out, axis, block_k, block_r, is_sum=True, ragged=False, loads=None, warps=4):
        sizes = dict.fromkeys(names, "i32:16") | {"R": "i32" if ragged else "i32:16"}
        pointers = {"x_ptr": f"*{kind}:16", "out_ptr": f"*{out}:16"}
        neutral = 0 if is_sum or kind == "i1" else -128 if kind[0] == "i" else float("-inf")
        constants = {"SUM": is_sum, "NEUTRAL": neutral, "AXIS": axis, "stride_ok": 1}
        constants |= {"BLOCK_K": block_k, "BLOCK_R": block_r}
        constants["stride_xr" if axis else "stride_xk"] = 1
        name = f"{kind} {out} axis {axis}: {block_k} x {block_r} {is_sum} {ragged}"
        return Variant(name, pointers | sizes, constants, {"num_warps": warps}, loads)

    for kind, bits in {"fp32": 32, "bf16": 16, "fp64": 64}.items():
        tile, wide, warps = 4096 * 32 // max(bits, 32), 256 * 8 // bits, 8 if bits >= 32 else 4
        yield variant(kind, kind, 1, 1, tile, loads={128}, warps=warps)
        yield variant(kind, kind, 1, 1, tile, ragged=True, loads={bits}, warps=warps)
        yield variant(kind, kind, 1, tile // 256, 256, False, loads={128})
        yield variant(kind, kind, 0, wide, tile // wide, loads={128})
    yield variant("fp32", "fp16", 0, 8, 512)  # the second stage
    for kind in ("i8", "i1", "i64"):
        yield variant(kind, "i64", 1, 4, 1024 if kind != "i64" else 512, loads={128})
        yield variant(kind, kind, 0, 64, 64 if kind != "i64" else 32, False)


REDUCTIONS = {
    "axes_kernel": lambda: lanes(
        dict.fromkeys(("x_ptr", "sum_ptr", "max_ptr", "diff_ptr"), "*i64:16")
    ),
    "reduce_kernel": reductions,
    "read_kernel": lambda: lanes(FP32, {"BLOCK": 4096}, loads={128}),
    "atomic_sum_kernel": lambda: lanes(FP32 | {"n": "i32:16"}, {"BLOCK": 4096}, loads={128}),
}


def strides_2d() -> Iterator[Variant]:
    """Tiles of a transpose, a copy and a bias-add, as the wrapper launches them."""

    def variant(name, kind, block, warps, given=(), constants=(), loads=None, stores=None):
        wide = "i32:16"
        names = ["M", "N", "stride_xm", "stride_xn", "stride_bm", "stride_bn", "stride_om"]
        arguments = {"x_ptr": f"*{kind}:16", "out_ptr": f"*{kind}:16"}
        arguments |= dict.fromkeys([*names, "stride_on"], wide) | dict(given)
        fixed = {"bias_ptr": None, "BLOCK_M": block[0], "BLOCK_N": block[1]}
        fixed |= {"stride_on": 1} | dict(constants)
        fixed = {k: v for k, v in fixed.items() if k not in dict(given)}
        options = {"num_warps": warps}
        return Variant(f"{kind} {name}", arguments, fixed, options, loads, stores)

    turned, bias = {"stride_xm": 1}, {"stride_xn": 1, "stride_bn": 1}
    one_row = {"M": 1, "stride_xn": 1}
    squares = {"i32": (64, 64), "i16": (128, 128), "i64": (32, 32), "i8": (128, 256)}
    for kind, square in squares.items():
        bits, row = int(kind[1:]), (1, 16384 // int(kind[1:]))
        yield variant("turned", kind, square, 8, (), turned, {128}, {128})
        yield variant("one row", kind, row, 4, (), one_row, {128}, {128})
        edge = {bits, 128}
        yield variant("ragged row", kind, row, 4, {"N": "i32"}, one_row, edge, edge)
        yield variant("long row", kind, row, 4, {"N": "i64"}, one_row, edge, edge)
        ragged = dict.fromkeys(("M", "N", "stride_xn", "stride_om"), "i32")
        yield variant("turned, ragged", kind, (32, 32), 4, ragged, turned, {bits}, {bits})
        steps = dict.fromkeys(("stride_xm", "stride_xn", "stride_on"), "i32")
        yield variant("steps", kind, row, 4, steps, (), {bits}, {bits})
        far = {"stride_xm": "i64:16", "stride_om": "i64:16"}
        yield variant("far rows", kind, row, 4, far, {"stride_xn": 1}, {128}, {128})
        yield variant("narrow", kind, (row[1] // 4, 4), 4, {"N": "i32"}, {"stride_xn": 1})
    for kind, bits in {"fp32": 32, "fp16": 16, "bf16": 16, "fp64": 64}.items():
        square, row = squares[f"i{bits}"], (1, 16384 // bits)
        given = {"bias_ptr": f"*{kind}:16"}
        yield variant("bias", kind, row, 4, given, bias, {128}, {128})
        yield variant(
            "bias, turned", kind, square, 8, given, turned | {"stride_bn": 1}, {128}, {128}
        )
        along = {"stride_xn": 1, "stride_bm": 1}
        yield variant("bias along rows", kind, row, 4, given, along, {bits, 128}, {128})


def fused_elementwise(kernel, inputs, constants, numbers=()) -> Iterator[Variant]:
    """A kernel that takes tensors of one kind, with the tile and warps of the wrapper."""
    lesson = lesson_code.load("fused_elementwise")
    for kind, bits in {"bf16": 16, "fp32": 32, "fp16": 16, "fp64": 64}.items():
        for n, width, many in ("i32:16", 128, 1), ("i64:16", 128, 2**32), ("i32", bits, 2**26):
            block, warps = lesson.tile(getattr(lesson, kernel), bits // 8, many)
            arguments = dict.fromkeys((*inputs, "out_ptr"), f"*{kind}:16") | {"n": n}
            arguments |= dict.fromkeys(numbers, "fp64")
            for constant in constants:
                name = f"{kind} {n} {constant}"
                everything = {"BLOCK": block} | constant
                options = {"num_warps": warps}
                yield Variant(name, arguments, everything, options, {width}, {width})


FUSED_ELEMENTWISE = {
    name: functools.partial(fused_elementwise, name, *arguments)
    for name, arguments in {
        "scale_bias_kernel": (["x_ptr"], [{}], ["scale", "bias"]),
        "swiglu_kernel": (["gate_ptr", "up_ptr"], [{}]),
        "gelu_kernel": (["x_ptr"], [{"TANH": False}, {"TANH": True}]),
        "chain_kernel": (["x_ptr"], [{"K": 8}, {"K": 1}]),
    }.items()
}


def softmax_arguments(kind, N):
    number = "i32:16" if N % 16 == 0 else "i32"
    arguments = {"x_ptr": f"*{kind}:16", "out_ptr": f"*{kind}:16", "M": "i32"}
    return arguments | dict.fromkeys(("N", "stride_xm", "stride_om"), number)


def softmax() -> Iterator[Variant]:
    """As ``launch`` starts it: rows short, long, ragged and as long as they may be."""
    lesson = lesson_code.load("softmax")
    for kind, size in {"bf16": 2, "fp32": 4, "fp16": 2, "fp64": 8}.items():
        most = lesson.LONGEST // size
        aligned = 16 // size
        cases = [(most // 4, aligned, {}), (most, aligned, {}), (12288, aligned, {})]
        cases += [(n, aligned, {}) for n in (256, 512, 1000, 1024, 4096, 8192)]
        cases += [(n, 1, {}) for n in (3, 781, 8191, 32767 if size < 8 else 12289)]
        cases += [(96, 1, {"stride_xn": "i32", "stride_xm": "i32"})]
        for N, vector, strides in cases:
            rows, pieces, piece, warps = lesson.plan(N, size, vector)
            constants = {"NARROW": size == 2, "VECTOR": vector, "ROWS": rows}
            constants |= {"PIECES": pieces, "PIECE": piece, "stride_on": 1}
            constants |= {} if strides else {"stride_xn": 1}
            arguments = softmax_arguments(kind, N) | strides
            width = {128 if vector > 1 else 8 * size}
            width = width if not strides else None
            options = {"num_warps": warps}
            name = f"{kind} {N} {vector}"
            yield Variant(name, arguments, constants, options, width, width, only="sm_")


def softmax_online() -> Iterator[Variant]:
    for kind, size in {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}.items():
        cases = (2**20, {128}, 4), (2**20 + 8, {8 * size}, 2), (2**20 + 1, {8 * size}, 2)
        for N, width, steps in cases:
            constants = {"stride_xn": 1, "stride_on": 1, "STEPS": steps, "WIDTH": 16_384 // size}
            options = {"num_warps": 32}
            arguments = softmax_arguments(kind, N)
            del arguments["M"]
            yield Variant(f"{kind} {N}", arguments, constants, options, width, width, only="sm_")


SOFTMAX = {
    "softmax_kernel": softmax,
    "online_kernel": softmax_online,
    "naive_kernel": lambda: lanes(
        {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "N": "i32"}, {"BLOCK": 4}
    ),
}


def norms() -> Iterator[Variant]:
    """As launched: width, elements of the tuple, warps; the row stays in registers or not."""
    # One or two registers are spilled on other targets, to make room for one more program.
    tight = {("bf16", ":16", 4, True): "sm_9", ("bf16", ":16", 2, False): "sm_9"}
    tight |= {("fp16", ":16", 2, False): "sm_9", ("fp16", ":16", 5, False): "sm_8"}
    pointers = ("x_ptr", "w_ptr", "b_ptr", "out_ptr")

    def variant(kind, size, keep, warps, center=True, rows=1, block=1024, most=0, **other):
        arguments = {name: f"*{kind}:16" for name in pointers}
        arguments |= dict.fromkeys(("M", "N", "stride_xm", "stride_om"), f"i32{size}")
        constants = {"stride_xn": 1, "stride_on": 1, "EPS": 1e-5, "CENTER": center}
        constants |= {"ROWS": rows, "BLOCK": block, "KEEP": keep, "WIDE": block > 1024}
        if not center:
            constants["b_ptr"] = None
        for name, value in other.items():
            del arguments[name]
            constants[name] = value
        width = {128} if size and rows == 1 else None
        name = f"{kind}{size} {rows}x{block} {keep} {center} {most} {other}"
        options = {"num_warps": warps} | ({"maxnreg": most} if most else {})
        only = tight.get((kind, size, keep, center), "sm_" if most else "")
        return Variant(name, arguments, constants, options, width, width, only)

    for kind in ("bf16", "fp16", "fp32"):
        for keep, warps in (8, 4), (4, 4), (1, 1), (2, 2), (5, 4), (16, 4):
            for center in (True, False):
                yield variant(kind, ":16", keep, warps, center)
    for keep, most in (8, 96), (12, 128), (16, 168):
        yield variant("bf16", ":16", keep, 4, most=most)
        yield variant("bf16", ":16", keep, 4, False, most=most)
    for keep, warps in (1, 1), (2, 2), (8, 4), (16, 4):
        yield variant("bf16", "", keep, warps)
    yield variant("bf16", ":16", 4, 16, block=4096)
    yield variant("bf16", "", 4, 16, block=4096)
    yield variant("fp64", ":16", 8, 4)
    yield variant("fp64", ":16", 2, 16, block=4096)
    yield variant("bf16", ":16", 1, 1, rows=8, block=128)
    yield variant("fp32", "", 1, 1, rows=1024, block=1, N=1)


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


def gemm_fast_pointers() -> Iterator[Variant]:
    """Tiles of the steps, of the map without TMA, and of matrices that no descriptor holds."""
    lesson = lesson_code.load("gemm_fast")
    strides = {f"stride_{s}" for s in ("am", "ak", "bk", "bn", "cm", "cn")}

    def variant(kind, tile, group, b="rows", ragged=False, only=""):
        one = {"stride_ak", "stride_cn", "stride_bn" if b == "rows" else "stride_bk"}
        size = "i32" if ragged else "i32:16"
        arguments = {f"{name}_ptr": f"*{kind}:16" for name in "abc"}
        arguments |= dict.fromkeys({"M", "N", "K"} | strides - one, size)
        constants = dict.fromkeys(one, 1) | {"GROUP": group}
        constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile))
        options = {"num_warps": tile[3], "num_stages": tile[4]}
        name = f"{kind} {tile} {group} {b} {'ragged' * ragged}"
        return Variant(name, arguments, constants, options, only=only)

    yield variant("fp16", lesson.SMALL, lesson.GROUP)
    for kind in ("fp16", "bf16"):
        for b in ("rows", "columns"):
            for tile in lesson.TILES["pointers"]:
                # 64 KiB of an MI300 do not hold the larger one's stages.
                only = "sm_" * (lesson.need(tile) > 2**16)
                yield variant(kind, tile, lesson.GROUP, b, only=only)
            for tile in lesson.TILES["single loads"]:
                yield variant(kind, tile, lesson.GROUP, b, ragged=True)
    for tile, group in lesson.STEPS.values():
        yield variant("fp16", tile, group, only="sm_9")
    for stages in range(1, 6):
        yield variant("fp16", (128, 128, 64, 8, stages), lesson.GROUP, only="sm_9")


def gemm_fast_descriptors() -> Iterator[Variant]:
    lesson = lesson_code.load("gemm_fast")
    for kind in ("fp16", "bf16"):
        for tile in lesson.TILES["descriptors"]:
            for size in ("i32:16", "i32"):
                boxes = {"a": (tile[0], tile[2]), "b": (tile[2], tile[1]), "c": tile[:2]}
                arguments = {
                    f"{name}_desc": f"tensordesc<{kind}[{rows}, {cols}]>"
                    for name, (rows, cols) in boxes.items()
                }
                arguments |= dict.fromkeys(("M", "N", "K"), size)
                constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile))
                constants |= {"GROUP": lesson.GROUP}
                options = {"num_warps": tile[3], "num_stages": tile[4]}
                for only in ("sm_9", "sm_10"):
                    name = f"{kind} {tile} {size}"
                    yield Variant(name, arguments, constants, options, only=only)


def autotune_gemm() -> Iterator[Variant]:
    """Each configuration, as it is tuned, timed and checked."""
    lesson = lesson_code.load("autotune")
    strides = {f"stride_{s}" for s in ("am", "ak", "bk", "bn", "cm", "cn")}

    def variant(kind, config, b="rows", ragged=False, only=""):
        one = {"stride_ak", "stride_cn", "stride_bn" if b == "rows" else "stride_bk"}
        arguments = {f"{name}_ptr": f"*{kind}:16" for name in "abc"} | {"bucket": "i32:16"}
        arguments |= dict.fromkeys({"M", "N", "K"} | strides - one, "i32" if ragged else "i32:16")
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        name = f"{kind} {config} {b} {'ragged' * ragged}"
        return Variant(name, arguments, dict.fromkeys(one, 1) | config.kwargs, options, only=only)

    yield variant("fp16", lesson.SPACE[6])
    for config in lesson.SPACE:
        m, n, k = config.kwargs.values()
        # The one spills two registers, the other never fits: see the test of its shared memory.
        if (m, n, k) not in ((16, 128, 128), (128, 256, 128)):
            yield variant("fp16", config, only="sm_9")
            for b in ("rows", "columns"):
                yield variant("bf16", config, b, only="sm_9")
        if m * n <= 64 * 128 and (m, n) not in ((16, 128), (128, 64)):  # larger ones spill
            yield variant("fp16", config, ragged=True, only="sm_9")


def autotune_add() -> Iterator[Variant]:
    lesson = lesson_code.load("autotune")
    for config in lesson.ADD_SPACE:
        for kind, bits in ("fp32", 32), ("fp16", 16):
            wide = {f"{name}_ptr": f"*{kind}:16" for name in ("x", "y", "out")}
            owned = config.kwargs["BLOCK"] * bits // 128  # by each thread of 4 warps
            for n, width in ("i32:16", min(128, owned)), ("i32", bits):
                constants, options = config.kwargs | {"stride_x": 1}, {"num_warps": 4}
                name = f"{kind} {n} {config.kwargs}"
                yield Variant(name, wide | {"n": n}, constants, options, {width}, {width})
            strided = wide | {"n": "i32", "stride_x": "i32"}
            yield Variant(f"{kind} strided", strided, config.kwargs, options, {bits}, {bits})


def gemm_epilogue() -> Iterator[Variant]:
    """Each tile with TMA, and pointers where that is missing or cannot read."""
    lesson = lesson_code.load("gemm_epilogue")
    strides = ("xm", "xk", "wn", "wk", "b", "rm", "rn", "om", "on")

    def variant(kind, tile, flat, tma=True, act="gelu_tanh", residual=False, ragged=False, only=""):
        BM, BN, BK, warps, stages = tile
        size = "i32" if ragged else "i32:16"
        arguments = dict.fromkeys([*"MNK"] + [f"stride_{s}" for s in strides], size)
        for name, rows in ("x", BM), ("w", BN):
            arguments[name] = f"tensordesc<{kind}[{rows}, {BK}]>" if tma else f"*{kind}:16"
        arguments |= dict.fromkeys(("bias_ptr", "out_ptr"), f"*{kind}:16")
        constants = dict.fromkeys(("stride_xk", "stride_wk", "stride_b", "stride_on"), 1)
        if residual:
            arguments["res_ptr"] = f"*{kind}:16"
            constants["stride_rn"] = 1
        else:
            constants |= {"res_ptr": None, "stride_rm": 0, "stride_rn": 0}
        constants |= {"ACT": act, "TMA": tma, "FLAT": flat}
        constants |= {"BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_K": BK}
        for name in constants:
            arguments.pop(name, None)
        options = {"num_warps": warps, "num_stages": stages}
        name = f"{kind} {tile} {flat} {tma} {act} {residual} {'ragged' * ragged}"
        return Variant(name, arguments, constants, options, only=only)

    large, twin, *others = (tile[:5] for tile in lesson.TILES)
    yield variant("bf16", twin, True, only="sm_9")
    for act, residual in ("gelu_tanh", False), (None, True), ("gelu_tanh", True):
        for tile in [large] * (act is None) + [twin]:
            yield variant("fp16", tile, True, True, act, residual, only="sm_9")
            yield variant("bf16", tile, True, True, act, residual, only="sm_100")
        for tile in others:
            BM, BN, *_ = tile
            yield variant("bf16", tile, BM == 128, True, act, residual, only="sm_9")
            for only, stages in ("sm_8", 3), ("gfx", 1):
                tile = BM, BN, 64, 8 if BM * BN == 16384 else 4, stages
                yield variant("fp16", tile, False, False, act, residual, only=only)
        yield variant("fp16", lesson.ODD, False, False, act, residual, True, "sm_")
        odd = *lesson.ODD[:4], 1
        yield variant("bf16", odd, False, False, act, residual, True, "gfx")


def cross_entropy() -> Iterator[Variant]:
    """As the wrapper starts it: rows on the 16-byte grid, off it, turned, of one element."""
    for kind, size in {"bf16": 2, "fp32": 4, "fp16": 2, "fp64": 8}.items():
        out = "*fp64:16" if kind == "fp64" else "*fp32:16"
        arguments = {"x_ptr": f"*{kind}:16", "target_ptr": "*i64:16", "out_ptr": out}
        lone, grid = {8 * size, 64}, {"N": "i32:16", "stride_xm": "i32:16"}
        ragged = arguments | {"x_ptr": f"*{kind}", "N": "i32", "stride_xm": "i32"}
        ones = dict.fromkeys(("stride_xn", "stride_t", "stride_o"), 1)
        turned = ragged | dict.fromkeys(ones, "i32") | {"stride_xn": "i64"}
        for warps in (8, 32, 1):
            options, threads = {"num_warps": warps}, {"THREADS": 32 * warps}
            wide = threads | {"STEPS": 2, "VECTOR": 16 // size}
            single = threads | {"STEPS": 16, "VECTOR": 1}
            name = f"{kind} {warps}"
            yield Variant(name, arguments | grid, ones | wide, options, {128} | lone)
            yield Variant(f"{name} ragged", ragged, ones | single, options, lone)
        yield Variant(f"{kind} turned", turned, single, options, lone)
        short = {name: ragged[name] for name in ragged if name != "N"}
        yield Variant(f"{kind} N = 1", short, ones | single | {"N": 1}, options, lone, only="sm_")


def diagnosis() -> Iterator[Variant]:
    """Broken, yet the compiler takes it, with tiles that do not spill."""
    lesson = lesson_code.load("diagnosis")
    sizes, strides = ("M", "N", "K"), ("stride_am", "stride_bk", "stride_cm")
    for tile, size, stride in [
        (lesson.TILES[0], "i32:16", "i32:16"),
        ((16, 16, 16, 4, 1), "i32", "i32:16"),
        ((16, 16, 16, 4, 1), "i32", "i32"),
    ]:
        arguments = {"a_ptr": "*fp16:16", "b_ptr": "*fp16:16", "c_ptr": "*fp32:16"}
        arguments |= dict.fromkeys(sizes, size) | dict.fromkeys(strides, stride)
        options = {"num_warps": tile[3], "num_stages": tile[4]}
        constants = dict(zip(lesson.BLOCKS, tile))
        yield Variant(f"{tile} {size} {stride}", arguments, constants, options)


def autograd_forward() -> Iterator[Variant]:
    """As launched: width, block and warps; LayerNorm with all parameters, RMSNorm with some."""
    for kind, N, size in itertools.product(
        ("bf16", "fp32", "fp64"), (4096, 16, 16384), (":16", "")
    ):
        if kind == "fp64" and N > 4096:
            continue  # right, but registers are spilled
        stats = "*fp64:16" if kind == "fp64" else "*fp32:16"
        arguments = dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), f"*{kind}:16")
        arguments |= {"mean_ptr": stats, "rstd_ptr": stats}
        arguments |= {"N": f"i32{size}", "stride_xm": f"i32{size}"}
        constants = {"stride_xn": 1, "EPS": 1e-5, "BLOCK": N}
        options = {"num_warps": max(1, min(16, N // 512))}
        wide = {128} if size and N == 4096 and kind != "bf16" else None
        yield Variant(f"{kind} {N}{size}", arguments, constants, options, stores=None, loads=wide)
        absent = dict.fromkeys(("b_ptr", "mean_ptr"))
        arguments = {k: v for k, v in arguments.items() if k not in absent}
        constants = constants | absent
        yield Variant(f"{kind} {N}{size} RMS", arguments, constants, options)


def autograd_backward() -> Iterator[Variant]:
    """As launched on Hopper: tile, warps; where shared memory is small, one stage."""
    tiles = [(1, 4096, 1, 3), (4, 256, 1, 3), (2, 512, 1, 3), (2, 1024, 1, 3), (1, 2048, 1, 3)]
    tiles += [(1, 8192, 1, 3), (1, 8192, 2, 3), (2, 1024, 1, 1), (1, 8192, 2, 1), (1, 4096, 1, 1)]
    pointers = ("x_ptr", "dy_ptr", "w_ptr", "dx_ptr")
    for tile, kind, center in itertools.product(tiles, ("bf16", "fp32", "fp64"), (True, False)):
        rows, block, split, stages = tile
        bits = {"bf16": 2, "fp32": 4, "fp64": 8}[kind]
        if kind == "fp64" and block > 4096:
            continue
        stats = "*fp64:16" if kind == "fp64" else "*fp32:16"
        arguments = dict.fromkeys(pointers, f"*{kind}:16")
        arguments |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"), stats)
        size = "i32" if tile == (2, 1024, 1, 1) else "i32:16"
        arguments |= dict.fromkeys(("M", "N", "SPAN", "stride_xm", "stride_ym"), size)
        constants = {"stride_xn": 1, "stride_yn": 1, "HOW": "parts", "lock_ptr": None}
        constants |= dict(zip(("ROWS", "BLOCK", "SPLIT", "STAGES"), tile))
        if not center:
            for name in ("mean_ptr", "db_ptr"):
                del arguments[name]
            constants |= {"mean_ptr": None, "db_ptr": None}
        room = 6 * rows * block * split * bits
        if stages > 1 and room >= 227 << 10:
            continue
        if not center and rows * block <= 4096 and stages > 1:
            continue  # some spill a register, by at most six instructions
        only = "" if stages == 1 else "sm_9" if room > 163 << 10 else "sm_"
        options = {"num_warps": rows * block // 512}
        yield Variant(f"{kind} {tile} {center}", arguments, constants, options, only=only)
    for how in ("race", "atomic", "lock"):
        arguments = dict.fromkeys(
            (*pointers, "mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"), "*fp32:16"
        )
        arguments |= {"lock_ptr": "*i32:16"} if how == "lock" else {}
        arguments |= dict.fromkeys(("M", "N", "SPAN", "stride_xm", "stride_ym"), "i32:16")
        constants = {"stride_xn": 1, "stride_yn": 1, "HOW": how}
        constants |= {} if how == "lock" else {"lock_ptr": None}
        constants |= dict(zip(("ROWS", "BLOCK", "SPLIT", "STAGES"), (1, 2048, 1, 1)))
        yield Variant(how, arguments, constants, {"num_warps": 4})


def attention_backward(tensors, tile) -> Iterator[Variant]:
    """One kernel: its tiles with TMA, and small ones without."""
    lesson = lesson_code.load("attention_backward")
    rows = ["lse_ptr", "delta_ptr"] if "do" in tensors else ["lse_ptr"]
    for (D, tiles), causal, group, (kind, size) in itertools.product(
        [(16, lesson.TILES[64]), *lesson.TILES.items(), (64, lesson.SMALL), (128, lesson.SMALL)],
        *([1, 0], [1, 4]),
        [("fp16", "i32:16"), ("bf16", "i32:16"), ("fp16", "i32"), ("fp16", 1)],
    ):
        if (D == 16) != (size == 1):
            continue  # one query and one key, which become constants, in narrow heads
        BM, BN, warps, stages = tiles[tile]
        arguments = {
            f"{name}_desc": f"tensordesc<{kind}[1, 1, {BN if name[-1] in 'kv' else BM}, {D}]>"
            for name in tensors
        }
        arguments |= dict.fromkeys(rows, "*fp32:16") | {"LP": "i32:16", "scale": "fp32"}
        constants = {"CAUSAL": causal, "BLOCK_M": BM, "BLOCK_N": BN}
        (constants if size == 1 else arguments).update(LQ=size, LK=size)
        if group == 1:
            constants["GROUP"] = 1
        else:
            arguments["GROUP"] = "i32"
        options = {"num_warps": warps, "num_stages": stages}
        name = f"{kind} {D} {tiles[tile]} {causal} {group} {size}"
        only = "sm_8" if tiles is lesson.SMALL else "sm_9"
        yield Variant(name, arguments, constants, options, only=only)


ATTENTION_BACKWARD = {
    "forward_kernel": functools.partial(attention_backward, ["q", "k", "v", "out"], "dq"),
    "dq_kernel": functools.partial(attention_backward, ["q", "k", "v", "out", "do", "dq"], "dq"),
    "dkdv_kernel": functools.partial(attention_backward, ["q", "k", "v", "do", "dk", "dv"], "dkdv"),
}


def attention(special) -> Iterator[Variant]:
    """The tiles of the plain kernel, or the one with specialised warps."""
    lesson = lesson_code.load("attention")
    tiles = [(D, small, "") for D, (_, small) in lesson.TILES.items()]
    tiles += [(D, large, ("sm_9", "sm_1")) for D, (large, _) in lesson.TILES.items()]
    tiles = [(128, lesson.SPECIALISED, "sm_9")] if special else tiles
    for (D, tile, only), causal, (kind, size, group) in itertools.product(
        tiles, [1, 0], [("fp16", "i32:16", 1), ("bf16", "i32:16", 4), ("fp16", "i32", 4)]
    ):
        BM, BN, warps, stages = tile
        arguments = {
            f"{name}_desc": f"tensordesc<{kind}[1, 1, {rows}, {D}]>"
            for name, rows in (("q", BM), ("k", BN), ("v", BN))
        }
        numbers = ["heads", "M", "N", "D", *(f"stride_o{x}" for x in "bhm")]
        constants = {"CAUSAL": causal, "BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_D": D, "stride_od": 1}
        if special:
            del arguments["q_desc"]
            arguments["q_ptr"] = f"*{kind}:16"
            numbers += ["all_heads", "stride_q"]
            constants |= {"PTX": True, "SMS": 132}
        else:
            constants |= {"ROUND": True, "seen_ptr": None}
        arguments |= {"out_ptr": f"*{kind}:16", "scale": "fp32"} | dict.fromkeys(numbers, size)
        if group == 1:
            constants["group"] = 1
        else:
            arguments["group"] = "i32"
        name = f"{kind} {D} {tile} {causal} {group} {size}"
        options = {"num_warps": warps, "num_stages": stages}
        yield Variant(name, arguments, constants, options, only=only)


KERNELS = {("vector_add", "vector_add_kernel"): vector_add}
KERNELS |= {("attention", "attention_kernel"): functools.partial(attention, False)}
KERNELS |= {("attention", "specialised_kernel"): functools.partial(attention, True)}
KERNELS |= {("attention_backward", name): f for name, f in ATTENTION_BACKWARD.items()}
KERNELS |= {("loads_and_masks", name): f for name, f in LOADS_AND_MASKS.items()}
KERNELS |= {("debugging", name): f for name, f in DEBUGGING.items()}
KERNELS |= {("measuring", "chain_kernel"): measuring}
KERNELS |= {("fused_elementwise", name): f for name, f in FUSED_ELEMENTWISE.items()}
KERNELS |= {("reductions", name): f for name, f in REDUCTIONS.items()}
KERNELS |= {("programs", name): f for name, f in PROGRAMS.items()}
KERNELS |= {("softmax", name): f for name, f in SOFTMAX.items()}
KERNELS |= {("norms", "norm_kernel"): norms}
KERNELS |= {("copy", "copy_kernel"): copy, ("copy", "fma_kernel"): fma}
KERNELS |= {("copy", "empty_kernel"): lambda: lanes({}, only="sm_")}
KERNELS |= {("strides_2d", "tile_kernel"): strides_2d}
KERNELS |= {
    ("strides_2d", "address_kernel"): lambda: lanes(
        {"x_ptr": "*fp32:16", "out_ptr": "*i64:16", "stride_xm": "i32:16"}
        | dict.fromkeys(("M", "N", "stride_xn"), "i32")
    )
}
KERNELS |= {("llm_operators", "cross_entropy_kernel"): cross_entropy}
KERNELS |= {("gemm", "gemm_kernel"): gemm}
KERNELS |= {("diagnosis", "accumulate_kernel"): diagnosis}
KERNELS |= {
    ("diagnosis", "row_sum_kernel"): lambda: lanes(
        {"x_ptr": "*fp16:16", "out_ptr": "*fp32:16"}, {"N": 1024}, loads={128}
    )
}
KERNELS |= {("gemm_fast", "matmul_kernel"): gemm_fast_pointers}
KERNELS |= {("gemm_fast", "descriptor_kernel"): gemm_fast_descriptors}
KERNELS |= {
    ("gemm_fast", "add_kernel"): lambda: lanes(
        FP32 | {"y_ptr": "*fp32:16", "n": "i32:16"},
        {"BLOCK": 512},
        {"num_warps": 2},
        loads={128},
        stores={128},
    )
}

# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
KERNELS |= {("gemm_epilogue", "linear_act_kernel"): gemm_epilogue}
KERNELS |= {("autograd", "norm_kernel"): autograd_forward}
KERNELS |= {("autograd", "norm_backward_kernel"): autograd_backward}
KERNELS |= {("autotune", "gemm_kernel"): autotune_gemm, ("autotune", "add_kernel"): autotune_add}


def check(kernel, targets, variants) -> list[Report]:
    """Compile all variants for all targets, in one process, and look at each."""
    pairs = [(t, variant) for t in targets for variant in variants if t.startswith(variant.only)]
    jobs = [Job(*kernel, t, v.arguments, v.constants, v.options) for t, v in pairs]
    reports = compile_kernels(jobs)
    for (target, variant), report in zip(pairs, reports):
        where = f"{kernel[1]}, {target}, {variant.name}"
        assert report.spills == 0 and report.stack == 0, f"{where}: registers are spilled"
        assert 0 < report.registers <= 255, where
        assert report.shared <= SHARED[target], f"{where}: it does not fit"
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
    assert written == set(KERNELS)


@pytest.mark.parametrize("kind, digits", [("fp32", "f32"), ("bf16", "f32"), ("fp64", "f64")])
def test_scale_bias_is_contracted(kind, digits):
    """One multiply-add where it may be, in FP32, and in FP64 for FP64 alone."""
    variant = next(v for v in FUSED_ELEMENTWISE["scale_bias_kernel"]() if v.name[:4] == kind)
    constants, options = variant.constants, variant.options
    kernel = ("fused_elementwise", "scale_bias_kernel", "sm_90", variant.arguments, constants)
    fused, apart = (
        set(re.findall(r"\b(?:fma|mul|add)\.rn\.f\d\d", report.asm["ptx"]))
        for report in compile_kernels(
            [Job(*kernel, options | {"enable_fp_fusion": fusion}) for fusion in (True, False)]
        )
    )
    assert fused == {f"fma.rn.{digits}"}
    assert apart == {f"mul.rn.{digits}", f"add.rn.{digits}"}


@pytest.mark.full
def test_gemm_fast_stages_take_the_shared_memory_that_its_page_counts():
    """``mma.sync`` has its operands in registers: while it runs, one buffer fewer is in use."""
    lesson = lesson_code.load("gemm_fast")
    variants = [v for v in gemm_fast_pointers() if v.only == "sm_9"]
    variants += [v for v in gemm_fast_descriptors() if v.only == "sm_9"]
    tiles = [tuple(v.constants[f"BLOCK_{axis}"] for axis in "MNK") for v in variants]
    options = [tuple(v.options.values()) for v in variants]
    names = ["matmul_kernel" if "a_ptr" in v.arguments else "descriptor_kernel" for v in variants]
    kernels = [("gemm_fast", name, "sm_90") for name in names]
    jobs = [Job(*k, v.arguments, v.constants, v.options) for k, v in zip(kernels, variants)]
    for name, tile, option, report in zip(names, tiles, options, compile_kernels(jobs)):
        [shape] = set(re.findall(r"mma[.\w:]*\.(m\d+n\d+k16)", report.asm["ptx"]))
        counted, stages = lesson.need((*tile, *option)), option[1]
        if option[0] == 2:
            assert shape == "m16n8k16" and "wgmma" not in report.asm["ptx"]
            counted = counted * max(1, stages - 1) // stages
        else:
            assert shape == f"m64n{tile[1]}k16" and "wgmma.mma_async" in report.asm["ptx"]
        barriers = 8 * (stages + 1) if name == "descriptor_kernel" else 0
        assert counted <= report.shared <= counted + barriers, (name, tile, option)


@pytest.mark.parametrize(
    "target, room", [("sm_90", 227 << 10), pytest.param("sm_86", 99 << 10, marks=pytest.mark.full)]
)
def test_autograd_stages_fit_with_a_weight_of_float32(target, room, monkeypatch):
    """A GPU with that much shared memory gets a plan that fits, with 16-bit rows too."""
    import torch

    card = SimpleNamespace(shared_memory_per_block_optin=room, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    lesson, jobs = lesson_code.load("autograd"), []
    monkeypatch.setattr(lesson, "INTERPRET", False)
    [pointers] = [v.arguments for v in autograd_backward() if v.name == "bf16 (1, 8192, 2, 1) True"]
    for N, kind in itertools.product((4096, 8192, 16384), ("fp32", "bf16")):
        weight = torch.empty(1, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)
        _, tile, warps, _ = lesson.plan(weight.bfloat16(), N, weight)
        constants = {"stride_xn": 1, "stride_yn": 1, "HOW": "parts", "lock_ptr": None}
        constants |= dict(zip(("ROWS", "BLOCK", "SPLIT", "STAGES"), tile))
        arguments = pointers | {"w_ptr": f"*{kind}:16"}
        kernel = "autograd", "norm_backward_kernel", target
        jobs.append(Job(*kernel, arguments, constants, {"num_warps": warps}))
    assert {job.constants["STAGES"] for job in jobs} == {1, 3}
    for job, report in zip(jobs, compile_kernels(jobs)):
        assert report.shared <= room, job


def test_autograd_programs_fit_at_a_time_with_unaligned_rows():
    """Four of 128 threads an SM: where three fit, the last of them come after the rest."""
    wanted = [v for v in autograd_backward() if re.match(r"(bf16|fp32) \(2, 1024, 1, 1\)", v.name)]
    assert len(wanted) == 4
    for report in check(("autograd", "norm_backward_kernel"), ["sm_90"], wanted):
        assert report.registers <= 65536 // (4 * 128)


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.full) for t in ("sm_80", "sm_100"))]
)
def test_autotune_prunes_by_shared_memory(target):
    """What is kept fits; what is left out on Hopper would not; hardly a register is spilled."""
    lesson = lesson_code.load("autotune")
    [arguments] = [v.arguments for v in autotune_gemm() if v.only == ""]
    one = dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1)
    configs = lesson.SPACE[1::2]  # four stages
    jobs = [
        Job(
            *("autotune", "gemm_kernel", target, arguments, one | config.kwargs),
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        )
        for config in configs
    ]
    for config, report in zip(configs, compile_kernels(jobs)):
        counted = lesson.shared_bytes(config, 2)
        assert report.shared <= counted, config
        if counted <= SHARED[target]:
            assert report.spills <= 8, config
        elif target == "sm_90":
            assert report.shared > SHARED[target], config


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
