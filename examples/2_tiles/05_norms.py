r"""
Layer norm and RMS norm: statistics you can trust
=================================================

A language model normalises every token twice in each layer. Here one kernel
does both norms with a single pass over memory, and you see an innocent formula
for the variance lose every digit.

- Which data does one program own? One row, or several short ones.
- How does it move? Into registers once and back once; a very long row twice.
- What limits the speed? Memory bandwidth, if enough rows are in flight.
"""

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
results = []
torch.manual_seed(0)
print("" if gpu else "Left out, no GPU: speed, bfloat16, the longest rows")

# %%
# What it must cost
# -----------------
#
# *RMSNorm* divides a row of ``N`` values by the root of its mean square.
# *LayerNorm* subtracts the mean :math:`\mu` first, so the mean square becomes
# the variance. A weight and a bias for each column may follow:
#
# .. math:: y = \frac{x - \mu}{\sqrt{\overline{(x - \mu)^2} + \epsilon}}\, w + b
#
# The mean needs the whole row, the variance the mean, ``y`` both. Three passes
# over memory? One, if registers keep the row: ``2 * M * N * size`` bytes for
# about ``8 * M * N`` FLOP. In bfloat16 that is 2 FLOP a byte: memory decides.


def norm_ref(x, weight=None, bias=None, eps=1e-5, center=True):
    """LayerNorm, or RMSNorm without center, in float64, not rounded."""
    x = x.double()
    for _ in range(2 * center):  # as the first mean is rounded
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


clock = getattr(gpu, "memory_clock_rate", 0)  # kHz, two transfers each
peak = 2 * clock * getattr(gpu, "memory_bus_width", 0) / 8e6 or 1000  # GB/s
print(f"2**16 rows of 2**12, 2 bytes each: t >= {2**30 / peak / 1e3:.0f} us")

# %%
# What becomes of 2, 4, 4, 4, 5, 5, 7, 9, with mean 5 and variance 4?

x = torch.tensor([2.0, 4, 4, 4, 5, 5, 7, 9])
rows = x, norm_ref(x), norm_ref(x, center=False)
_, axes = plt.subplots(1, 3, figsize=(7, 2.4), layout="constrained")
for axis, name, y in zip(axes, ("x", "LayerNorm", "RMSNorm"), rows):
    print(f"{name:10}", *(f"{v:6.2f}" for v in y.tolist()))
    axis.bar(range(8), y, color="#3B82C4")
    axis.set(title=f"{name}, mean {abs(y.mean()):.2f}", xlabel="column")
plt.show()

# %%
# Figure. A row, and what two norms make of it. LayerNorm moves the mean to 0.
# RMSNorm keeps signs and ratios.
#
# The kernel
# ----------
#
# Must a row of 5120 take a block of 8192? No: it is a tuple of 5 blocks of
# 1024. ``tl.static_range`` is unrolled while compiling, so ``kept[i]`` is a
# fixed set of registers. Masked positions load 0, which adds nothing. Once the
# mean is subtracted, ``tl.where`` makes them 0 again.
#
# A mean is rounded. The loop that adds the squares of ``d = x - mean`` also
# adds ``d``. The mean of ``d`` is the ``slip``, what ``mean`` missed, and it
# corrects the variance too: ``mean(d * d) - slip * slip``, below 0 only if
# rounded. In a row longer than ``KEEP`` blocks, ``mean`` is that of the first
# blocks, and ``slip`` repairs more. The outer loops then read the row again.


@triton.jit
def norm_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, M, N,
    stride_xm, stride_xn, stride_om, stride_on,
    EPS: tl.constexpr, CENTER: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    x_ptr += rows * stride_xm
    out_ptr += rows * stride_om
    zeros = tl.zeros((ROWS, BLOCK), dtype)
    kept, total = (), zeros
    for i in tl.static_range(KEEP):
        at = i * BLOCK + cols
        mask = (rows < M) & (at < N)
        x = tl.load(x_ptr + at * stride_xn, mask=mask, other=0).to(dtype)
        kept += (x,)
        total += x
    count = tl.minimum(N, KEEP * BLOCK)
    mean = tl.sum(total, 1, keep_dims=True) / count if CENTER else 0.0
    total, square = zeros, zeros
    stop = tl.cast(N, tl.int64) if WIDE else KEEP * BLOCK
    for start in range(0, stop, KEEP * BLOCK):
        for i in tl.static_range(KEEP):
            at = start + i * BLOCK + cols
            value = kept[i]
            if WIDE:
                value = tl.load(x_ptr + at * stride_xn, mask=at < N, other=0)
            d = tl.where(at < N, value.to(dtype) - mean, 0)
            total += d
            square += d * d
    slip = tl.sum(total, 1, keep_dims=True) / N if CENTER else 0.0
    var = tl.sum(square, 1, keep_dims=True) / N - slip * slip
    scale = 1 / tl.sqrt(tl.where(var < 0, 0, var) + EPS)
    for start in range(0, stop, KEEP * BLOCK):
        for i in tl.static_range(KEEP):
            at = start + i * BLOCK + cols
            value = kept[i]
            if WIDE:
                value = tl.load(x_ptr + at * stride_xn, mask=at < N, other=0)
            y = (value.to(dtype) - mean - slip) * scale
            if w_ptr is not None:
                y *= tl.load(w_ptr + at, mask=at < N, other=0).to(dtype)
            if b_ptr is not None:
                y += tl.load(b_ptr + at, mask=at < N, other=0).to(dtype)
            mask = (rows < M) & (at < N)
            tl.store(out_ptr + at * stride_on, y, mask=mask)


# %%
# The wrapper
# -----------
#
# How much can one program keep? The fewer registers it takes, the more rows an
# SM has in flight. Loading the weight early, or keeping it for many rows, cost
# registers and speed. ``maxnreg`` makes room for one more program on an SM
# where the compiler would take more registers than it needs. Rows up to 1024
# take one warp and no barrier.
#
# A weight may be float32 beside bfloat16 rows, as models often have it. ``eps``
# is a constant: as an argument it would become a float32.

DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly
PLACES = ["cuda", "cpu"] if INTERPRET else ["cuda"]


def check(name, t, dtypes, shape=None, device=None):
    """Refuse a tensor that the kernel cannot take."""
    if not isinstance(t, torch.Tensor) or t.is_nested:
        raise TypeError(f"{name} is a {type(t).__name__}, not a dense tensor")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} has {t.dtype}; supported here: {dtypes}")
    if t.dim() == 0 or t.shape != (t.shape if shape is None else shape):
        raise ValueError(f"{name} has {t.shape}; needed: {shape or 'a row'}")
    if t.device != (device or t.device) or t.device.type not in PLACES:
        raise ValueError(f"{name} is on {t.device}; needed: {device or PLACES}")
    if t.layout != torch.strided or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def layer_norm(x, weight=None, bias=None, eps=1e-5, out=None, center=True):
    """Return LayerNorm of the rows of x; RMSNorm, if center is False.

    x: a dtype of DTYPES; any strides with one distance between rows.
    weight, bias: None, or a contiguous row in x's dtype or float32.
    eps: finite, >= 0. out: like x; x itself, or a storage of its own.
    Calculates in float32, for float64 in float64. Raises TypeError for a
    wrong type or dtype, ValueError for the rest.
    """
    check("x", x, DTYPES)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check("out", out, [x.dtype], x.shape, x.device)
    inputs = dict(x=x, weight=weight, bias=bias)
    inputs = {name: t for name, t in inputs.items() if t is not None}
    for name, t in list(inputs.items())[1:]:
        check(name, t, [x.dtype, torch.float32], x.shape[-1:], x.device)
        if not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass a copy")
    if not isinstance(eps, (int, float)) or not 0 <= eps < torch.inf:
        raise ValueError(f"eps is {eps!r}; needed: a finite number >= 0")
    if x.numel() == 0:
        return out  # nothing to launch
    try:
        rows, to = (t.view(-1, t.shape[-1]) for t in (x, out))
    except RuntimeError as error:
        raise ValueError("rows of x or out have no one distance") from error
    (less, few), (more, many) = sorted(zip(to.stride(), to.shape))
    if (few > 1 and less < 1) or (many > 1 and more <= (few - 1) * less):
        raise ValueError("elements of out share memory; pass a new out")
    same = (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride())
    for name, t in list(inputs.items())[same:]:
        if t.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            raise ValueError(f"out shares memory with {name}; pass a new out")
    (M, N), strides = rows.shape, (*rows.stride(), *to.stride())
    longest = 2**13 if x.dtype == torch.float64 else 2**14  # to be kept
    BLOCK = min(triton.next_power_of_2(N), 1024 if N <= longest else 4096)
    KEEP = min(triton.cdiv(N, BLOCK), longest // BLOCK)
    ROWS = max(1, 1024 // BLOCK)
    warps = 16 if N > longest else 4 if N > 2048 else 2 if N > 1024 else 1
    options = dict(num_warps=warps)
    if KEEP > 5 and x.itemsize == 2 and N % 16 == 0 and not torch.version.hip:
        options["maxnreg"] = 96 if KEEP <= 8 else 128 if KEEP <= 12 else 168
    args = rows, weight, bias, to, M, N, *strides, float(eps), center, ROWS
    with torch.cuda.device_of(x):  # launch where the data is
        launch = norm_kernel[(triton.cdiv(M, ROWS),)]
        launch(*args, BLOCK, KEEP, KEEP * BLOCK < N, **options)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


def rms_norm(x, weight=None, bias=None, eps=1e-6, out=None):
    """Return RMSNorm over the last dimension of x, else like layer_norm."""
    return layer_norm(x, weight, bias, eps, out, center=False)


# %%
# Is it right?
# ------------
#
# Allowed is one rounding to the dtype of ``x``, and for sums ``2**-20`` times
# one plus the row's largest output (``2**-49`` in float64). The table shows the
# largest error over the allowed one, for rows with mean 100.

OURS = dict(layer_norm=layer_norm, rms_norm=rms_norm)
wide = 2**20 if gpu else 2**15
for dtype, op in [(dtype, op) for dtype in DTYPES for op in OURS]:
    x = torch.randn(4, wide, device=DEVICE, dtype=torch.float64) + 100
    x = x.to(dtype)
    views = {f"N={N}": x[:3, :N] for N in (1025, 5120, wide)}
    views |= {"transposed": x[:, :96].t()}
    print(f"{op:10} {dtype}", end="")
    for name, x in views.items():
        w, b = torch.randn(2, x.shape[-1], device=DEVICE)
        room = torch.full_like(torch.cat([x, x[..., :1]], -1), torch.nan)
        got = OURS[op](x, w, b, 1e-5, room[..., :-1]).double()
        exact = norm_ref(x, w, b, 1e-5, op == "layer_norm")
        slack = 2**-49 if dtype == torch.float64 else 2**-20
        slack *= 1 + exact.abs().amax(-1, keepdim=True)
        allowed = exact.abs() * torch.finfo(dtype).eps / 2 + slack
        ratio = ((got - exact).abs() / allowed).max().item()
        print(f"  {name}: {ratio:.2f}", end="")
        if not ratio <= 1 or not room[..., -1].isnan().all():
            raise RuntimeError("more than allowed, or outside of out")
    print()

# %%
# How fast is it?
# ---------------
#
# Bandwidth counts ``x`` and the output once. The ceiling is a copy, measured
# beside each case. All contenders allocate their output.

half = torch.bfloat16 if gpu and gpu.major >= 8 else torch.float16
size = 2**30 if gpu and torch.cuda.mem_get_info()[0] > 9e9 else 2**28  # bytes
widths = [1024, 2048, 4096, 5120, 8192, 12288, 16384, 65536]
cases = [("layer_norm", N, half) for N in widths]
cases += [("rms_norm", N, half) for N in (1024, 4096, 16384)]
cases += [("layer_norm", 4096, torch.float32)]
for op, N, dtype in cases if gpu else ():
    new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=dtype)
    x, (w, b) = new(size // dtype.itemsize // N, N), new(2, N)
    args = (w, b, 1e-5) if op == "layer_norm" else (w, 1e-5)
    eager = lambda: getattr(F, op)(x, (N,), *args)
    dst = torch.empty_like(x)
    torch.compiler.reset()  # compile for this shape alone
    calls = {"ceiling": lambda: dst.copy_(x), "torch": eager}
    calls["torch.compile"] = torch.compile(eager, dynamic=False)
    calls["triton"] = lambda: OURS[op](x, *args[:-1], eps=1e-5)
    case = dict(op=op, N=N, dtype=str(dtype)[6:], metric="GB/s")
    print(f"{op:10} {N:6} {case['dtype']}", end="")
    for provider, call in calls.items():
        try:
            right = provider <= "torch" or (call() - eager()).abs().max() <= 0.3
        except Exception as error:  # torch.compile needs a C compiler
            print(f"  left out: {provider}: {error}", end="")
            continue
        if not right:
            raise RuntimeError(f"{provider} is wrong")
        ms = triton.testing.do_bench(call, 10, 40, quantiles=[0.8, 0.5, 0.2])
        speeds = (2 * x.nbytes / t / 1e6 for t in ms)
        row = dict(zip(("low", "value", "high"), speeds))
        results.append(case | row | dict(provider=provider))
        print(f"  {provider} {row['value']:.0f}", end="")
    print()

looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
_, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained", sharey=True)
for axis, op in zip(axes, OURS):
    for provider, (style, color) in looks.items() if results else ():
        wanted = dict(op=op, provider=provider, dtype=str(half)[6:])
        line = [(r["N"], r["value"]) for r in results if r == r | wanted]
        if line:
            axis.semilogx(*zip(*line), style, color=color, label=provider)
    axis.set_xscale("log", base=2)
    axis.set(title=f"{op}, GB/s", xlabel="N", ylim=(0, None))
plt.legend() if results else ()
plt.show()

# %%
# Figure. Effective bandwidth against the width of a row, in 16-bit floats.
#
# From 1024 to 12288 columns in bfloat16, both norms reach at least
# :measured:`norms min(triton/ceiling) metric=GB/s dtype=bfloat16 N>=1024
# N<16384` of the ceiling, at 16384 at least :measured:`norms
# min(triton/ceiling) metric=GB/s dtype=bfloat16 N=16384`. Up to there, the
# geometric mean ratio to ``torch.compile`` is :measured:`norms
# geomean(triton/torch.compile) metric=GB/s dtype=bfloat16 N<=16384`, to eager
# :measured:`norms geomean(triton/torch) metric=GB/s dtype=bfloat16 N<=16384`. A
# row of 65536 is read again: :measured:`norms triton/ceiling metric=GB/s
# N=65536`. The ceiling is the rate of a copy; a kernel can pass it by a little.
#
# One pass too few
# ----------------
#
# Is ``mean(x * x) - mean(x) ** 2`` as good? It needs no second look. Take rows
# with deviation 1 and a growing mean. At mean 4096 the squares are near
# ``2**24``, where float32 counts in steps of 2, and the variance is 1.

means = 2.0 ** torch.arange(21, device=DEVICE)
x = torch.randn(21, 3000, device=DEVICE) + means[:, None]
d, exact = x - x.mean(-1, keepdim=True), x.double().var(-1, correction=0)
var = {"one pass": (x * x).mean(-1) - x.mean(-1) ** 2}
var |= {"two passes": d.square().mean(-1)}
y = {k: d / (v[:, None].clamp(0) + 1e-5).sqrt() for k, v in var.items()}
y |= {"torch": F.layer_norm(x, (3000,)), "triton": layer_norm(x)}
print("variance at mean 4096:", {k: v[12].item() for k, v in var.items()})
errors = {k: (v - exact) / exact for k, v in var.items()}
errors = errors, {k: (v - norm_ref(x)).abs().amax(-1) for k, v in y.items()}
looks |= {"one pass": ("-", "#D1495B"), "two passes": ("-", "#2A9070")}
_, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
for axis, error, what in zip(axes, errors, ("variance, relative", "output")):
    for name, values in error.items():
        line, color = values.abs().clamp(1e-9).cpu(), looks[name][1]
        axis.loglog(means.cpu(), line, color=color, label=name)
    axis.set(title=f"error of the {what}", xlabel="mean")
    axis.legend()
plt.show()

# %%
# Figure. Errors in float32 as the mean grows, against float64. Left: two
# formulas of the variance. Right: LayerNorm by each, PyTorch and this kernel.
#
# Two passes save the variance. Yet a mean that is rounded shifts the whole row,
# by more the larger it is. ``slip`` takes that back.
#
# .. admonition:: Takeaway
#
#    Keep the row in registers, and subtract before you square. The second look
#    at registers costs no bandwidth, and it is what makes the norm right.
#
# Exercises
# ---------
#
# - Return ``mean + slip`` and ``scale``, which a backward pass needs.
# - Normalise ``x + r`` and store that sum too. How many bytes does fusing save?
#
# Reading
# -------
#
# - LayerNorm (2016): https://arxiv.org/abs/1607.06450
# - RMSNorm (2019): https://arxiv.org/abs/1910.07467
