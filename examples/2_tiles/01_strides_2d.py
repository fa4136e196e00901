r"""
Strides: one kernel for every view
==================================

A transposed matrix, every second column, one row repeated: PyTorch makes such
views without moving a byte. Here you write copy, transpose and bias-add that
are right for all of them, and see from the strides which will be slow.

- Which data does one program own? A tile: some rows and columns of ``out``.
- How does it move? Between addresses that the strides of each view give.
- What limits the speed? Memory: how many of the bytes it brings are wanted.
"""

import math
import os

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
results = []
print("" if free else "Left out, no GPU: speed, offsets beyond 2**31")

# %%
# Where is element (i, j)?
# ------------------------
#
# A *stride* counts the elements from one neighbour to the next in memory, for
# each dimension of a view:
#
# .. math:: \mathrm{offset}(i, j) = i \cdot \mathrm{stride}_m
#           + j \cdot \mathrm{stride}_n
#
# Let ``i`` be a column, ``[:, None]``, and ``j`` a row, ``[None, :]``: the sum
# broadcasts to a block of offsets. This kernel writes the addresses down.


@triton.jit
def address_kernel(x_ptr, out_ptr, M, N, stride_xm, stride_xn):
    i, j = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    address = (x_ptr + i * stride_xm + j * stride_xn).to(tl.int64)  # in bytes
    tl.store(out_ptr + i * N + j, address, mask=(i < M) & (j < N))


x = torch.zeros(6, 8, device=DEVICE)  # a row is 32 bytes
_, axes = plt.subplots(1, 3, figsize=(7, 3.1), layout="constrained")
for ax, name in zip(axes, ["x.t()", "x[1::2, ::3]", "x[4].expand(4, 8)"]):
    view = eval(name)
    seen = torch.empty(view.shape, dtype=torch.int64, device=DEVICE)
    address_kernel[(1,)](view, seen, *view.shape, *view.stride())
    for i, row in enumerate(((seen - x.data_ptr()) // 4).tolist()):
        for j, offset in enumerate(row):
            alpha = 0.1 + 0.14 * (offset // 8)
            ax.bar(j, 0.9, 0.9, i - 0.45, color="#3B82C4", alpha=alpha)
            ax.text(j, i, offset, size=9, ha="center", va="center")
    ax.set(xticks=range(j + 1), yticks=range(i + 1), ylim=(i + 0.6, -0.6))
    ax.set(xlabel="j", ylabel="i", title=f"{name}\nstrides {view.stride()}")
plt.show()

# %%
# Figure. The offsets that the kernel calculated for three views of one matrix
# of 6 by 8 float32 elements. A shade is a row of ``x``, 32 bytes: a row of
# ``x.t()`` meets all six, and the repeated row is always the same one.
#
# What it must cost
# -----------------
#
# Each element is read and written once: ``2 * M * N * size`` bytes, and 0 or 1
# FLOP an element. So the roof is the copy rate.


def record(provider, case, moved, call):
    """Time a call that moves so many bytes; keep and return its GB/s."""
    ms = triton.testing.do_bench(call, 10, 60, quantiles=[0.8, 0.5, 0.2])
    row = dict(zip(("low", "value", "high"), (moved / t / 1e6 for t in ms)))
    results.append(case | row | dict(provider=provider, metric="GB/s"))
    return row["value"]


n = 8192 if free > 20e9 else 4096
if free:
    src, dst = torch.randn(2, 2**28 if free > 8e9 else 2**27, device=DEVICE)
    copied = 2 * src.nbytes, lambda: dst.copy_(src)
    rate = record("ceiling", dict(op="copy"), *copied)
    print(f"{rate:.0f} GB/s: {8 * n * n / rate / 1e3:.0f} us for float32 {n}²")

# %%
# The kernel
# ----------
#
# A program owns a tile of ``out``. It addresses ``out`` by the strides of
# ``out`` and ``x`` by those of ``x``, so it copies any view to any view. A
# transpose is the copy of ``x.t()``. A bias is a view as well, with stride 0
# along ``i``. Offsets have 64 bits: even a tile may span ``2**31`` elements.


@triton.jit
def tile_kernel(
    x_ptr, bias_ptr, out_ptr, M, N,
    stride_xm, stride_xn, stride_bm, stride_bn, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = (N - 1) // BLOCK_N + 1  # cdiv overflows near 2**31
    pid_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    pid_n = (tl.program_id(0) % tiles_n).to(tl.int64)
    i = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    j = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    x_ptrs = x_ptr + i * stride_xm + j * stride_xn
    out_ptrs = out_ptr + i * stride_om + j * stride_on
    bias_offs = i * stride_bm + j * stride_bn
    if (pid_m + 1) * BLOCK_M <= M and (pid_n + 1) * BLOCK_N <= N:
        x = tl.load(x_ptrs)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + bias_offs)
        tl.store(out_ptrs, x)
    else:  # a tile at the edge
        mask = (i < M) & (j < N)
        x = tl.load(x_ptrs, mask=mask)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + bias_offs, mask=mask)
        tl.store(out_ptrs, x, mask=mask)


# %%
# The wrappers
# ------------
#
# The order of the axes is free: the one along which ``out`` has its neighbours
# comes last. If ``x`` has them along the other, the tile is square, else a
# piece of a row. Rows that follow each other without a gap in both are one.
# Where inputs lie among the elements of ``out``, a new tensor is written first
# and then copied.

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [torch.float32, torch.float16, torch.float64]
FLOATS += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly
KINDS = "cuda or cpu" if INTERPRET else "cuda"


def launch(x, bias, out, tile=None):
    """Start the kernel for arguments already checked."""
    row = (0, 0) if bias is None else (0, bias.stride(0))
    dims = zip(x.shape, x.stride(), row, out.stride())
    dims = [(n, *(stride * (n > 1) for stride in rest)) for n, *rest in dims]
    dims.sort(key=lambda dim: (dim[0] > 1, -dim[3]))  # by strides of out
    (M, xm, bm, om), (N, xn, bn, on) = dims
    if bias is None:  # move bits, whatever they mean
        x, out = (t.view(WORDS[t.itemsize]) for t in (x, out))
        if (xm, om) == (N * xn, N * on):
            M, N, xm, om = 1, M * N, 0, 0
    turn, size = 0 < xm < xn, x.itemsize
    even = (xm, on) == (1, 1) and (xn | om) * size % 16 == 0
    side = 32 if turn and not even else (256 if turn else 2048) // size
    area = min(side * side, 2**15 // size) if turn else side
    tall, wide = map(triton.next_power_of_2, (M, N))
    block_m = min(tall, area // min(wide, side))
    block = tile or (block_m, min(wide, area // block_m))
    grid = (triton.cdiv(M, block[0]) * triton.cdiv(N, block[1]),)
    args = x, bias, out, M, N, xm, xn, bm, bn, om, on, *block
    with torch.cuda.device_of(x):
        return tile_kernel[grid](*args, num_warps=8 if turn and even else 4)


def check(name, t, x, shape=None):
    """Refuse what the kernel cannot take, as x or beside it."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.layout != torch.strided or t.is_nested or t.is_neg() or t.is_conj():
        raise ValueError(f"{name} is sparse, nested or lazy; pass a copy")
    if t.itemsize not in WORDS or t.is_quantized or t.dtype != x.dtype:
        raise TypeError(f"{name} has {t.dtype}, not the one of x, <= 8 bytes")
    if t.dim() != 2 if shape is None else t.shape != shape:
        raise ValueError(f"{name} has {t.shape}, not {shape or 'two sizes'}")
    if t.device != x.device or t.device.type not in KINDS:
        raise ValueError(f"{name} is on {t.device}; needed: one {KINDS} device")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def write(x, bias, out):
    out = x.new_empty(x.shape) if out is None else out
    check("out", out, x, x.shape)
    if out.numel() == 0:
        return out  # nothing to launch
    (M, s), (N, r) = zip(out.shape, out.stride())
    both = math.gcd(s, r) or 1  # i * s == j * r first at i = r // both
    if M * N > 1 and r // both < M and s // both < N:
        raise ValueError("positions of out share an element; pass a new out")
    same = (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride())
    last = lambda t: t[(-1,) * t.dim()].data_ptr()  # of the last element
    for t in (x,) * (not same) + (bias,) * (bias is not None):
        if t.data_ptr() <= last(out) and out.data_ptr() <= last(t):
            x, bias = write(x, bias, None), None
    launch(x, bias, out)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


def copy_2d(x, out=None):
    """Return a copy of the matrix ``x``, bit by bit.

    x: any view of two dimensions; elements of 1, 2, 4 or 8 bytes; on CUDA.
    out: where to write, alike, without positions that share an element. May be
        x. If an input lies among them otherwise, that takes a new tensor.
    Raises TypeError or ValueError before anything is written.
    """
    check("x", x, x)
    return write(x, None, out)


def transpose(x, out=None):
    """Return a copy of ``x.t()``; see ``copy_2d``."""
    check("x", x, x)
    return write(x.t(), None, out)


def bias_add(x, bias, out=None):
    """Return ``x + bias``, rounded once; see ``copy_2d``. Of float32, float16,
    float64, bfloat16 (not interpreted). bias: any view of size N."""
    check("x", x, x)
    check("bias", bias, x, x.shape[1:])
    if x.dtype not in FLOATS:
        raise TypeError(f"x has {x.dtype}; supported here: {FLOATS}")
    return write(x, bias, out)


# %%
# Is it right?
# ------------
#
# For every view? Here are eleven, for three kinds of ``out`` and each dtype. On
# a GPU, where most combinations are compiled anew, it is every eleventh. What
# counts is float64, rounded once. NaN around the data shows each slip.

OPS = {  # ours, and PyTorch's
    "copy_2d": (copy_2d, lambda x, out: out.copy_(x)),
    "transpose": (transpose, lambda x, out: out.copy_(x.t())),
    "bias_add": (bias_add, lambda x, bias, out: torch.add(x, bias, out=out)),
}
VIEWS = """x x.t() x[::2] x.t()[:,1::3] x[5:,2:66] x[:1].expand(64,67) x[9:9]
x[:,7:8].expand(75,70) x[3:4] x[:,3:4] x.as_strided((40,28),(1,1))""".split()
ROOMS = "(N, 1)", "(1, M)", "(4 * N, 2)"  # strides of out, in a buffer
combinations = [(v, r, d) for v in VIEWS for r in ROOMS for d in FLOATS]
for name, strides, dtype in combinations[:: 1 if INTERPRET else 11]:
    room = torch.full((200, 83), torch.nan, dtype=dtype, device=DEVICE)
    x = room[8:83, 8:75].normal_()
    view = eval(name)
    bias = room[99:199, 9].normal_()[: view.shape[1]]
    total = (view.double() + bias.double()).to(dtype)
    for op, want in zip(OPS, (view, view.t(), total)):
        (M, N), b = want.shape, x.new_full((4 * want.numel() + 9,), torch.nan)
        out = b.as_strided((M, N), eval(strides), 8)
        OPS[op][0](*(view, bias)[: 1 + (want is total)], out=out)
        equal = torch.equal(out, want)
        out.fill_(torch.nan)
        if not equal or not b.isnan().all():
            raise RuntimeError(f"{op} of {name} is wrong in {dtype}")
print(f"right: {', '.join(OPS)} of {', '.join(VIEWS)}")
if free > 6e9:
    x = torch.zeros(2**31 + 99, dtype=torch.int8, device=DEVICE)
    x = x.as_strided((3, 64), (2**30, 1)).random_(-99, 99)
    print("beyond 2**31:", torch.equal(transpose(x), x.t()))

# %%
# How fast is it?
# ---------------
#
# Which views will be slow? Memory hands out whole pieces, here of 64 bytes. 32
# threads that load 32 float32 neighbours want every byte: their access is
# *coalesced*. With step 2 they want half. So count the pieces that a view
# touches, and predict about what its copy can reach, in bytes of elements. Two
# views are rows of a wider matrix (``window``: 16 columns more, ``odd-window``:
# one); ``even-rows`` takes every second row, ``one-row`` repeats one.

views = {"contiguous": (n, 1), "transposed": (1, n), "window": (n + 16, 1)}
views |= {"odd-window": (n + 1, 1), "even-rows": (2 * n, 1), "one-row": (0, 1)}
views |= {f"step-{step}": (step * n, step) for step in (2, 4, 8, 16, 32)}
cases = [("copy_2d", view, torch.float32) for view in views]
rest = "transpose contiguous", "bias_add contiguous", "bias_add transposed"
cases += [(*names.split(), dtype) for dtype in FLOATS[:2] for names in rest]
shown = {}
for op, view, dtype in cases if free else ():
    strides = views[view]
    x = torch.randn((n - 1) * sum(strides) + 1, device=DEVICE).to(dtype)
    x = x.as_strided((n, n), strides)
    args = (x, x[0].clone())[: 1 + (op == "bias_add")]
    out, want = x.new_empty(2, n, n)
    ours, eager = OPS[op]
    eager(*args, out=want)
    case = dict(op=op, view=view, M=n, N=n, dtype=str(dtype)[6:])
    moved = 2 * out.nbytes
    i, j = torch.arange(64)[:, None], torch.arange(n)  # count in 64 rows
    offs = (i * strides[0] + j * strides[1]) * x.itemsize
    pieces = (offs // 64).unique().numel() * n // 64  # in all rows
    speeds = {"pieces": rate * moved / (64 * pieces + out.nbytes)}
    speeds["ceiling"] = record("ceiling", case, *copied)
    calls = {"torch": eager, "triton": ours}
    if op != "copy_2d" or view in ("contiguous", "step-2"):
        torch.compiler.reset()  # compile for this case alone
        calls["torch.compile"] = torch.compile(eager, dynamic=False)
    for provider, function in calls.items():
        out.fill_(torch.nan)
        call = lambda: function(*args, out=out)
        if not torch.equal(call(), want):
            raise RuntimeError(f"{provider} is wrong: {case}")
        speeds[provider] = record(provider, case, moved, call)
    shown[op, view, dtype] = speeds
    print(op, view, case["dtype"], {k: round(v) for k, v in speeds.items()})
colors = {"pieces": "#D1495B", "torch": "#7f7f7f", "triton": "#3B82C4"}
for marker, name in zip("_os", colors):
    y = [shown["copy_2d", v, torch.float32][name] for v in views if free]
    plt.plot([*views][: len(y)], y, marker, c=colors[name], label=name, ms=9)
plt.xticks(rotation=40)
plt.gca().set(ylabel="GB/s", ylim=0)
plt.legend()
plt.show()

# %%
# Figure. Copying views of float32 elements: PyTorch, the kernel, and the
# rate of a copy for the pieces touched. A name like ``step-4`` says that every
# fourth element of a row is copied.
#
# The contiguous copy has :measured:`strides_2d triton/ceiling metric=GB/s
# op=copy_2d view=contiguous` of the copy rate, step 2 :measured:`strides_2d
# triton/ceiling metric=GB/s op=copy_2d view=step-2`: it reads twice the bytes
# and writes the same. A transpose touches no
# more pieces. In float32 and float16, PyTorch has :measured:`strides_2d
# torch/ceiling metric=GB/s op=transpose dtype=float32`, :measured:`strides_2d
# torch/ceiling metric=GB/s op=transpose dtype=float16`, the tiles have
# :measured:`strides_2d triton/ceiling metric=GB/s op=transpose dtype=float32`,
# :measured:`strides_2d triton/ceiling metric=GB/s op=transpose dtype=float16`.
#
# Which tile?
# -----------
#
# The compiler sees which axis has stride 1 in ``x`` and which in ``out``, so
# threads load and store neighbours. In between, they exchange the tile in
# shared memory. Here is the speed of a transpose, in GB/s, by the tile:

sides = (16, 32, 64, 128)
for dtype in FLOATS[:2] if free else ():
    x = torch.randn(n, n, device=DEVICE).to(dtype)
    out = torch.empty_like(x)
    print(f"{str(dtype)[6:]} BLOCK_M", *(f"{k:6}" for k in sides), "BLOCK_N")
    for m in sides:
        row = []
        for k in [k for k in sides if m * k * dtype.itemsize <= 2**15]:
            case = dict(BLOCK_M=m, BLOCK_N=k, dtype=str(dtype)[6:])
            record("ceiling", case, *copied)
            call = lambda: launch(x.t(), None, out, (m, k))
            row += [record("triton", case, 2 * out.nbytes, call)]
        print(f"{m:15}", *(f"{speed:6.0f}" for speed in row))
    shared = [launch(v, None, out).metadata.shared for v in (x, x.t())]
    print("bytes of shared memory for a copy and a transpose:", *shared)

# %%
# Runs must be long in loads and in stores: 64 by 64 float32 elements reach
# :measured:`strides_2d triton metric=GB/s BLOCK_M=64 BLOCK_N=64 dtype=float32`,
# 16 by 128 :measured:`strides_2d triton metric=GB/s BLOCK_M=16 BLOCK_N=128
# dtype=float32`; float16, 128 by 128, :measured:`strides_2d triton metric=GB/s
# BLOCK_M=128 BLOCK_N=128 dtype=float16`.
#
# .. admonition:: Takeaway
#
#    Strides say where an element is and who its neighbours are. Let threads
#    take neighbours in loads and in stores.
#
# Exercises
# ---------
#
# - Predict the speed of ``copy_2d(x[::2, ::2])`` by its pieces.
# - Write ``int32`` for ``int64`` in ``tile_kernel``. Which check on a GPU
#   sees it?
#
# Reading
# -------
#
# - Tensors and views: https://docs.pytorch.org/docs/stable/tensors.html
