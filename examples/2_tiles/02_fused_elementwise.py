r"""
Fused element-wise operators: one trip through memory
=====================================================

PyTorch runs one operator after the other. Each one reads its input from memory
and writes its result back. Here you put several into one kernel. You count what
that saves before you measure it, and see when it was saved for you already.

- Which data does one program own? One block of neighbouring elements.
- How does it move? Into registers, through all the arithmetic, and back once.
- What limits the speed? The bytes, and for small tensors the launches.
"""

import os
import timeit
from functools import partial
from itertools import product
from statistics import quantiles

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu, results, excerpts = DEVICE == "cuda", [], {}
print("" if gpu else "Left out, no GPU: launches, speed, FMA, bfloat16")

# %%
# Count first
# -----------
#
# Here are the operators in PyTorch. Count the kernels that each one launches,
# and the tensors that these read and write.


def scale_bias_ref(x, scale, bias):
    return x * scale + bias


def swiglu_ref(gate, up):
    return torch.nn.functional.silu(gate) * up  # silu(g) = g / (1 + exp(-g))


gelu_ref = torch.nn.functional.gelu
COUNTS = {"scale_bias": (2, 4, 2), "swiglu": (2, 5, 3), "gelu": (1, 2, 2)}
for op, (k, old, new) in COUNTS.items():
    print(f"{op:10} kernels {k} -> 1, tensors {old} -> {new}: {old / new:.2f}x")

# %%
# ``x * scale`` reads a tensor and writes one, and so does ``+ bias``: 4. Fused
# it is one read and one write, so at equal bandwidth fusing is worth 4 / 2, and
# for SwiGLU 5 / 3. GELU gains nothing: somebody has fused it.

x = torch.tensor([3, -1, 0.5, 2])
rows = {"x": x, "x * 2": x * 2, "x * 2 + 1": x * 2 + 1}
_, axes = plt.subplots(figsize=(7, 2), layout="constrained")
for left, color in (0, "#7f7f7f"), (6, "#3B82C4"):
    for row, (name, values) in enumerate(rows.items()):
        where = "registers" if left and row == 1 else "memory"
        look = dict(color=color, alpha=0.4 * (where == "memory"), width=0.9)
        axes.bar(range(left, left + 4), 0.7, bottom=row - 0.35, **look)
        for i, value in enumerate(values.tolist()):
            axes.text(left + i, row, f"{value:g}", ha="center", va="center")
        axes.text(left + 3.6, row, f"{name}\n{where}", va="center")
axes.set(xlim=(-0.6, 11.5), ylim=(2.5, -0.5))
axes.axis("off")
plt.show()

# %%
# Figure. Four numbers on their way through ``x * 2 + 1``. Left: two kernels,
# the product visits memory. Right: one kernel, it stays in registers.
#
# The kernels
# -----------
#
# To fuse is to write more between the load and the store. 16-bit inputs are
# calculated in FP32 (``WIDE``), and only the result is rounded. float64 keeps
# FP64. A number would arrive in FP32, were its type not declared.


@triton.jit
def scale_bias_kernel(
    x_ptr, out_ptr, n, scale: tl.float64, bias: tl.float64, BLOCK: tl.constexpr
):
    WIDE = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(WIDE)
    y = x * tl.full([], scale, WIDE) + tl.full([], bias, WIDE)
    tl.store(out_ptr + offs, y, mask=offs < n)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    WIDE = tl.float64 if up_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + offs, mask=offs < n).to(WIDE)
    up = tl.load(up_ptr + offs, mask=offs < n).to(WIDE)
    tl.store(out_ptr + offs, gate / (1 + tl.exp(-gate)) * up, mask=offs < n)


LOG2_PHI = tl.constexpr(
    (-1.227532e-09, 1.100808e-07, -4.014389e-06, 8.074627e-05, -0.00101904)
    + (0.008733228, -0.0542681, -0.4582606, -1.151301, -0.9999933)
)  # fitted: log2 of the normal distribution at -a, by powers of a


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    WIDE = tl.float64 if BITS == 64 else tl.float32
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(WIDE)
    if TANH:  # (1 + tanh(v)) / 2 is 1 / (1 + exp2(-u)), u = 2 * log2(e) * v
        u = x * (2.302208198144325 + 0.1029432395800235 * x * x)
        y = x / (1 + tl.exp2(-u))
    elif BITS > 16:
        y = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    else:
        p = LOG2_PHI[0]
        for i in tl.static_range(1, 10):
            p = p * tl.abs(x) + LOG2_PHI[i]
        y = x * tl.where(x < 0, tl.exp2(p), 1 - tl.exp2(p))
    tl.store(out_ptr + offs, y, mask=offs < n)


@triton.jit
def chain_kernel(x_ptr, out_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    for _ in tl.static_range(K):  # K operators
        x = x * 0.75
    tl.store(out_ptr + offs, x, mask=offs < n)


# %%
# One wrapper serves all. May ``out`` be ``x`` itself? Yes: the thread that
# writes an element has read it, and no other one does. A partial overlap is
# refused.

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [d for d in DTYPES if d != torch.bfloat16 or not INTERPRET]  # is wrong


def tile(kernel, size, n):
    """Elements and warps of a program, for n elements of so many bytes."""
    if kernel is gelu_kernel:  # more arithmetic: 8 elements for each thread
        return 2048 // size, 8 // size
    warps = 8 if n * size >= 2**25 else 4  # 16 bytes for each thread
    return warps * 512 // size, warps


def fused(kernel, out, *numbers, **inputs):
    """Check the tensors, then launch the kernel, one block to a program."""
    x, *_ = inputs.values()
    for name, t in (inputs | dict(out=x if out is None else out)).items():
        if not isinstance(t, torch.Tensor) or t.dtype not in DTYPES:
            kind = getattr(t, "dtype", type(t).__name__)
            raise TypeError(f"{name} is {kind}, not a tensor of {DTYPES}")
        if (t.dtype, t.shape, t.device) != (x.dtype, x.shape, x.device):
            raise ValueError(f"{name} is {t.dtype} {t.shape} {t.device}: mixed")
        if t.device.type not in ["cuda", "cpu"][: 1 + INTERPRET]:
            raise ValueError(f"{name} is on {t.device}; kernels run on cuda")
        if t.layout != torch.strided or t.is_neg() or not t.is_contiguous():
            raise ValueError(f"{name} is sparse, negated or not contiguous")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient: {name}.detach()")
    out = torch.empty_like(x) if out is None else out
    for name, t in inputs.items():
        if 0 < abs(out.data_ptr() - t.data_ptr()) < x.nbytes:
            raise ValueError(f"out overlaps {name} in part; pass a new out")
    if n := x.numel():
        block, warps = tile(kernel, x.itemsize, n)
        launch = kernel[(triton.cdiv(n, block),)]
        with torch.cuda.device_of(x):  # launch where the data is
            launch(*inputs.values(), out, n, *numbers, block, num_warps=warps)
        torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


def scale_bias(x, scale, bias, out=None):
    """Return ``x * scale + bias`` for two numbers.

    x: contiguous, any shape, on CUDA; float32, float16, bfloat16, calculated in
        FP32, or float64. Interpreted: on the CPU too, without bfloat16.
    out: where to write, like x; may be x, not overlap it in part.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    return fused(scale_bias_kernel, out, float(scale), float(bias), x=x)


def swiglu(gate, up, out=None):
    """Return ``silu(gate) * up``. Rules and errors as for ``scale_bias``."""
    return fused(swiglu_kernel, out, gate=gate, up=up)


def gelu(x, approximate="none", out=None):
    """Return GELU, exact ("none") or by "tanh". Rules as for ``scale_bias``."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r}: not 'none' or 'tanh'")
    return fused(gelu_kernel, out, approximate == "tanh", x=x)


# %%
# Is it right?
# ------------
#
# PyTorch's functions calculate the reference in float64. One rounding to the
# dtype is allowed, and a few before it. Inputs and outputs lie amid NaN.

both = scale_bias_ref, scale_bias
pairs = {"swiglu": (swiglu_ref, swiglu), "gelu": (gelu_ref, gelu)}
pairs["gelu_tanh"] = [partial(f, approximate="tanh") for f in pairs["gelu"]]
pairs["scale_bias"] = [partial(f, scale=1.375, bias=-0.625) for f in both]


def draw(op, n, dtype, start=64):
    """Random arguments, each a window in a buffer of NaN."""
    for _ in range(1 + (op == "swiglu")):
        room = torch.full((n + 128,), torch.nan, dtype=dtype, device=DEVICE)
        yield room[start : start + n].normal_()


def exact(got, ref, args, slack=1 / 32):
    """How many of 1000 are exact, rounded once; an error where one is wrong."""
    best, eps = ref(*(t.double() for t in args)), torch.finfo(got.dtype).eps
    more = 8 * min(eps, 2**-23) + slack * eps  # beyond one rounding
    if not torch.allclose(got.double(), best, rtol=eps / 2 + more, atol=more):
        raise RuntimeError(f"wrong: {got} instead of {best}")
    return round(1000 * (got == best.to(got.dtype)).double().mean().item())


sizes = [1, 17, 1003, 1008, 1023, 1024, 1025, 4099]
for op, n, dtype in product(pairs, sizes, DTYPES):
    start = 1 if n % 16 else 64  # odd lengths are not aligned to 16 bytes
    args, out = [*draw(op, n, dtype, start)], next(draw("", n, dtype, start))
    exact(pairs[op][1](*args, out=out.fill_(torch.nan)), pairs[op][0], args)
    if out._base.isnan().sum() != 128:
        raise RuntimeError(f"{op} wrote around its output")
print(f"{[*pairs]}: right for {sizes}\nof {DTYPES}")

# %%
# Why is the last bit another than PyTorch's? That rounds the product, then the
# sum. In one kernel the compiler contracts both to a *fused multiply-add* (FMA)
# that rounds once. Here exactly ``2**-24`` should remain:

x, numbers = torch.full((1,), 1 + 2**-12), (1 + 2**-12, -1 - 2**-11)
for call in both:
    print(f"{call.__name__:14} {call(x.to(DEVICE), *numbers).item():.3e}")

# %%
# How fast is it?
# ---------------
#
# Speed is *effective bandwidth*: the bytes that must move over the time. Who
# moves twice as much reaches half. A CUDA graph replays each call without the
# CPU, in turns with the ceiling, a copy. PyTorch's profiler counts kernels, and
# ``exact`` is how many of 1000 results are the best ones of the dtype.


def race(op, n, dtype, pair, **case):
    """Check PyTorch, its compiler and Triton on n elements, and time them."""
    (ref, call), args = pair, [*draw(op, n, dtype)]
    torch.compiler.reset()  # compile for this size alone
    calls = {"torch": ref, "torch.compile": torch.compile(ref, dynamic=False)}
    calls["triton"] = partial(call, out=torch.full_like(args[0], torch.nan))
    moved = (len(args) + 1) * args[0].nbytes
    case |= dict(op=op, N=n, dtype=str(dtype)[6:], bytes=moved)
    runs, times, seen = {"ceiling": lambda: dst.copy_(src)}, {}, []
    for provider, call in calls.items():
        call, graph = partial(call, *args), torch.cuda.CUDAGraph()
        share = exact(call(), ref, args, 1 / 32 if provider == "triton" else 8)
        with torch.profiler.profile(activities=CUDA, acc_events=True) as log:
            call(), torch.cuda.synchronize()
        devices = [str(event.device_type) for event in log.events()]
        found = dict(exact=share, kernels=devices.count("DeviceType.CUDA"))
        seen.append(f"{found['kernels']}/{share}")
        if n <= 2**20:  # a clock on the wall, while the CPU queues calls
            found["us"] = 1e3 * timeit.timeit(call, number=1000)
        row = case | dict(provider=provider)
        results.extend(row | dict(metric=k, value=v) for k, v in found.items())
        with torch.cuda.graph(graph):
            call()
        runs[provider] = graph.replay
    print(f"\n{op:10} {n:11,} {case['dtype']:8}", end="")
    for provider, run in [*runs.items()] * 8:
        bench = partial(triton.testing.do_bench, warmup=5, rep=12)
        times.setdefault(provider, []).extend(bench(run, return_mode="all"))
    for provider, ms in times.items():
        size = 8 * len(src) if provider == "ceiling" else moved
        speed = [size / t / 1e6 for t in quantiles(ms, n=10)[7::-3]]
        row = case | dict(zip(("low", "value", "high"), speed))
        results.append(row | dict(provider=provider, metric="GB/s"))
        print(f" {provider} {speed[1]:5.0f}", end="")
    print("  kernels/exact:", *seen, end="")


if gpu:
    CUDA = [torch.profiler.ProfilerActivity.CUDA]
    excerpts["python"] = "".join(scale_bias_kernel.raw_src)
    big = 2**28 if torch.cuda.mem_get_info()[0] > 4e10 else 2**26
    src, dst = torch.ones(2, big, device=DEVICE)
    sizes = [2**e for e in (12, 16, 20, 22, 24, 26, 27) if 2**e < big]
    cases = [*product(["scale_bias"], sizes, DTYPES[:1])]
    cases += product(pairs, [big], [torch.float32, torch.bfloat16])
    for op, n, dtype in cases:
        race(op, n, dtype, pairs[op])
for k in (1, 2, 4, 8):  # a chain of k operators
    ref = eval("lambda x: x" + " * 0.75" * k)
    call = lambda x, out: fused(chain_kernel, out, k, x=x)
    exact(call(x.to(DEVICE), None), ref, [x.to(DEVICE)])
    if gpu:
        race("chain", 2**26, torch.float32, (ref, call), K=k)
looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
_, panels = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
for provider, (style, color) in looks.items():
    for axes, op, key in zip(panels, ("scale_bias", "chain"), "NK"):
        wanted = dict(provider=provider, metric="GB/s", op=op, dtype="float32")
        rows = [r for r in results if r == r | wanted]
        speed = [r["value"] for r in rows]
        us = [r["bytes"] / r["value"] / 1e3 for r in rows]
        line = [r[key] for r in rows], speed if key == "N" else us
        axes.plot(*line, style, color=color, label=provider)
panels[0].set(xlabel="N", ylabel="GB/s", xscale="log")
panels[1].set(xlabel="K", ylabel="us")
panels[0].legend()
plt.show()

# %%
# Figure. PyTorch, ``torch.compile``, Triton and a copy (dashed) in float32.
# Left: effective bandwidth of ``x * scale + bias`` against the number of
# elements. Right: time of ``K`` multiplications of 2²⁶ elements.
#
# At ``2**28`` elements Triton has :measured:`fused_elementwise triton/ceiling
# metric=GB/s op=scale_bias N=2**28 dtype=float32` of the ceiling, PyTorch
# :measured:`fused_elementwise torch/ceiling metric=GB/s op=scale_bias N=2**28
# dtype=float32`, as counted. ``torch.compile`` makes one kernel of the line,
# too, in Triton. Over all sizes the ratio of ours to it is
# :measured:`fused_elementwise min(triton/torch.compile) metric=GB/s
# op=scale_bias dtype=float32` at worst and :measured:`fused_elementwise
# geomean(triton/torch.compile) metric=GB/s op=scale_bias dtype=float32` by
# geometric mean: a tie. A chain of eight gains
# :measured:`fused_elementwise triton/torch metric=GB/s op=chain K=8`.
#
# By the clock on the wall, ``2**12`` elements take PyTorch
# :measured:`fused_elementwise torch metric=us N=2**12`, compiled
# :measured:`fused_elementwise torch.compile metric=us N=2**12`, ours with its
# checks :measured:`fused_elementwise triton metric=us N=2**12`: the CPU
# decides. In a graph, without it, ours is :measured:`fused_elementwise
# triton/torch metric=GB/s N=2**12` as fast.
#
# Of 1000 bfloat16 results PyTorch has :measured:`fused_elementwise torch
# metric=exact op=scale_bias dtype=bfloat16` as exact as the dtype allows,
# Triton :measured:`fused_elementwise triton metric=exact op=scale_bias
# dtype=bfloat16`: it rounds once. SwiGLU in bfloat16 is
# :measured:`fused_elementwise triton/torch metric=GB/s op=swiglu
# dtype=bfloat16` as fast as PyTorch's; counted was 5 / 3.
#
# Can one beat the compiler? Exact GELU in bfloat16 moves 4 bytes for each
# ``erf``, which takes more instructions than the GPU can issue meanwhile.
# PyTorch gets to :measured:`fused_elementwise torch/ceiling metric=GB/s op=gelu
# dtype=bfloat16` of the ceiling, ``torch.compile`` to
# :measured:`fused_elementwise torch.compile/ceiling metric=GB/s op=gelu
# dtype=bfloat16`. A polynomial, as exact as 16 bits need, takes fewer:
# :measured:`fused_elementwise triton/ceiling metric=GB/s op=gelu
# dtype=bfloat16`.
#
# .. admonition:: Takeaway
#
#    Count kernels and tensors: they say what fusing is worth. Let
#    ``torch.compile`` try first. Write a kernel where you know more than it.
#
# Exercises and reading
# ---------------------
#
# - Give each column its own ``scale`` and ``bias``: load at ``offs % N``.
#   PyTorch then takes longer than counted. Does it move more bytes?
# - Pass ``enable_fp_fusion=False``. Do all bits equal PyTorch's?
# - Read where SwiGLU comes from: https://arxiv.org/abs/2002.05202
