r"""
Softmax: a row in registers
===========================

Softmax turns each row of scores into positive numbers that sum to one. You
write it in the five steps of every row operator, keep rows of up to 128 KiB on
the chip so that memory is read once, and see what happens where they end.

- Which data does one program own? One row, or a few short ones.
- How does it move? Into registers once and back once, if the row fits.
- What limits the speed? Memory, and how much of a row one program can hold.
"""

import inspect
import math
import os
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
results, excerpts = [], {}
if not free:
    print("Left out, no GPU: speed, registers, memory traffic, bfloat16")

# %%
# What it must cost
# -----------------
#
# With an operator for each step, softmax passes over the matrix eight times:
# maximum and sum read it, difference, exponential and quotient read and write.
# One kernel needs two passes. Those are five FLOP for 8 bytes of float32, so
# memory decides: ``t >= 2 * M * N * size / bandwidth``. At 4000 GB/s, ``2**28``
# float32 elements take 537 us in two passes, 2147 us in eight.


def softmax_ref(x):
    return torch.softmax(x.double(), 1)


# %%
# Five steps
# ----------
#
# A row of five scores takes a block of eight, ``next_power_of_2(5)``. What do
# the three empty positions hold? The neutral element of the next operation, the
# maximum: ``-inf``. Its exponential is 0, and that is neutral in the sum.

row = torch.tensor([1.0, 3.0, -2.0, 0.5, 2.0] + [-math.inf] * 3)
steps = {"1, 2  map, load": row, "3  minus maximum": row - row.max()}
steps |= {"4  exp": (row - row.max()).exp(), "5  over sum": row.softmax(0)}
plt.figure(figsize=(7, 2), layout="constrained")
for y, values in enumerate(steps.values()):
    for x, value in enumerate(values.tolist()):
        look = dict(color="#3B82C4" if x < 5 else "#D1495B", alpha=0.3)
        plt.text(x, -y, f"{value:.3f}", ha="center", bbox=look)
plt.yticks(range(0, -4, -1), steps)
plt.axis((-0.6, 7.6, -3.4, 0.6))
plt.grid(False)
plt.show()

# %%
# Figure. One row of five values in a block of eight, from step to step. The
# three masked positions on the right hold ``-inf``, and later 0.
#
# Why subtract the maximum?
# -------------------------
#
# To mathematics it is nothing: ``exp(-m)``, a factor of all terms, cancels. To
# hardware it is all: the largest float32 is about ``exp(88.7)``, and
# ``exp(-104)`` is 0. What does a kernel without step 3 return?
#
# .. math:: \frac{e^{x_i}}{\sum_j e^{x_j}}
#           = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}


@triton.jit
def naive_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    e = tl.exp(tl.load(x_ptr + cols, cols < N, -float("inf")))
    tl.store(out_ptr + cols, e / tl.sum(e, 0), cols < N)


for top in (1, 88, 89, -120):
    x = torch.tensor([top, top - 1.0, top - 2.0], device=DEVICE)
    naive_kernel[(1,)](x, x, 3, triton.next_power_of_2(3))
    print(f"{top:4}", *(f"{value:8.4f}" for value in x.tolist()))

# %%
# At 89 the first is infinity over infinity, the others are finite over
# infinity. At -120 all are zero over zero. After step 3 the largest exponential
# is 1, and the sum lies between 1 and ``N``.
#
# The kernel
# ----------
#
# A row of 12,288 in a block of 16,384 would waste a quarter of its registers.
# So a row is a tuple of shorter blocks; only the last needs a mask. Rows past
# the end load the last one again, and are not stored. ``N // VECTOR * VECTOR``
# is ``N``, but now the compiler knows what divides it, and loads 16 bytes.
#
# The hardware has a power of two: ``exp(x) = exp2(x * log2(e))``. Why do steps
# 4 and 5 both calculate it? In float32 the compiler sees one expression twice,
# and keeps its value where ``x`` was. A 16-bit ``x`` takes half of the
# registers. There ``NARROW`` hides ``x`` behind a move that the compiler cannot
# see through: ``x`` is kept, and its exponential calculated again.

LOWEST = tl.constexpr(-math.inf)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def shifted_exp(x, m, NARROW: tl.constexpr):
    if NARROW:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2
        )
    return tl.exp2((x.to(m.dtype) - m) * LOG2E)


@triton.jit
def softmax_kernel(
    x_ptr, out_ptr, M, N, stride_xm, stride_xn, stride_om, stride_on,
    NARROW: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    IS_DOUBLE: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    stride_xm = stride_xm // VECTOR * VECTOR
    stride_om = stride_om // VECTOR * VECTOR
    # 1 map
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live, rows = (rows < M) | (ROWS == 1), tl.minimum(rows, M - 1)
    cols = tl.arange(0, PIECE).to(tl.int64)[None, :]
    x_ptrs, out_ptrs = x_ptr + rows * stride_xm, out_ptr + rows * stride_om
    last = (PIECES - 1) * PIECE + cols
    mask = last < N // VECTOR * VECTOR
    # 2 load
    xs = ()
    for p in tl.static_range(PIECES - 1):
        xs = xs + (tl.load(x_ptrs + (p * PIECE + cols) * stride_xn),)
    xs = xs + (tl.load(x_ptrs + last * stride_xn, mask, LOWEST),)
    # 3 maximum
    high = xs[0]
    for p in tl.static_range(1, PIECES):
        high = tl.maximum(high, xs[p])
    m = tl.max(high, 1)[:, None].to(DTYPE)
    # 4 exponential and sum
    total = tl.zeros((ROWS, PIECE), DTYPE)
    for p in tl.static_range(PIECES):
        total += shifted_exp(xs[p], m, NARROW)
    scale = 1 / tl.sum(total, 1)[:, None]
    # 5 normalise and store
    for p in tl.static_range(PIECES - 1):
        y = shifted_exp(xs[p], m, NARROW) * scale
        tl.store(out_ptrs + (p * PIECE + cols) * stride_on, y, live)
    y = shifted_exp(xs[PIECES - 1], m, NARROW) * scale
    tl.store(out_ptrs + last * stride_on, y, mask & live)


# %%
# Rows that do not fit
# --------------------
#
# How can one subtract a maximum that is not known yet? Take the maximum so far;
# when a larger one comes, multiply the sum by ``exp(old - new)``. This *online*
# softmax reads once for maximum and sum, and again to write.
#
# A thread has its own maximum and sum for each column, along ``STEPS``; threads
# meet after the loop. While a maximum is ``-inf``, the shift is 0, as
# ``-inf - -inf`` is NaN. The second pass goes backwards, to what was read last.


@triton.jit
def online_kernel(
    x_ptr, out_ptr, N, stride_xm, stride_xn, stride_om, stride_on,
    STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    IS_DOUBLE: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    x_ptr += tl.program_id(0).to(tl.int64) * stride_xm
    out_ptr += tl.program_id(0).to(tl.int64) * stride_om
    offs = tl.arange(0, STEPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    offs = offs.to(tl.int64)
    blocks = (N - 1) // (STEPS * WIDTH) + 1
    m, total = tl.full((WIDTH,), LOWEST, DTYPE), tl.zeros((WIDTH,), DTYPE)
    for i in range(0, blocks):
        cols = i * STEPS * WIDTH + offs
        ptrs = x_ptr + cols * stride_xn
        x = tl.load(ptrs, cols < N, LOWEST, eviction_policy="evict_last")
        high = tl.maximum(m, tl.max(x, 0).to(DTYPE))
        shift = tl.where(high == LOWEST, 0, high)
        total *= tl.exp2((m - shift) * LOG2E)
        total += tl.sum(shifted_exp(x, shift[None, :], False), 0)
        m = high
    top = tl.max(m, 0)
    total *= tl.exp2((m - tl.where(top == LOWEST, 0, top)) * LOG2E)
    scale = 1 / tl.sum(total, 0)
    for i in range(0, blocks):
        cols = (blocks - 1 - i) * STEPS * WIDTH + offs
        ptrs = x_ptr + cols * stride_xn
        x = tl.load(ptrs, cols < N, LOWEST, eviction_policy="evict_first")
        y, ptrs = shifted_exp(x, top, False) * scale, out_ptr + cols * stride_on
        tl.store(ptrs, y, cols < N, eviction_policy="evict_first")


# %%
# How much does a thread hold?
# ----------------------------
#
# From a sweep on an H200: 32 bytes in rows of up to 16 KiB, else 128, in pieces
# of 16. Short rows share a program of 2 KiB. Above ``LONGEST`` bytes the online
# kernel takes over.

LONGEST = 131_072
DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly


def plan(N, size, vector):
    """Rows of a program, pieces of a row, the length of a piece, warps."""
    width = triton.next_power_of_2(N)
    tile = width * size
    rows = max(1, 2048 // tile)
    parts, warps = (2, tile // 1024) if tile <= 16_384 else (8, tile // 4096)
    if size == 2 and vector == 1 and tile <= 16_384:
        parts, warps = 8, warps // 2
    piece, warps = max(1, width // parts), max(warps, 2 if rows > 1 else 1)
    return rows, triton.cdiv(N, piece), piece, min(32, warps)


def launch(x, out, online):
    """Start a kernel for arguments that were checked; return it compiled."""
    M, N, *strides = *x.shape, *x.stride(), *out.stride()
    size = x.itemsize
    lengths = N | strides[0] | strides[2]
    bits = x.data_ptr() | out.data_ptr() | size * lengths
    vector = 16 // size if bits % 16 == 0 else 1
    if online:  # 16 bytes for each thread of 32 warps, in steps
        wide = vector > 1 and lengths % 16 == 0 and strides[1::2] == [1, 1]
        args = x, out, N, *strides, 4 if wide else 2, 16_384 // size
        return online_kernel[(M,)](*args, num_warps=32)
    rows, *pieces, warps = plan(N, size, vector)
    narrow = size == 2 and not INTERPRET and not torch.version.hip
    args = x, out, M, N, *strides, narrow, vector, rows, *pieces
    return softmax_kernel[(triton.cdiv(M, rows),)](*args, num_warps=warps)


# %%
# The wrapper
# -----------
#
# Every view is welcome as ``x``. In ``out`` no two positions may share an
# element. It may be ``x``, as a program reads each element before it writes it.


def check(name, t, x):
    """Refuse a tensor that the kernels cannot take beside ``x``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse, nested or negated; pass a copy")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} has {t.dtype}; supported here: {DTYPES}")
    if t.dtype != x.dtype:
        raise TypeError(f"{name} has {t.dtype}, x has {x.dtype}")
    if t.dim() != 2 or t.shape != x.shape:
        wanted = "two dimensions" if t is x else f"{tuple(x.shape)} like x"
        raise ValueError(f"{name} has shape {tuple(t.shape)}, not {wanted}")
    if t.device.type != ("cpu" if INTERPRET and t.is_cpu else "cuda"):
        raise ValueError(f"{name} is on {t.device}; the kernel runs on cuda")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def softmax(x, out=None):
    """Return the softmax of each row of ``x``, like ``torch.softmax(x, 1)``.

    x: two dimensions, also empty, any strides; float32, float16, float64 or
        bfloat16 on CUDA. Interpreted: CPU, no bfloat16.
    out: where to write, like x in shape, dtype and device, any strides; x
        itself or another stretch of memory.
    A row with NaN or +inf, or with nothing but -inf, becomes NaN.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("x", x, x)
    out = x.new_empty(x.shape) if out is None else out
    check("out", out, x)
    if x.numel() == 0:
        return out  # nothing to launch
    (M, N), (s, r) = out.shape, out.stride()
    common = math.gcd(s, r) or 1
    if M * N > 1 and r // common < M and s // common < N:  # i * s == j * r
        raise ValueError("positions of out share an element; pass a new out")
    (a, b), (c, d) = [(t.data_ptr(), t[-1:, -1:].data_ptr()) for t in (x, out)]
    same, size = (a, x.stride()) == (c, out.stride()), x.itemsize
    if not same and a < d + size and c < b + size:
        raise ValueError("out and x may overlap; pass a new out")
    with torch.cuda.device_of(x):  # launch where the data is
        launch(x, out, N * size > LONGEST)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# Which error is fair? Half of the last place, ``eps / 2``, and some rounding
# before. The table has the largest relative error against float64, less one
# smallest positive number. Kernels read and write windows in buffers of NaN.

torch.manual_seed(0)
print(f"{'M':>7} {'N':>9}", *(f"{str(d)[6:]:>8}" for d in DTYPES))
shapes = [(0, 5), (5, 0), (5, 1), (9, 128), (9, 781), (3, 12_288), (2, 32_771)]
shapes += [(1, 2**17 + 1)] + [(2**15 + 1, 1000), (7, 2**20)] * (free > 4e9)
for M, N in shapes:
    errors = []
    for dtype in DTYPES:
        room = torch.full((2, M, N + 24), torch.nan, device=DEVICE).to(dtype)
        x, out = room[:, :, 16 : N + 16]
        softmax(x.normal_(), out=out)
        exact, limits = softmax_ref(x), torch.finfo(dtype)
        off = (out.double() - exact).abs() - limits.tiny * limits.eps
        errors += [max([0, *(off / exact).amax(1).tolist()] if N else [0])]
        fair = limits.eps / 2 + 32 * min(limits.eps, 2**-23)
        if not errors[-1] <= fair or room[1].isnan().sum() != 24 * M:
            raise RuntimeError(f"softmax is wrong: {M} x {N}, {dtype}")
    print(f"{M:7,} {N:9,}", *(f"{error:8.1e}" for error in errors))

# %%
# Both kernels treat infinities and NaN like ``torch.softmax``. A masked score
# is ``-inf``; a row of nothing else has no answer. Then come other views.

inf, nan = math.inf, math.nan
rows = [[-inf, 0, 1], [-inf] * 3, [inf, 0, 1], [nan, 0, 1], [3e38, -3e38, 3e38]]
x = torch.tensor(rows, device=DEVICE)
for online in (False, True):
    launch(x, out := torch.empty_like(x), online)
    torch.testing.assert_close(out, torch.softmax(x, 1), equal_nan=True)
for row, y in zip(rows, out.tolist()):
    print(f"{row!s:22}", *(f"{value:6.4f}" for value in y))
x, near = torch.randn(64, 96, device=DEVICE), dict(rtol=1e-5, atol=1e-30)
for view in x.t(), x[::2, 1::3], x[:1].expand(64, -1), x[5:9, 6:8]:
    out = softmax(view, out=torch.empty_like(view.t()).t())
    torch.testing.assert_close(out.double(), softmax_ref(view), **near)

# %%
# How fast is it?
# ---------------
#
# ``2**28`` elements, ``2**26`` on a small GPU, are cut into rows. ``triton`` is
# the wrapper; ``block`` and ``online`` are its kernels on their own: where does
# a row stop fitting?


def measure(call, moved):
    ms = triton.testing.do_bench(call, 10, 60, quantiles=[0.8, 0.5, 0.2])
    return {k: moved / t / 1e6 for k, t in zip(("low", "value", "high"), ms)}


size = 2**28 if free > 7e9 else 2**26
sizes = sorted([781, 1000, 12_288, 49_152] + [2**e for e in range(7, 21)])
if free:
    src, dst = (torch.randn(size, device=DEVICE) for _ in range(2))
for N, dtype in [(N, d) for d in DTYPES[::3] for N in sizes] if free else ():
    n = size // N * N
    x, out = src[:n].view(-1, N).to(dtype), dst.view(dtype)[:n].view(-1, N)
    torch.compiler.reset()  # compile for this size alone
    compiled = torch.compile(lambda x: torch.softmax(x, 1), dynamic=False)
    calls = {"torch": lambda: torch.softmax(x, 1, out=out)}
    calls |= {"torch.compile": lambda: compiled(x)}
    calls |= {"triton": lambda: softmax(x, out=out)}
    case = dict(N=N, bytes=2 * x.nbytes, dtype=str(dtype)[6:])
    if N <= 131_072:
        kernel = launch(x, out, False)
        for metric in "n_regs", "n_spills":
            n = getattr(kernel, metric)
            count = case | dict(metric=metric, value=n, low=n, high=n)
            results.append(count | dict(provider="triton:block"))
    if 8192 <= N <= 131_072:
        calls["triton:online"] = lambda: launch(x, out, True) and out
        calls["triton:block"] = lambda: launch(x, out, False) and out
    speeds = {"ceiling": measure(lambda: dst.copy_(src), 8 * size)}
    for provider, call in calls.items():
        out.fill_(torch.nan)
        y, exact = call()[-9:].double(), softmax_ref(x[-9:])
        torch.testing.assert_close(y, exact, rtol=0.01, atol=1e-6)
        speeds[provider] = measure(call, case["bytes"])
    print(f"\n{N:9,} {case['dtype']} GB/s:", end="")
    for provider, speed in speeds.items():
        results.append(case | speed | dict(provider=provider, metric="GB/s"))
        print(f" {provider} {speed['value']:.0f}", end="")

looks = """GB/s ceiling -- #7f7f7f, GB/s torch o- #7f7f7f,
GB/s torch.compile ^- #A56CC1, GB/s triton s- #3B82C4,
GB/s triton:block : #3B82C4, GB/s triton:online : #2A9070,
n_regs triton:block s- #3B82C4, n_spills triton:block x- #D1495B""".split(",")
if free:
    share = dict(sharex=True, sharey="row", layout="constrained")
    _, axes = plt.subplots(2, 2, figsize=(7, 5), **share)
for i, ax in enumerate(axes.flat if free else ()):
    dtype = ["float32", "bfloat16"][i % 2]
    for look in looks[:6] if i < 2 else looks[6:]:
        metric, provider, style, color = look.split()
        wanted = dict(metric=metric, provider=provider, dtype=dtype)
        points = [(r["N"], r["value"]) for r in results if r == r | wanted]
        label = provider if i < 2 else metric
        ax.semilogx(*zip(*points), style, base=2, color=color, label=label)
    ax.set(title=dtype, ylim=0, xlabel="N")
    ax.legend(fontsize=7)
    ax.label_outer()
plt.show()

# %%
# Figure. Above, GB/s: two passes over the time. Dotted: each kernel alone, on
# both sides of the switch. Below, registers of a thread in the block kernel,
# and instructions that spill them.
#
# Up to 32,768 columns float32 reaches at least
# :measured:`softmax min(triton/ceiling) metric=GB/s dtype=float32 N<=32768` of
# the copy rate. Taken together, all cases are
# :measured:`softmax geomean(triton/torch) metric=GB/s N>=128` as fast as
# ``torch``. Where ``torch.compile`` reaches the copy rate too, it is a tie.
# Most rows of 781 start off the 16-byte grid. A warp's 32 loads of one element
# still fill 128 bytes in float32, but only 64 in bfloat16:
# :measured:`softmax triton/ceiling metric=GB/s N=781 dtype=bfloat16`.
#
# The registers of an SM hold 256 KiB. A float32 row of 32,768 is half of that:
# :measured:`softmax triton:block metric=GB/s N=32768 dtype=float32`, online
# :measured:`softmax triton:online metric=GB/s N=32768 dtype=float32`. A row of
# 65,536 is all of it, and values *spill* to memory:
# :measured:`softmax triton:block metric=GB/s N=65536 dtype=float32`, online
# :measured:`softmax triton:online metric=GB/s N=65536 dtype=float32`. Between
# them, at 49,152, the block leads a little. The switch is at 128 KiB, in every
# dtype: on the safe side of the spills.
#
# One pass or two?
# ----------------
#
# The online kernel moves three passes where two count, so it should reach 0.67
# of the copy rate. In float32 it has :measured:`softmax triton/ceiling
# metric=GB/s N=2**20 dtype=float32` at ``2**20``, but :measured:`softmax
# triton/ceiling metric=GB/s N=65536 dtype=float32` at 65,536. Why? Nsight
# Compute counts in a child what memory moved.

HEAD = """import torch, triton, triton.language as tl
INTERPRET, LOWEST = False, tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)"""
TAIL = """    x, out = torch.randn(2, 2**28 // N, N, device="cuda")
    with torch.cuda.profiler.profile():
        launch(x, out, 4 * N > 131_072)"""
counted = [2**10, 2**15, 2**16, 2**17, 2**18, 2**20]
parts = shifted_exp.fn, softmax_kernel.fn, online_kernel.fn, plan, launch
code = [HEAD, *map(inspect.getsource, parts), f"for N in {counted}:", TAIL]
command = "ncu --profile-from-start off --clock-control none --print-units base"
command += " --csv --metrics dram__bytes_read.sum,dram__bytes_write.sum "
said = "it takes a GPU with 7 GB free"
if free > 7e9:
    del src, dst, x, out
    torch.cuda.empty_cache()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        print(*code, sep="\n", file=file, flush=True)
        said = subprocess.getoutput(f"{command} '{sys.executable}' {file.name}")
lines = [s for s in said.splitlines() if '"dram__' in s and "n/a" not in s]
for line in lines:
    number, *_, metric, _, value = line.strip('"').split('","')
    n = round(int(value.replace(",", "")) / 2**30, 2)
    case = dict(provider="triton", N=counted[int(number)], dtype="float32")
    case |= dict(metric="passes_" + metric[12:-4], value=n, low=n, high=n)
    results.append(case)
    print(f"{case['N']:9,} {case['metric']:12} {n:.2f}")
print("" if lines else f"Left out: Nsight Compute: {said[-200:]}")

# %%
# A row in registers is read
# :measured:`softmax triton metric=passes_read N=32768 dtype=float32` times, and
# at 65,536 the online kernel reads no more than
# :measured:`softmax triton metric=passes_read N=65536 dtype=float32`. An H200
# has one program on each of 132 SMs: together 33 MiB of rows, and L2 holds them
# until the second pass. At ``2**20`` they are 528 MiB, and it reads
# :measured:`softmax triton metric=passes_read N=2**20 dtype=float32`.
#
# .. admonition:: Takeaway
#
#    Map, load with the neutral element, reduce, reduce, write. Read a row once
#    while registers hold it; after that, twice while the cache holds it.
#
# Exercises
# ---------
#
# - Write ``log_softmax``. Why not as the logarithm of the result?
# - Share a row of ``2**20``: one kernel finds maximum and sum of each part, one
#   writes. How many rows at a time still lie in L2?
#
# Reading
# -------
#
# - Online softmax, the paper (2018): https://arxiv.org/abs/1805.02867
