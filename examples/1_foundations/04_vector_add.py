r"""
Vector addition: a complete operator
====================================

A kernel alone is not yet an operator. Here you build all four parts of one:
the kernel, a Python function around it that refuses bad input, a check that
can fail, and a measurement next to the speed that the memory allows.

- Which data does one program own? ``BLOCK_SIZE`` neighbouring elements of
  ``x``, ``y`` and ``out``.
- How does it move? ``x`` and ``y`` are read once from global memory into
  registers. The sum is written back once.
- What limits the speed? Memory bandwidth: three elements move for one sum.

Without a GPU, Triton's interpreter runs the kernel on the CPU. Every result
is still checked, and each measurement left out is named.
"""

import os
import timeit

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
results, excerpts = [], {}
if DEVICE == "cpu":
    print("Left out, no GPU: asynchrony, bandwidth, launch cost, PTX")

# %%
# What it must cost
# -----------------
#
# How long must ``x + y`` take? Count before you measure. With ``n`` elements
# of ``size`` bytes, two vectors are read and one is written: ``3 * n * size``
# bytes for ``n`` additions. In float32 that is one addition for 12 bytes. A
# GPU does several additions in the time of one byte, so the memory decides:
#
# .. math:: t \ge \frac{3 \cdot n \cdot \mathrm{size}}{\mathrm{bandwidth}}


def vector_add_ref(x, y):
    """``x + y`` in float64, rounded once to the dtype of ``x``."""
    return (x.double() + y.double()).to(x.dtype)


gpu = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
clock = getattr(gpu, "memory_clock_rate", 0)  # kHz, two transfers each
peak = 2 * clock * getattr(gpu, "memory_bus_width", 0) / 8e6  # GB/s
n, bandwidth = 2**26, peak or 1000
print(f"{bandwidth:,.0f} GB/s", "(nominal peak)" if peak else "(an example)")
print(f"{12 * n:,} bytes, {n:,} FLOP: t >= {12 * n / bandwidth / 1e3:.0f} us")

# %%
# Who owns what
# -------------
#
# How are 1003 elements divided when each program takes 256? 1003 / 256 rounded
# up is 4 programs. Program ``pid`` owns the offsets from ``pid * 256`` to
# ``pid * 256 + 255``. Triton fixes block shapes at compile time, so the last
# block is full too and has offsets past the end of the data. A *mask* switches
# those off.

n, block = 1003, 256
offs = torch.arange(triton.cdiv(n, block) * block).reshape(-1, block)
_, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for pid, row in enumerate(offs):
    live, start = (row < n).sum().item(), row[0].item()
    masked = block - live
    print(f"pid {pid}: from {start:3}, live {live}, masked {masked}")
    on = axes.barh(pid, live, left=start, color="#3B82C4")
    off = axes.barh(pid, masked, left=start + live, color="#D1495B", hatch="//")
axes.set(xlabel="offset", xticks=[*range(0, 1024, 256), n], xlim=(0, 1024))
axes.set(ylabel="pid", yticks=range(len(offs)), ylim=(3.6, -0.6))
axes.legend([on, off], ["live", "masked"], loc="lower left")
plt.show()

# %%
# Figure. Four programs of 256 offsets cover 1003 elements. Programs 0, 1 and
# 2 are full. Program 3 has 235 live positions, offsets 768 to 1002, and 21
# masked ones, 1003 to 1023.
#
# The kernel
# ----------
#
# Why is ``pid`` widened to 64 bits? A program id has 32. From ``2**31``
# elements on, ``pid * BLOCK_SIZE`` would wrap to a negative offset.
#
# Why is there no ``other``? A masked position of ``x`` holds no defined value,
# and neither does its sum. The mask of the store keeps it out of memory.


@triton.jit
def vector_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + y, mask=mask)


# %%
# The wrapper
# -----------
#
# What does the kernel not know? It gets three addresses and a count. It would
# read a transposed tensor in the wrong order, and a short ``y`` past its end.
# So the function around it looks first, and says what is wrong and how to
# repair it. It uses ``raise``: an ``assert`` vanishes under ``python -O``. The
# kernel has no backward pass, so inputs that need a gradient are refused too.

BLOCK_SIZE, NUM_WARPS = 1024, 4
DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly


def check(name, t, x):
    """Refuse a tensor that the kernel cannot take beside ``x``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} has {t.dtype}; supported here: {DTYPES}")
    if t.dtype != x.dtype:
        raise TypeError(f"{name} has {t.dtype}, x has {x.dtype}")
    if t.shape != x.shape:
        raise ValueError(f"{name} has {t.shape}, x has {x.shape}: not equal")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if t.device.type not in (["cuda", "cpu"] if INTERPRET else ["cuda"]):
        raise ValueError(f"{name} is on {t.device}; pass {name}.cuda()")
    if t.layout != torch.strided or not t.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def vector_add(x, y, out=None):
    """Return ``x + y``, rounded once, like ``torch.add``.

    x, y: equal shape (any, also empty), dtype and device; contiguous;
        float32, float16, float64, or bfloat16 (on a GPU).
    out: where to write, same rules; may be x or y, not overlap them in part.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("x", x, x)
    check("y", y, x)
    out = torch.empty_like(x) if out is None else out
    check("out", out, x)
    n = x.numel()
    for name, t in (("x", x), ("y", y)):
        if 0 < abs(out.data_ptr() - t.data_ptr()) < n * x.element_size():
            raise ValueError(f"out overlaps {name} in part; pass a new out")
    if n == 0:
        return out  # a grid of no programs cannot be launched
    grid = (triton.cdiv(n, BLOCK_SIZE),)
    with torch.cuda.device_of(x):  # launch where the data is
        vector_add_kernel[grid](x, y, out, n, BLOCK_SIZE, num_warps=NUM_WARPS)
    return out


# %%
# Is it right?
# ------------
#
# Which tolerance is fair? For one addition, none. The float64 sum, rounded
# once, is the best value that the dtype can hold, so every bit must agree.
#
# Each check writes into the middle of a buffer full of NaN. A position that
# the kernel forgets is still NaN; one that it must not touch has to be. Views
# that start at element 1 are not aligned to 16 bytes.

print(f"{'n':>12} {'start':>6}", *(f"{str(d)[6:]:>9}" for d in DTYPES))
sizes = [0, 1, 255, 256, 257, 1003, 98_432] + [2**26 + 3] * bool(gpu)
for n, start in [(n, start) for n in sizes for start in (0, 1)]:
    row = []
    for dtype in DTYPES:
        x, y = torch.randn(2, n + 16, dtype=dtype, device=DEVICE)
        x, y = x[start : start + n], y[start : start + n]
        room = torch.full((n + 16,), torch.nan, dtype=dtype, device=DEVICE)
        vector_add(x, y, out=room[8 : n + 8])
        around = torch.cat([room[:8], room[n + 8 :]])
        right = torch.equal(room[8 : n + 8], vector_add_ref(x, y))
        row += [right and bool(around.isnan().all())]
    print(f"{n:12,} {start:6}", *(f"{str(r):>9}" for r in row))
    if not all(row):
        raise RuntimeError("vector_add is wrong in the row above")

# %%
# Does it refuse what it promises to refuse? And would the usual checks notice
# an error? ``allclose`` broadcasts, and has one tolerance for all dtypes.
# ``assert_close`` insists on shape and dtype, and has a tolerance for each
# dtype. Neither notices a last bit. Equality with the float64 sum does.


def outcome(call):
    """What a call says: the first line of its error, or its result."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


x = torch.ones(17, 59, device=DEVICE)
far, leaf = x.to("cpu" if gpu else "meta"), x.clone().requires_grad_()
wrong = "x, [1.0]; x.int(), x.int(); x, x.double(); x, x[0]; x, far; far, far; "
wrong += "x.t(), x.t(); x, leaf; x, x, x[0]; x[1:], x[1:], x[:-1]"
for call in (f"vector_add({arguments})" for arguments in wrong.split("; ")):
    print(f"{call}\n    {outcome(lambda: eval(call))}")
bit = x.clone()
bit[7] = torch.nextafter(x[7], 2 * x[7])
print(f"\n{'':12} {'allclose':>15} {'assert_close':>15} {'equal':>15}")
for name, got, want in [
    ("last bit", bit, x),
    ("half, 0.1 %", x.half() * 1.001, x.half()),
    ("shape", x[0], x),
    ("dtype", x.double(), x),
]:
    checks = torch.allclose, torch.testing.assert_close, torch.equal
    said = [outcome(lambda: c(got, want) is not False) for c in checks]
    print(f"{name:12}", *(f"{s.split(':')[0]:>15}" for s in said))

# %%
# How fast is it?
# ---------------
#
# A launch is *asynchronous*: the call returns when the work is queued, not
# when it is done. A clock around the call times the queue, and an error shows
# up late. ``torch.cuda.synchronize()`` waits for the GPU. ``do_bench`` waits
# too, and it empties the L2 cache before each run. It hides the launch cost,
# so ``timeit`` takes that over many calls of the smallest size.
#
# Speed is stated as *effective bandwidth*: the bytes counted above over the
# measured time, ``3 * n * size / t``. Its roof is the ceiling, a plain copy.
# All contenders write into the same ``out`` and are checked first.

sizes = [2**e for e in (12, 14, 16, 18, *range(20, 27))]
sizes += [98_432_000, 98_432_003, 2**27, 2**28]
if gpu:
    src, dst = torch.ones(2, 2**28, device=DEVICE)
    add, wait = lambda: vector_add(src, src, out=dst), torch.cuda.synchronize
    us = [timeit.timeit(f, number=1) * 1e6 for f in (add, wait, add, wait)]
    print(f"call {us[2]:.0f} us, then wait {us[3]:.0f} us")
    free = torch.cuda.mem_get_info()[0]
    sizes = [n for n in sizes if 20 * n < free]
for n in sizes if gpu else []:
    x, y, out = (torch.randn(n, device=DEVICE) for _ in range(3))
    torch.compiler.reset()  # compile for this size alone
    compiled = torch.compile(torch.add, dynamic=False)
    case = dict(N=n, bytes=12 * n, dtype="float32", tail=n % 16)
    print(f"\n{n:12,}", end="")
    for provider, call, moved in [
        ("ceiling", lambda: dst.copy_(src), 2**31),
        ("torch", lambda: torch.add(x, y, out=out), 12 * n),
        ("torch.compile", lambda: compiled(x, y, out=out), 12 * n),
        ("triton", lambda: vector_add(x, y, out=out), 12 * n),
    ]:
        out.fill_(torch.nan)
        said = outcome(lambda: call() is dst or torch.equal(out, x + y))
        if said != "True":
            print(f"  Left out: {provider}: {said}")
            continue
        ms = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
        rows = {"GB/s": [moved / t / 1e6 for t in ms]}
        if n == 2**12 and provider != "ceiling":
            us = timeit.repeat(call, wait, number=200, repeat=21)
            rows["us"] = [sorted(us)[i] / 200 * 1e6 for i in (10, 4, 16)]
        for metric, (value, low, high) in rows.items():
            row = dict(value=value, low=low, high=high, metric=metric)
            results.append(case | row | dict(provider=provider))
            print(f"  {provider} {value:.4g} {metric}", end="")

looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
for provider, (style, color) in looks.items():
    rows = [r for r in results if r["provider"] == provider]
    line = [(r["bytes"], r["value"]) for r in rows if r["metric"] == "GB/s"]
    if line:
        plt.plot(*zip(*line), style, color=color, label=provider)
if results:
    plt.axhline(peak or torch.nan, color="#7f7f7f", linestyle=":")
    plt.gca().set(xscale="log", xlabel="bytes", ylabel="GB/s")
    plt.legend()
plt.show()

# %%
# Figure. Effective bandwidth against bytes moved. The lines rise while the
# fixed cost of a kernel outweighs the transfer, and flatten near the copy rate
# (dashed), below the nominal peak (dotted). ``triton`` has a notch at
# 98,432,003 elements.
#
# At ``2**28`` elements ``triton`` moves
# :measured:`vector_add triton metric=GB/s N=2**28`, against the ceiling
# :measured:`vector_add triton/ceiling metric=GB/s N=2**28`. From ``2**20`` up
# and without the notch, its worst ratio to ``torch.add`` is
# :measured:`vector_add min(triton/torch) metric=GB/s N>=2**20 tail=0`. At
# ``2**12`` the host decides, and our checks and Triton's launcher are Python:
# :measured:`vector_add triton metric=us N=2**12` a call, with ``torch.add``
# :measured:`vector_add torch metric=us N=2**12`.
#
# Three elements more
# -------------------
#
# What is the notch? 98,432,000 elements ran at
# :measured:`vector_add triton metric=GB/s N=98432000`, three more at
# :measured:`vector_add triton metric=GB/s N=98432003`. Look at the loads.

for n in [1008, 1003] if gpu else []:
    grid, shape = (1,), (n, BLOCK_SIZE)
    kernel = vector_add_kernel[grid](src, src, dst, *shape, num_warps=NUM_WARPS)
    ptx = kernel.asm["ptx"].splitlines()
    loads = [line.strip() for line in ptx if "ld.global" in line]
    excerpts[f"ptx_{n}"] = "\n".join(loads)
    print(f"\nn = {n}: {len(loads)} loads in a thread, {loads[0]}")

# %%
# Triton compiles one variant of the kernel for lengths that are a multiple of
# 16, and one for all others. In the first, four neighbours are all live or all
# masked, so one ``v4`` load of 128 bits fetches them. In the second the end
# may cut a group in two. For 1003 it does: 1000, 1001 and 1002 are live, 1003
# is not. So every element gets a load of its own.
#
# .. admonition:: Takeaway
#
#    An operator is a kernel plus what it refuses, what proves it, and how far
#    it is from its bound. Count bytes first, then measure.
#
# Exercises
# ---------
#
# - Repair the notch: a full program needs no mask, so branch on
#   ``(pid + 1) * BLOCK_SIZE <= n``. Is ``v4`` back? Is every bit right?
# - Change ``offs < n`` to ``offs <= n``. Which check notices, and why?
# - Write ``a * x + y`` and predict its time. Is a tolerance of zero still
#   fair? Hint: a fused multiply-add rounds once.
#
# Reading
# -------
#
# - Triton tutorial:
#   https://triton-lang.org/main/getting-started/tutorials/01-vector-add.html
# - Triton, the paper (2019): https://doi.org/10.1145/3315508.3329973
# - ``assert_close``: https://docs.pytorch.org/docs/stable/testing.html
