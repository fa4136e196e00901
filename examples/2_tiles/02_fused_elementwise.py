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
import re
import timeit
from functools import partial
from statistics import quantiles

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = DEVICE == "cuda"
results, excerpts = [], {}
print("" if gpu else "Left out, no GPU: launches, speed, PTX, bfloat16")

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
for op, (kernels, moved, least) in COUNTS.items():
    text = f"{kernels} -> 1 kernels, {moved} -> {least} tensors move"
    print(f"{op:10} {text}: at most {moved / least:.2f} times as fast")

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
# Figure. Four numbers on their way through ``x * 2 + 1``. On the left two
# kernels: the product goes to memory and comes back. On the right one kernel:
# it stays in registers.
#
# The kernels
# -----------
#
# What is fusing? Writing more between the load and the store. Registers have
# room for digits, too: 16-bit inputs are calculated in FP32 (``WIDE``) and only
# the result is rounded. A float64 tensor keeps FP64, and so does a number, as
# its type is declared; otherwise it would arrive in FP32.


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


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    WIDE = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(WIDE)
    if TANH:  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 * u))
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1 + tl.exp(-2 * u))
    else:
        y = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    tl.store(out_ptr + offs, y, mask=offs < n)


@triton.jit
def chain_kernel(x_ptr, out_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    for _ in tl.static_range(K):  # K operators
        x = x * 0.75
    tl.store(out_ptr + offs, x, mask=offs < n)


# %%
# The wrapper
# -----------
#
# All share the code around a launch. May ``out`` be ``x`` itself? Yes: whoever
# writes an element has read it. A partial overlap is refused.

BLOCK_BYTES, NUM_WARPS = 2048, 4  # 16 bytes of each tensor for a thread
DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # not right in the interpreter


def fused(kernel, out, *numbers, **inputs):
    """Check the tensors, then launch the kernel, one block to a program."""
    x, *_ = inputs.values()
    for name, t in (inputs | dict(out=x if out is None else out)).items():
        if not isinstance(t, torch.Tensor) or t.dtype not in DTYPES:
            kind = getattr(t, "dtype", type(t).__name__)
            raise TypeError(f"{name} is {kind}, not a tensor of {DTYPES}")
        if (t.dtype, t.shape, t.device) != (x.dtype, x.shape, x.device):
            what = f"{t.dtype}, {t.shape}, on {t.device}"
            raise ValueError(f"{name} is {what}: not like the first tensor")
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
        block = BLOCK_BYTES // x.itemsize
        launch = kernel[(triton.cdiv(n, block),)]
        with torch.cuda.device_of(x):  # launch where the data is
            tensors = *inputs.values(), out
            launch(*tensors, n, *numbers, block, num_warps=NUM_WARPS)
        torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


def scale_bias(x, scale, bias, out=None):
    """Return ``x * scale + bias`` for two numbers.

    x: any shape, contiguous, on CUDA; float32, float16, bfloat16 (calculated in
        FP32), or float64. Interpreted: on the CPU too, without bfloat16.
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

numbers, tanh = dict(scale=1.375, bias=-0.625), dict(approximate="tanh")
pairs = {"swiglu": (swiglu_ref, swiglu), "gelu": (gelu_ref, gelu)}
pairs["gelu_tanh"] = [partial(f, **tanh) for f in (gelu_ref, gelu)]
both = scale_bias_ref, scale_bias
pairs["scale_bias"] = [partial(f, **numbers) for f in both]


def draw(op, n, dtype, start=16):
    """Random arguments, each a window in a buffer of NaN."""
    for _ in range(1 + (op == "swiglu")):
        room = torch.full((n + 32,), torch.nan, dtype=dtype, device=DEVICE)
        yield room[start : start + n].normal_()


def exact(got, ref, args):
    """How many of 1000 are exact, rounded once; RuntimeError if one is wrong."""
    best, eps = ref(*(t.double() for t in args)), torch.finfo(got.dtype).eps
    more = 8 * min(eps, 2**-23)  # roundings of the arithmetic
    if not torch.allclose(got.double(), best, rtol=eps / 2 + more, atol=more):
        raise RuntimeError(f"wrong: {got} instead of {best}")
    return round(1000 * (got == best.to(got.dtype)).double().mean().item())


sizes = [1, 17, 1003, 1008, 1023, 1024, 1025, 4099]
cases = [(op, n, start) for op in pairs for n in sizes for start in (16, 1)]
for (op, n, start), dtype in [(c, d) for c in cases for d in DTYPES]:
    args, out = [*draw(op, n, dtype, start)], next(draw("", n, dtype, start))
    exact(pairs[op][1](*args, out=out.fill_(torch.nan)), pairs[op][0], args)
    if out._base.isnan().sum() != 32:
        raise RuntimeError(f"{op} wrote around its output")
print(f"{[*pairs]}: right for {sizes}\nof {DTYPES}, aligned and not")

# %%
# Why is the last bit another than PyTorch's? That rounds the product, then the
# sum. In one kernel the compiler contracts both to a *fused multiply-add* (FMA),
# which rounds once. Here exactly ``2**-24`` should remain:

x = torch.full((1,), 1 + 2**-12, device=DEVICE)
for call in both:
    y = call(x, 1 + 2**-12, -1 - 2**-11)
    print(f"{call.__name__:14} {y.item():.3e}")

# %%
# How fast is it?
# ---------------
#
# Speed is *effective bandwidth*: the bytes that must move over the time. Who
# moves twice as much reaches half. A CUDA graph replays each call without the
# CPU, in turns with the ceiling, a large copy. The profiler counts kernels.


def race(op, n, dtype, pair, **case):
    """Check PyTorch, its compiler and Triton on n elements, and time them."""
    (ref, call), args = pair, [*draw(op, n, dtype)]
    torch.compiler.reset()  # compile for this size alone
    calls = {"torch": ref, "torch.compile": torch.compile(ref, dynamic=False)}
    calls["triton"] = partial(call, out=torch.full_like(args[0], torch.nan))
    moved = (len(args) + 1) * args[0].nbytes
    case |= dict(op=op, N=n, dtype=str(dtype)[6:], bytes=moved)
    runs, times = {"ceiling": lambda: dst.copy_(src)}, {}
    for provider, call in calls.items():
        call, graph = partial(call, *args), torch.cuda.CUDAGraph()
        counts = dict(exact=exact(call(), ref, args))
        with torch.profiler.profile(activities=CUDA, acc_events=True) as seen:
            call(), torch.cuda.synchronize()
        devices = [str(event.device_type) for event in seen.events()]
        counts["kernels"] = devices.count("DeviceType.CUDA")
        if n <= 2**20:  # a clock on the wall, while the CPU queues calls
            counts["us"] = 1e3 * timeit.timeit(call, number=1000)
        row = case | dict(provider=provider)
        results.extend(row | dict(metric=k, value=v) for k, v in counts.items())
        with torch.cuda.graph(graph):
            call()
        runs[provider] = graph.replay
    for provider, run in [*runs.items()] * 3:
        bench = partial(triton.testing.do_bench, warmup=10, rep=25)
        times.setdefault(provider, []).extend(bench(run, return_mode="all"))
    print(f"\n{op:10} {n:11,} {case['dtype']:8}", end="")
    for provider, ms in times.items():
        size = 8 * len(src) if provider == "ceiling" else moved
        speed = [size / t / 1e6 for t in quantiles(ms, n=10)[7::-3]]
        row = case | dict(zip(("low", "value", "high"), speed))
        results.append(row | dict(provider=provider, metric="GB/s"))
        print(f" {provider} {speed[1]:5.0f}", end="")


def lines(op, key, height):
    """Draw what was measured in float32 against a key of its cases."""
    looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
    looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
    for provider, (style, color) in looks.items():
        wanted = dict(provider=provider, metric="GB/s", op=op, dtype="float32")
        rows = [r for r in results if r == r | wanted]
        line = [r[key] for r in rows], [height(r) for r in rows]
        plt.plot(*line, style, color=color, label=provider)
    plt.legend()


if gpu:
    CUDA = [torch.profiler.ProfilerActivity.CUDA]
    big = 2**28 if torch.cuda.mem_get_info()[0] > 4e10 else 2**26
    src, dst = torch.ones(2, big, device=DEVICE)
    excerpts["python"] = "".join(scale_bias_kernel.raw_src)
for e in (12, 14, 16, 18, 20, 22, 24, 26, 27, 28) if gpu else ():
    if 2**e <= big:
        race("scale_bias", 2**e, torch.float32, pairs["scale_bias"])
lines("scale_bias", "N", lambda row: row["value"])
plt.gca().set(xlabel="N", ylabel="GB/s", xscale="log")
plt.show()

# %%
# Figure. Effective bandwidth of ``x * scale + bias`` in float32 against the
# number of elements: PyTorch, ``torch.compile``, Triton and a copy (dashed). One
# fused kernel comes close to the copy, PyTorch's two kernels to half of it.
#
# At ``2**28`` elements Triton has :measured:`fused_elementwise triton/ceiling
# metric=GB/s op=scale_bias N=2**28 dtype=float32` of the ceiling, PyTorch
# :measured:`fused_elementwise torch/ceiling metric=GB/s op=scale_bias N=2**28
# dtype=float32`, as counted. And ``torch.compile``? It sees the whole expression
# and writes one kernel, in Triton. From ``2**20`` up, the worst ratio of ours to
# it is :measured:`fused_elementwise min(triton/torch.compile) metric=GB/s
# op=scale_bias N>=2**20 dtype=float32`. That is a tie: write the one line.
#
# For ``2**12`` elements only launches count. By the clock on the wall a call
# costs PyTorch :measured:`fused_elementwise torch metric=us N=2**12`, the
# compiled function :measured:`fused_elementwise torch.compile metric=us N=2**12`
# and ours, with its checks, :measured:`fused_elementwise triton metric=us
# N=2**12`: fewer kernels, but more Python. A graph leaves only the kernels: there
# ours is :measured:`fused_elementwise triton/torch metric=GB/s N=2**12` as fast.

for op, dtype in [(op, d) for op in pairs for d in DTYPES if gpu]:
    if (op, dtype) != ("scale_bias", torch.float32) and dtype.itemsize < 8:
        race(op, big, dtype, pairs[op])

# %%
# SwiGLU in bfloat16 is :measured:`fused_elementwise triton/torch metric=GB/s
# op=swiglu dtype=bfloat16` as fast as PyTorch's; counted was 5 / 3. It can pass
# the copy, as it reads more than it writes. Why is exact GELU in bfloat16 at
# :measured:`fused_elementwise triton/ceiling metric=GB/s op=gelu
# dtype=bfloat16` of the ceiling, PyTorch's at :measured:`fused_elementwise
# torch/ceiling metric=GB/s op=gelu dtype=bfloat16`? ``erf`` takes more
# instructions than the GPU issues while 4 bytes move: arithmetic is the limit.
#
# How many of 1000 bfloat16 results of ``x * scale + bias`` are the exact ones,
# rounded once? :measured:`fused_elementwise torch metric=exact op=scale_bias
# dtype=bfloat16` of PyTorch's, :measured:`fused_elementwise triton metric=exact
# op=scale_bias dtype=bfloat16` of ours.
#
# A chain
# -------
#
# PyTorch's time should grow with every operator. Does the fused time?

for k in range(1, 9):
    times = eval("lambda x: x" + " * 0.75" * k)
    pair = times, lambda x, out: fused(chain_kernel, out, k, x=x)
    exact(pair[1](x, None), times, [x])
    if gpu:
        race("chain", 2**26, torch.float32, pair, K=k)
lines("chain", "K", lambda row: row["bytes"] / row["value"] / 1e3)
plt.gca().set(xlabel="K", ylabel="us")
plt.show()

# %%
# Figure. Time of a chain of ``K`` multiplications of ``2**26`` float32 numbers:
# PyTorch, ``torch.compile``, Triton, and a copy of as many bytes (dashed).
#
# With eight operators, fusing is worth :measured:`fused_elementwise triton/torch
# metric=GB/s op=chain K=8`. The arithmetic hides behind the bytes.
#
# .. admonition:: Takeaway
#
#    Count kernels and tensors first: they say what fusing is worth. Then ask
#    ``torch.compile`` to do it. Narrow inputs gain digits as well.
#
# Exercises
# ---------
#
# - Give each column its own ``scale`` and ``bias``: load at ``offs % N``.
#   PyTorch then takes longer than counted. Does it move more bytes?
# - Pass ``enable_fp_fusion=False``. Do all bits equal PyTorch's?
#
# Reading
# -------
#
# - SwiGLU: https://arxiv.org/abs/2002.05202
