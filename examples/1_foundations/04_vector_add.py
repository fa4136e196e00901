r"""
Vector addition: a complete operator
====================================

A kernel alone is not yet an operator. Here you build all four parts of one:
the kernel, a Python function around it that refuses bad input, a check that
can fail, and a measurement next to the speed that the memory allows.

- Which data does one program own? One block of ``x``, ``y`` and ``out``.
- How does it move? From global memory into registers once, and back once.
- What limits the speed? Memory bandwidth: three elements move for one sum.
"""

import os
import timeit

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
results, excerpts = [], {}
if DEVICE == "cpu":
    print("Left out, no GPU: asynchrony, speed, PTX, bfloat16, long vectors")

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
free = torch.cuda.mem_get_info()[0] if gpu else 0
clock = getattr(gpu, "memory_clock_rate", 0)  # kHz, two transfers each
peak = 2 * clock * getattr(gpu, "memory_bus_width", 0) / 8e6  # GB/s
n, bandwidth = 2**26, peak or 1000
print(f"{bandwidth:,.0f} GB/s", "(nominal peak)" if peak else "(an example)")
print(f"{12 * n:,} bytes, {n:,} FLOP: t >= {12 * n / bandwidth / 1e3:.0f} us")

# %%
# Who owns what
# -------------
#
# How are 1003 elements divided when each program takes 256? It takes 4
# programs. Program ``pid`` owns the offsets from ``pid * 256`` to
# ``pid * 256 + 255``. Block shapes are fixed at compile time, so the last
# block has offsets past the end of the data. A *mask* switches those off.

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
# Figure. Four programs of 256 offsets cover 1003 elements. Program 3 has 235
# live positions, 768 to 1002, and 21 masked ones, 1003 to 1023.
#
# The kernel
# ----------
#
# Why is ``pid`` widened to 64 bits? Beyond ``2**31`` elements an offset would
# wrap in 32. Why is there no ``other``? A masked position holds no defined
# value, but the mask of the store keeps its sum out of memory.


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
# So a function looks first, and raises: an ``assert`` vanishes under ``-O``.
#
# How large is a block? Two warps are 64 threads, and a thread loads up to 16
# bytes at once. Two such loads in flight make 2048 bytes, 512 float32 elements.

BLOCK_BYTES, NUM_WARPS = 2048, 2
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
        raise ValueError(f"{name} is on {t.device}; the kernel runs on cuda")
    if t.layout != torch.strided or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if not t.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def vector_add(x, y, out=None):
    """Return ``x + y``, rounded once, like ``torch.add``.

    x, y: equal shape (any, also empty), dtype and CUDA device; contiguous;
        float32, float16, float64 or bfloat16. Interpreted: CPU, no bfloat16.
    out: where to write, same rules; may be x or y, not overlap them in part.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("x", x, x)
    check("y", y, x)
    out = torch.empty_like(x) if out is None else out
    check("out", out, x)
    n = x.numel()
    for name, t in (("x", x), ("y", y)):
        if 0 < abs(out.data_ptr() - t.data_ptr()) < n * x.itemsize:
            raise ValueError(f"out overlaps {name} in part; pass a new out")
    if n == 0:
        return out  # nothing to launch
    block = BLOCK_BYTES // x.itemsize
    grid = (triton.cdiv(n, block),)
    with torch.cuda.device_of(x):  # launch where the data is
        vector_add_kernel[grid](x, y, out, n, block, num_warps=NUM_WARPS)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# Which tolerance is fair? For one addition, none. The float64 sum, rounded
# once, is the best value that the dtype can hold, so it must be equal.
#
# Each check writes into the middle of a buffer full of NaN: a forgotten
# position is still NaN, and what lies around has to be. Views that start at
# element 1 are not aligned to 16 bytes.

print(f"{'n':>12} {'start':>6}", *(f"{str(d)[6:]:>9}" for d in DTYPES))
sizes = [0, 1, 255, 256, 257, 1003, 98_432] + [2**26 + 3] * (free > 4e9)
for n, start in [(n, start) for n in sizes for start in (0, 1)]:
    row = []
    for dtype in DTYPES:
        both = torch.randn(2, n // 16 * 16 + 32, dtype=dtype, device=DEVICE)
        x, y = both[:, start : start + n]
        room = torch.full((n + 16,), torch.nan, dtype=dtype, device=DEVICE)
        vector_add(x, y, out=room[8 : n + 8])
        around = torch.cat([room[:8], room[n + 8 :]])
        right = torch.equal(room[8 : n + 8], vector_add_ref(x, y))
        row += [right and bool(around.isnan().all())]
    print(f"{n:12,} {start:6}", *(f"{str(r):>9}" for r in row))
    if not all(row):
        raise RuntimeError("vector_add is wrong in the row above")

# %%
# Does it refuse what it promises to? Would the usual checks notice an error?
# ``allclose`` broadcasts; ``assert_close`` insists on shape and dtype. Neither
# notices the last bit of a float32. ``equal`` does, but it ignores the dtype.


def outcome(call):
    """What a call says: the first line of its error, or its result."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


x = torch.full((17, 59), 100.0, device=DEVICE)
far, leaf = x.to("cpu" if gpu else "meta"), x.clone().requires_grad_()
wrong = "x, [1.0]; x.int(), x.int(); x, x.double(); x, x[0]; x, far; far, far; "
wrong += "x.t(), x.t(); x, leaf; x, x, x[0]; x[1:], x[1:], x[:-1]"
for call in (f"vector_add({arguments})" for arguments in wrong.split("; ")):
    print(f"{call}\n    {outcome(lambda: eval(call))}")
print(f"\n{'':8} {'allclose':>15} {'assert_close':>15} {'equal':>15}")
wrong = {"last bit": torch.nextafter(x, 2 * x), "5e-6": x * (1 + 5e-6)}
for name, got in (wrong | {"shape": x[0], "dtype": x.double()}).items():
    checks = torch.allclose, torch.testing.assert_close, torch.equal
    said = [outcome(lambda: c(got, x) is not False) for c in checks]
    print(f"{name:8}", *(f"{s.split(':')[0]:>15}" for s in said))

# %%
# How fast is it?
# ---------------
#
# A launch is *asynchronous*: the call returns when the work is queued, not
# when it is done. A clock around the call times the queue, and an error shows
# up late. ``torch.cuda.synchronize`` waits for the GPU.

if free > 4e9:
    src, dst = torch.ones(2, 2**28, device=DEVICE)
    calls = [lambda: vector_add(src, src, out=dst), torch.cuda.synchronize]
    us = [timeit.timeit(f, number=1) * 1e6 for f in calls * 2]
    print(f"call {us[2]:.0f} us, then wait {us[3]:.0f} us")

# %%
# Speed is stated as *effective bandwidth*: the bytes counted above over the
# measured time, ``3 * n * size / t``. Its roof is the ceiling, a plain copy.
# ``do_bench`` repeats a call, empties the L2 cache before each repetition, and
# reads the GPU's clock. A CUDA graph replays a launch without the Python before
# it. All contenders write into the same ``out`` and are checked first.


def measure(call, moved, graph=None):
    """GB/s of a call that moves so many bytes: median, 20 % and 80 %."""
    if graph:
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    ms = triton.testing.do_bench(call, quantiles=[0.8, 0.5, 0.2])
    return {k: moved / t / 1e6 for k, t in zip(("low", "value", "high"), ms)}


looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
sizes = [2**e for e in (12, 14, 16, 18, *range(20, 27))]
sizes += [98_432_000, 98_432_003, 2**27, 2**28]
cases = [(n, torch.float32) for n in sizes if 20 * n < free - 2e9]
print(*(f"Left out, no memory: {n}" for n in sizes[len(cases) :] if gpu))
cases += [(n, torch.float16) for n, _ in cases[11:]]
for n, dtype in cases:
    x, y, out = (torch.randn(n, device=DEVICE, dtype=dtype) for _ in range(3))
    torch.compiler.reset()  # compile for this size alone
    compiled = torch.compile(torch.add, dynamic=False)
    case = dict(N=n, bytes=3 * n * dtype.itemsize, dtype=str(dtype)[6:])
    speeds = {"ceiling": measure(lambda: dst.copy_(src), 2**31)}
    for provider, call in {
        "torch": lambda: torch.add(x, y, out=out),
        "torch.compile": lambda: compiled(x, y, out=out),
        "triton": lambda: vector_add(x, y, out=out),
    }.items():
        out.fill_(torch.nan)
        said = outcome(lambda: torch.equal(call(), x + y))
        if said == "True":
            graph = torch.cuda.CUDAGraph()
            speeds[provider] = measure(call, case["bytes"], graph)
        else:
            print(f"\nLeft out: {provider}: {said}", end="")
    print(f"\n{n:12,} {case['dtype']}  GB/s: ", end="")
    for provider, speed in speeds.items():
        results.append(case | speed | dict(provider=provider, metric="GB/s"))
        print(f" {provider} {speed['value']:5.0f}", end="")

for provider, (style, color) in looks.items() if results else ():
    wanted = dict(provider=provider, dtype="float32")
    rows = [r for r in results if r == r | wanted]
    line = [r["N"] for r in rows], [r["value"] for r in rows]
    plt.semilogx(*line, style, color=color, label=provider)
if results:
    plt.axhline(peak or torch.nan, color="#7f7f7f", linestyle=":")
    plt.gca().set(xlabel="N", ylabel="GB/s")
    plt.legend()
plt.show()

# %%
# Figure. Effective bandwidth in float32 against the number of elements. It
# rises while the fixed cost of a launch outweighs the transfer, and flattens
# near the copy rate (dashed), below the nominal peak (dotted).
#
# At ``2**28`` elements ``triton`` moves
# :measured:`vector_add triton metric=GB/s N=2**28 dtype=float32`, against the
# ceiling
# :measured:`vector_add triton/ceiling metric=GB/s N=2**28 dtype=float32`. A
# copy is half writes, a sum one third. From ``2**20`` to ``2**26`` the worst
# ratio to ``torch.add`` is
# :measured:`vector_add min(triton/torch) metric=GB/s N>=2**20 N<=2**26`.
#
# Three elements more
# -------------------
#
# In float16, 98,432,000 elements ran at
# :measured:`vector_add triton metric=GB/s N=98432000 dtype=float16`, three
# more at :measured:`vector_add triton metric=GB/s N=98432003 dtype=float16`.
# In float32 it was
# :measured:`vector_add triton metric=GB/s N=98432000 dtype=float32` and
# :measured:`vector_add triton metric=GB/s N=98432003 dtype=float32`. Why?

for n in (1008, 1003) if results and not torch.version.hip else ():
    for x in (src[:n], src[:n].half()):
        block = BLOCK_BYTES // x.itemsize
        kernel = vector_add_kernel[(4,)](x, x, x, n, block, num_warps=NUM_WARPS)
        lines = kernel.asm["ptx"].splitlines()
        loads = [line.strip() for line in lines if "ld.global" in line]
        excerpts[f"loads_{n}_{str(x.dtype)[6:]}"] = "\n".join(loads)
        print(f"{n} {x.dtype}: {len(loads)} loads like {loads[0]}")

# %%
# For aligned addresses Triton compiles one variant for lengths that are a
# multiple of 16, and one for others. In the first, 16 neighbours are all live
# or all masked, so one ``v4`` load fetches 16 bytes of them. In the second the
# end may cut a group in two, as 1003 does, so every element gets a load of its
# own. A thread still owns 16 neighbouring bytes: a warp visits the same 512
# bytes 4 times in float32 and 8 times in float16.
#
# .. admonition:: Takeaway
#
#    An operator is a kernel plus what it refuses, what proves it, and how far
#    it is from its bound. Count bytes first, then measure.
#
# Exercises
# ---------
#
# - Get ``v4`` back for 1003. A full program needs no mask, so branch on
#   ``(pid + 1) * BLOCK_SIZE <= n``. Is every bit right?
# - Change ``offs < n`` to ``offs <= n``. Which check notices, and why?
# - Write ``a * x + y`` and predict its time. Is zero tolerance still fair?
#
# Reading
# -------
#
# - Triton, the paper (2019): https://doi.org/10.1145/3315508.3329973
# - Tutorials: https://triton-lang.org/main/getting-started/tutorials/
