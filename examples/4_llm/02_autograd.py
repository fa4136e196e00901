r"""
Autograd: a backward pass of your own
=====================================

A kernel has no gradient until you write one. Here LayerNorm and RMSNorm get
theirs, joined to autograd. The gradient of the weight is a sum over all rows,
and you add it up without a race.

- Which data does one program own? Every k-th row, or half the columns of these.
- How does it move? ``x`` and ``dy`` are read once and ``dx`` is written once.
- What limits the speed? Memory bandwidth, if sums over rows stay on chip.
"""

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch._functorch import config

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
results = []
torch.manual_seed(0)
print("" if gpu else "Left out, no GPU: speed, races, bfloat16, wide rows")

# %%
# What it must cost
# -----------------
#
# A norm makes :math:`\hat x = (x - \mu)\, r` of a row, :math:`\mu` being its
# mean, :math:`r` one over the deviation, and :math:`y = \hat x\, w + b`. The
# loss sends back ``dy``, its gradient for ``y``. What are those for ``x``,
# ``w`` and ``b``? With :math:`g = dy \cdot w` and means over the row:
#
# .. math::
#
#    dx = r\, (g - \hat x\, \overline{g \hat x} - \overline{g}), \quad
#    dw = \sum_{rows} dy\, \hat x, \quad db = \sum_{rows} dy
#
# In RMSNorm :math:`\mu` and :math:`\overline{g}` fall away. ``dx`` needs sums
# along rows, ``dw`` and ``db`` sums along columns, all of the same ``x`` and
# ``dy``. Read both once and write ``dx``: ``3 * M * N * size`` bytes, for about
# 14 FLOP an element. Memory decides.


def norm_ref(x, w, b, eps=1e-5, center=True):
    """The norm in float64, of operations whose gradients autograd knows."""
    x = x.double() - (x.double().mean(-1, keepdim=True) if center else 0)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w + b


def leaves_of(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


def bench(call):
    """Milliseconds: 80 % quantile, median, 20 %."""
    return triton.testing.do_bench(call, 10, 40, quantiles=[0.8, 0.5, 0.2])


def grads_ref(dy, *inputs, eps=1e-5, center=True):
    """The gradients of x, w and b in float64, not rounded."""
    leaves = leaves_of(*(t.double() for t in inputs))
    y = norm_ref(*leaves, eps, center)
    return torch.autograd.grad(y, leaves, dy.double())


clock = getattr(gpu, "memory_clock_rate", 0)  # kHz, two transfers each
peak = 2 * clock * getattr(gpu, "memory_bus_width", 0) / 8e6 or 1000  # GB/s
print(f"2**27 elements of 2 bytes: t >= {3 * 2**28 / peak / 1e3:.0f} us")

# %%
# What is left of a gradient behind LayerNorm? The norm undoes any shift and any
# scaling of a row. So ``dx`` has no part along ones or ``x_hat``.

x, dy = torch.tensor([[2.0, 4, 4, 4, 5, 5, 7, 9], [1.0, 0, 0, 2, 0, 0, 0, 3]])
x_hat = (x - 5) / 2
mean, along = dy.mean().expand(8), x_hat * (dy * x_hat).mean()
dx = (dy - mean - along) / 2
print(f"sum of dx {dx.sum():.6f}, of dx * x_hat {(dx * x_hat).sum():.6f}")
parts = {"dy": dy, "mean": mean, "along x_hat": along}
_, axes = plt.subplots(1, 4, figsize=(7, 2), layout="constrained", sharey=True)
for axis, (name, values) in zip(axes, [*parts.items(), ("dx", dx)]):
    axis.bar(range(8), values, color="#3B82C4" if name == "dx" else "#7f7f7f")
    axis.set(title=name, xlabel="column")
plt.show()

# %%
# Figure. A row of 8 columns with weight 1 and deviation 2. Its ``dy`` loses its
# mean and its part along ``x_hat``. The rest over the deviation is ``dx``.
#
# The kernels
# -----------
#
# What must forward leave for backward? ``x`` is there already, ``x_hat`` would
# be as large again. A mean and ``r`` for each row are 8 bytes, and make
# ``x_hat`` anew in two FLOP. So this forward stores them too. The rest is as in
# :lesson:`norms`, for rows that fit one block.


@triton.jit
def norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_xm, stride_xn,
    EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    dtype: tl.constexpr = rstd_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_xm + offs * stride_xn, offs < N, 0)
    x = x.to(dtype)
    if mean_ptr is not None:
        mean = tl.sum(x) / N
        slip = tl.sum(tl.where(offs < N, x - mean, 0)) / N  # it was rounded
        x = tl.where(offs < N, x - mean - slip, 0)
        tl.store(mean_ptr + row, mean + slip)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + EPS)
    tl.store(rstd_ptr + row, rstd)
    x *= rstd
    if w_ptr is not None:
        x *= tl.load(w_ptr + offs, offs < N, 0).to(dtype)
    if b_ptr is not None:
        x += tl.load(b_ptr + offs, offs < N, 0).to(dtype)
    tl.store(y_ptr + row * N + offs, x, offs < N)


# %%
# Backward has no more programs than the GPU holds at a time. Each visits every
# so-many-th tile of ``ROWS`` rows and keeps its own ``dw`` and ``db`` in
# registers. Only at the end does ``add_to`` bring these together. During a
# tile, ``num_stages`` lets ``tl.range`` copy the next into shared memory.
#
# In float32, ``x``, ``dy``, ``dw`` and ``db`` of 16384 columns fill the whole
# 256 KiB of registers of an SM. So ``SPLIT`` programs share a wide row: each
# reads all of it for the two means, its own columns last, and keeps only those.
# Unless a row is shared or short, its weight is loaded ``EARLY``, once: in the
# loop it may cost registers, so programs. What no one wants is ``None``.


@triton.jit
def add_to(total_ptr, at, value, mask, lock_ptr, N, HOW: tl.constexpr):
    if HOW == "parts":  # a row for each program
        at += tl.program_id(0).to(tl.int64) * N
        tl.store(total_ptr + at, value, mask)
    elif HOW == "atomic":
        tl.atomic_add(total_ptr + at, value, mask, sem="relaxed")
    else:
        if HOW == "lock":
            while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") == 1:
                pass
        old = tl.load(total_ptr + at, mask, 0, cache_modifier=".cg")
        tl.store(total_ptr + at, old + value, mask)
        if HOW == "lock":
            tl.debug_barrier()  # all threads have stored
            tl.atomic_xchg(lock_ptr, 0, sem="release")


@triton.jit
def norm_backward_kernel(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, lock_ptr,
    M, N, SPAN, stride_xm, stride_xn, stride_ym, stride_yn, HOW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    CENTER: tl.constexpr = mean_ptr is not None
    EARLY: tl.constexpr = SPLIT == 1 and (BLOCK > 256 or STAGES == 1)
    dtype: tl.constexpr = rstd_ptr.dtype.element_ty
    part, offs = tl.program_id(1), tl.arange(0, BLOCK)[None, :].to(tl.int64)
    dw = tl.zeros((ROWS, BLOCK), dtype)
    db = tl.zeros((ROWS, BLOCK), dtype)
    if EARLY and w_ptr is not None:
        w = tl.load(w_ptr + offs, offs < N, 0)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0) * ROWS
    for start in tl.range(begin, M, step, num_stages=STAGES):
        rows = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
        mean = tl.load(mean_ptr + rows, rows < M, 0) if CENTER else 0.0
        rstd = tl.load(rstd_ptr + rows, rows < M, 0)
        along, over = tl.zeros((ROWS, 1), dtype), tl.zeros((ROWS, 1), dtype)
        for i in tl.static_range(SPLIT):
            at = (part + 1 + i) % SPLIT * SPAN + offs  # at last, its own
            live = (offs < SPAN) & (at < N)
            mask = (rows < M) & live
            x = tl.load(x_ptr + rows * stride_xm + at * stride_xn, mask, 0)
            dy = tl.load(dy_ptr + rows * stride_ym + at * stride_yn, mask, 0)
            x_hat, dy = (x.to(dtype) - mean) * rstd, dy.to(dtype)
            g = dy
            if w_ptr is not None:
                g *= (w if EARLY else tl.load(w_ptr + at, live, 0)).to(dtype)
            along += tl.sum(g * x_hat, 1, keep_dims=True)
            over += tl.sum(g, 1, keep_dims=True)
        dw += dy * x_hat
        db += dy
        if dx_ptr is not None:
            dx = g - x_hat * (along / N) - (over / N if CENTER else 0.0)
            tl.store(dx_ptr + rows * N + at, dx * rstd, mask)
    at = part * SPAN + tl.arange(0, BLOCK)
    mask = (tl.arange(0, BLOCK) < SPAN) & (at < N)
    if dw_ptr is not None:
        add_to(dw_ptr, at, tl.sum(dw, 0), mask, lock_ptr, N, HOW)
    if db_ptr is not None:
        add_to(db_ptr, at, tl.sum(db, 0), mask, lock_ptr, N, HOW)


# %%
# The function
# ------------
#
# ``torch.autograd.Function`` joins both directions. ``save_for_backward``
# notices if ``x`` is overwritten before it is needed. ``dy`` comes from whoever
# used ``y``, with any strides: that of ``y.sum()`` is one number with stride 0.
# ``needs_input_grad`` says what is wanted.
#
# Which tiles? The fastest on an H200: 16 elements a thread, and three stages
# where loads are whole 16 bytes and shared memory has room.

DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly
PLACES = ["cuda", "cpu"] if INTERPRET else ["cuda"]
MOST = torch.finfo(torch.float64).max


def plan(x, N, weight):
    """Columns to own; rows, columns, sharers, stages; warps; programs."""
    split = triton.cdiv(N, 4096 if x.dtype == torch.float64 else 8192)
    span = N if split == 1 else triton.cdiv(N, 16 * split) * 16
    block = triton.next_power_of_2(span)
    tile = max(block, 1024 if N <= 512 else 2048)
    if INTERPRET:
        return span, (tile // block, block, split, 1), 4, 2
    card = torch.cuda.get_device_properties(x.device)
    room = getattr(card, "shared_memory_per_block_optin", 0)
    size = 4 * x.itemsize + 2 * getattr(weight, "itemsize", 0)  # twice each
    stages = 3 if tile * split * size < room and N * x.itemsize % 16 == 0 else 1
    many = max(1, 16384 // (tile * (x.itemsize if stages > 1 else 2)))
    programs = many * card.multi_processor_count // split
    return span, (tile // block, block, split, stages), tile // 512, programs


class Norm(torch.autograd.Function):
    """LayerNorm, or RMSNorm without center, as an operation of autograd."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, center, how="parts", programs=0):
        M, N = x.shape[:-1].numel(), x.shape[-1]
        rows, y = x.view(M, N), x.new_empty(x.shape)
        kind = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = x.new_empty(2, M, dtype=kind)
        mean = mean if center else None
        if x.numel():
            block = triton.next_power_of_2(N)
            args = rows, weight, bias, y, mean, rstd, N, *rows.stride(), eps
            warps = max(1, min(16, block // 512))
            with torch.cuda.device_of(x):  # launch where the data is
                norm_kernel[(M,)](*args, block, num_warps=warps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.kinds = [t if t is None else t.dtype for t in (weight, bias)]
        ctx.how, ctx.programs = how, programs
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError("Norm has no second derivative")
        x, weight, mean, rstd = ctx.saved_tensors
        M, N = x.shape[:-1].numel(), x.shape[-1]
        rows, dy = x.view(M, N), dy.to_dense().resolve_neg().reshape(M, N)
        dx = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[1:3]
        span, tile, warps, most = plan(x, max(N, 1), weight)
        programs = ctx.programs or min(most, triton.cdiv(M, tile[0]))
        stack = ctx.how == "parts"
        shape = sum(wanted), programs if stack else 1, N
        sums = (x.new_empty if stack else x.new_zeros)(shape, dtype=rstd.dtype)
        each = iter(sums)
        into = [next(each) if needed else None for needed in wanted]
        lock = x.new_zeros(1, dtype=torch.int32) if ctx.how == "lock" else None
        if x.numel():
            args = rows, dy, weight, mean, rstd, dx, *into, lock, M, N, span
            args += *rows.stride(), *dy.stride(), ctx.how, *tile
            with torch.cuda.device_of(x):
                launch = norm_backward_kernel[(programs, tile[2])]
                launch(*args, num_warps=warps)
        each, kinds = iter(sums.sum(1)), zip(ctx.kinds, wanted)  # stage two
        grads = [next(each).to(kind) if w else None for kind, w in kinds]
        return dx, *grads, *[None] * 4


def check(name, t, dtypes, shape=None, device=None):
    """Refuse a tensor that the kernels cannot take."""
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


def layer_norm(x, weight=None, bias=None, eps=1e-5, center=True):
    """Return LayerNorm of the rows of x; RMSNorm, if center is False.

    x: a dtype of DTYPES; any strides with one distance between rows; fewer
        than 2**31 rows of at most 16384 columns. weight, bias: None, or a
        contiguous row in x's dtype or float32. eps: finite, >= 0.
    Differentiable once in all three. Float32 inside, for float64 float64.
    Raises TypeError for a tensor's type or dtype, ValueError for the rest.
    """
    check("x", x, DTYPES)
    for name, t in dict(weight=weight, bias=bias).items():
        if t is not None:
            check(name, t, [x.dtype, torch.float32], x.shape[-1:], x.device)
            if not t.is_contiguous():
                raise ValueError(f"{name} is not contiguous; pass a copy")
    if not isinstance(eps, (int, float)) or not 0 <= eps <= MOST:
        raise ValueError(f"eps is {eps!r}; needed: a finite number >= 0")
    M, N = x.shape[:-1].numel(), x.shape[-1]
    if M >= 2**31 or N > 2**14:
        raise ValueError(f"x is {M} x {N}; most: 2**31 - 1 rows, 16384 columns")
    try:
        x.view(M, N)
    except RuntimeError as error:
        raise ValueError("rows of x have no one distance") from error
    return Norm.apply(x, weight, bias, float(eps), center)


def rms_norm(x, weight=None, bias=None, eps=1e-6):
    """Return RMSNorm over the last dimension of x, else like layer_norm."""
    return layer_norm(x, weight, bias, eps, center=False)


# %%
# Is it joined?
# -------------
#
# Autograd records PyTorch's operations. A launch is none: what a kernel wrote
# has no ``grad_fn``. What ``Norm.apply`` returns has one. Is the formula right?
# ``gradcheck`` moves each input by ``1e-6`` and compares the differences with
# what backward returns. Only float64 has the digits for that.


def outcome(call):
    """What a call says: the first words of its error, or its result."""
    try:
        return str(eval(call))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:72]


x, rest = torch.randn(2, 3, 7, dtype=torch.float64, device=DEVICE)
x, w, b = leaves_of(x, *rest[:2])
y, r, half, full = torch.empty_like(x), x.new_empty(3), x.half(), w.float()
norm_kernel[(3,)](x, w, b, y, None, r, 7, 7, 1, 1e-5, 8)
print("kernel:", y.grad_fn, "  Norm:", type(layer_norm(x).grad_fn).__name__)
gradcheck, twice = torch.autograd.gradcheck, torch.autograd.gradgradcheck
for call in (
    "gradcheck(layer_norm, (x, w, b))",
    "gradcheck(rms_norm, (x, w))",
    "gradcheck(layer_norm, (x.detach(), None, b))",
    "gradcheck(lambda x: layer_norm(x.t(), w[:3]).sum(), x)",
    "twice(layer_norm, x)",
    "(z := x * 1, y := layer_norm(z), z.add_(1), y.sum().backward())",
    "layer_norm(half, full).dtype",
    "F.layer_norm(half, (7,), full).dtype",
):
    print(f"{call}\n    {outcome(call)}")

# %%
# Backward is no operation either, so there is no second derivative. Why refuse
# it? PyTorch's ``once_differentiable`` does so only where ``dy`` has a history.
# That of ``sum`` has none, and then a loss with ``dx`` in it would silently
# lose that part's gradient. So ``backward`` looks whether a graph is built. A
# float32 weight beside 16-bit rows, which PyTorch refuses, is fine: sums are
# float32.
#
# Are the gradients right in every dtype? Allowed is one rounding to the dtype,
# and for sums ``2**-20`` (in float64 ``2**-49``) times one plus the gradient's
# largest value in the row. The table shows the largest error over the allowed
# one. With deterministic algorithms, PyTorch fills new memory with NaN, so what
# no one wrote is seen.

OURS = dict(layer_norm=layer_norm, rms_norm=rms_norm)
rows = 99 if gpu else 5
torch.use_deterministic_algorithms(True)
for dtype, (op, call) in [(d, item) for d in DTYPES for item in OURS.items()]:
    print(f"{op:10} {str(dtype)[6:]:8}", end="")
    for N in (37, 5120 if gpu else 9001):
        room = torch.full((2, rows, N + 8), torch.nan, device=DEVICE)
        room[..., 3:-5] = torch.randn_like(room[..., 3:-5]) + 3
        x, dy = room.to(dtype)[..., 3:-5]
        leaves = leaves_of(x, *torch.randn(2, N, device=DEVICE))
        got = torch.autograd.grad(call(*leaves, 1e-5), leaves, dy)
        ratios = []
        for g, exact in zip(got, grads_ref(dy, *leaves, center=op[0] == "l")):
            slack = 2**-49 if g.dtype == torch.float64 else 2**-20
            slack *= 1 + exact.abs().amax(-1, keepdim=True)
            allowed = exact.abs() * torch.finfo(g.dtype).eps / 2 + slack
            ratios.append(((g - exact).abs() / allowed).max().item())
        print(f"  N={N}: {max(ratios):.2f}", end="")
        if not all(ratio <= 1 for ratio in ratios):
            raise RuntimeError("more than allowed, or not written")
    print()
torch.use_deterministic_algorithms(False)

# %%
# A sum without a race
# --------------------
#
# Every program has a row of ``dw`` to add to that of the others. If each loads
# the sum, adds, and stores it, two may load the same, and one addition is lost.
# That is a *race*. An *atomic* addition does all three at once. A *lock* lets
# one program in at a time. With *parts*, no one shares: each stores its row,
# and a second launch adds them in a fixed order. Programs own many rows, as
# above, or one each. How far off is the worst of 20 runs, and how many results
# are there?

ways = ["race", "atomic", "lock", "parts"] if gpu else ["parts"]
half = torch.bfloat16 if gpu and gpu.major >= 8 else torch.float16
free = torch.cuda.mem_get_info()[0] if gpu else 0
height = 2**17 if free > 2e10 else 2**15 if gpu else 9
x, dy = (torch.randn(height, 4096, device=DEVICE).to(half) for _ in range(2))
leaves = leaves_of(x, *torch.randn(2, 4096, device=DEVICE))
chunks = zip(x.split(4096), dy.split(4096))
exact = sum(grads_ref(dys, xs, *leaves[1:])[1] for xs, dys in chunks)
for rows, how in [(rows, how) for rows in ("many", "one") for how in ways]:
    if (rows, how) == ("one", "lock"):
        continue  # all programs, one after the other
    programs = height if rows == "one" else 0
    y = Norm.apply(*leaves, 1e-5, True, how, programs)
    call = lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
    found = [call()[1] for _ in range(20 if gpu else 2)]
    values = dict(error=max((t - exact).abs().max().item() for t in found))
    values["results"] = len({tuple(t.tolist()) for t in found})
    if gpu:
        values["us"] = 1e3 * bench(call)[1]
    print(f"{rows:5} {how:7}", *(f"{k} {v:.3g}" for k, v in values.items()))
    case = dict(provider="triton" if how == "parts" else f"triton:{how}")
    case |= dict(op="layer_norm", M=height, N=4096, rows=rows)
    results += [case | dict(metric=k, value=v) for k, v in values.items()]

# %%
# With many rows each, parts take :measured:`autograd triton metric=us
# rows=many`, atomics :measured:`autograd triton:atomic metric=us rows=many`,
# the lock :measured:`autograd triton:lock metric=us rows=many`. With one row
# each, parts take :measured:`autograd triton metric=us rows=one`, as ``dw`` and
# ``db`` then have as many parts as ``x`` has rows, and atomics
# :measured:`autograd triton:atomic metric=us rows=one`. Racing sums are wrong.
# Atomics and the lock add in the order in which programs come: 20 runs gave
# :measured:`autograd triton:atomic metric=results rows=many` and
# :measured:`autograd triton:lock metric=results rows=many` results, those of
# parts :measured:`autograd triton metric=results rows=many`.
#
# How fast is it?
# ---------------
#
# Forward runs once, backward often, on 1 GiB where memory allows, so that it
# takes longer than its start. Bandwidth counts as the bound does: ``x``, ``dy``
# and ``dx`` once. PyTorch's source has one kernel for ``dx``, and others for
# ``dw`` and ``db``, that read ``x`` and ``dy`` again: five passes, not three.

config.donated_buffer = False  # as a compiled backward runs often
size = 2**30 if free > 2e10 else 2**28 if free > 5e9 else 2**26  # bytes
widths = [256, 512, 781, 1024, 2048, 4096, 5120, 8192, 12288, 16384]
cases = [(N, op, half) for op in OURS for N in widths]
cases += [(N, op, torch.float32) for op in OURS for N in widths[::2] + [16384]]
for N, op, kind in cases if gpu else ():
    new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=kind)
    x, dy, dst = new(3, size // kind.itemsize // N, N)
    leaves = leaves_of(x, *new(2 if op[0] == "l" else 1, N))
    eager = lambda: getattr(F, op)(leaves[0], (N,), *leaves[1:], eps=1e-5)
    calls = {"torch": eager, "triton": lambda: OURS[op](*leaves, eps=1e-5)}
    if kind == half and N in (1024, 4096, 16384):
        torch.compiler.reset()  # compile for this shape alone
        calls["torch.compile"] = torch.compile(eager, dynamic=False)
    times = {"ceiling": [1.5 * t for t in bench(lambda: dst.copy_(x))]}
    right = torch.autograd.grad(eager(), leaves, dy)
    for provider, call in calls.items():
        try:
            y = call()
            call = lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
            pairs = [*zip(call(), right)]
        except Exception as error:  # torch.compile needs a C compiler
            print(f"Left out: {provider}: {error}".splitlines()[0])
            continue
        close = [(a - b).abs().max() < b.abs().max() / 50 for a, b in pairs]
        if not all(close):
            raise RuntimeError(f"{provider} is wrong")
        times[provider] = bench(call)
    case = dict(op=op, N=N, dtype=str(kind)[6:], metric="GB/s")
    print(f"{op:10} {case['dtype']:8} {N:5}", end="")
    for provider, ms in times.items():
        speeds = [3 * x.nbytes / t / 1e6 for t in ms]
        row = case | dict(zip(("low", "value", "high"), speeds))
        results.append(row | dict(provider=provider))
        print(f"  {provider} {speeds[1]:.0f}", end="")
    print()

looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
size = dict(figsize=(7, 3), layout="constrained", sharey=True)
figure, axes = plt.subplots(1, 2, **size)
for axis, op in zip(axes, OURS):
    for provider, (style, color) in looks.items():
        wanted = dict(op=op, provider=provider, dtype=str(half)[6:])
        rows = [r for r in results if r == r | wanted]
        line = [r["N"] for r in rows], [r["value"] for r in rows]
        axis.semilogx(*line, style, base=2, color=color, label=provider)
    axis.set(title=f"{op}, GB/s", xlabel="N", ylim=(0, None))
lines = axes[0].get_legend_handles_labels()
figure.legend(*lines, loc="outside lower center", ncols=4)
plt.show()

# %%
# Figure. Effective bandwidth of backward against the width of a row, in 16-bit
# floats. The dashed line is the ceiling, a copy.
#
# Backward has at least :measured:`autograd min(triton/torch) metric=GB/s
# N>=256` the speed of PyTorch's, :measured:`autograd min(triton/torch.compile)
# metric=GB/s N=16384 dtype=bfloat16` that of ``torch.compile`` at 16384
# columns. From 1024 to 4096 it is at least :measured:`autograd
# min(triton/ceiling) metric=GB/s N>=1024 N<=4096` of the ceiling. Rows of 781
# begin anywhere, so each load is one element. A block is a power of two: 5120
# columns leave 3072 places idle: in bfloat16 :measured:`autograd
# min(triton/ceiling) metric=GB/s N=5120 dtype=bfloat16`, in float32, of twice
# the bytes, :measured:`autograd min(triton/ceiling) metric=GB/s N=5120
# dtype=float32`. Above 8192, two programs read each row:
# :measured:`autograd min(triton/ceiling) metric=GB/s N>=12288`.
#
# .. admonition:: Takeaway
#
#    Save what is small, calculate the rest again. Keep a sum in registers while
#    you can, then give each program a place of its own.
#
# Exercises
# ---------
#
# - Put ``once_differentiable`` in place of the check in ``backward``. For which
#   loss does ``gradgradcheck`` still notice?
# - Save ``y`` instead of ``x``, so that ``x`` may be overwritten. When is
#   ``x_hat`` lost?
# - Let programs take the lock in the order of their numbers. Which grid hangs?
#
# Reading
# -------
#
# - Extending PyTorch: https://docs.pytorch.org/docs/main/notes/extending.html
# - Layer normalization (2016): https://arxiv.org/abs/1607.06450
