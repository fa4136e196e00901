r"""
Reductions: many numbers become one
===================================

Here elements meet: a sum or a maximum needs them all. You reduce rows, columns
and a whole tensor as fast as it can be read, and get the same bits each time.

- Which data does one program own? A tile; of a long row, only a part.
- How does it move? Into registers once. Then threads exchange their results.
- What limits the speed? Reading. Almost nothing is written.
"""

import os

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = DEVICE == "cuda"
results, excerpts = [], {}
print("" if gpu else "Left out, no GPU: compiled code, bandwidth, bfloat16")

# %%
# What it must cost
# -----------------
#
# A *pointwise* kernel writes a result for each element, a *reduction* of
# ``M * N`` elements only ``M`` or ``N``. In float32 it reads 4 bytes per
# addition. So memory decides, by its rate for reading alone:
#
# .. math:: t \ge \frac{M \cdot N \cdot \mathrm{size}}{\mathrm{read\ rate}}

FLOATS = [torch.float32, torch.float16, torch.float64]
FLOATS += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly


def reduce_ref(op, x, dim):
    """The maximum, or the sum in float64 (int64 for integers), rounded once."""
    wide = torch.float64 if x.dtype in FLOATS else torch.int64
    exact = x.amax(dim) if op == "max" else x.sum(dim, dtype=wide)
    return exact.to(x.dtype) if x.dtype in FLOATS else exact


# %%
# One tile, two axes
# ------------------
#
# ``tl.sum(x, axis=1)`` removes axis 1: one number is left for each row. After
# ``tl.max(x, axis=0)`` it is one for each column. To meet the tile again, the
# results of rows need the lost axis back, by ``[:, None]``. Then they are
# *broadcast*.


@triton.jit
def axes_kernel(x_ptr, sum_ptr, max_ptr, diff_ptr):
    offs_m, offs_n = tl.arange(0, 4), tl.arange(0, 8)
    offs = 8 * offs_m[:, None] + offs_n[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(sum_ptr + offs_m, tl.sum(x, axis=1))
    tl.store(max_ptr + offs_n, tl.max(x, axis=0))
    tl.store(diff_ptr + offs, x - tl.max(x, axis=1)[:, None])


x = torch.arange(32, device=DEVICE).mul(7).remainder(10).view(4, 8)
sums, maxima, diff = (torch.empty_like(t) for t in (x[:, :1], x[:1], x))
axes_kernel[(1,)](x, sums, maxima, diff)
tiles = {(0, 0): x, (8.5, 0): sums, (0, 4.5): maxima, (10.5, 0): diff}
plt.figure(figsize=(7, 2.2), layout="constrained")
for (left, top), tile in tiles.items():
    box = dict(color="#7f7f7f" if tile.numel() == 32 else "#3B82C4", alpha=0.3)
    for m, n in torch.ones_like(tile).nonzero().tolist():
        plt.text(left + n, top + m, tile[m, n].item(), ha="center", bbox=box)
plt.xticks([3.5, 8.5, 14], ["x, max", "sum", "x - row_max[:, None]"])
plt.axis((-0.7, 18.2, 5, -0.7))
plt.show()

# %%
# Figure. A tile of 4 rows and 8 columns. In blue, the sums of its rows and the
# maxima of its columns. Right, each row minus its own maximum.
#
# The kernel
# ----------
#
# One kernel serves rows and columns: axis ``k`` is kept, ``r`` is reduced. A
# program folds tile after tile along ``r`` into ``acc``, position by position.
# Threads exchange nothing until the end. 16-bit floats accumulate in float32,
# sums of integers in int64. Masked positions get 0, or the least value.
# ``tl.max`` drops NaN, which PyTorch keeps, so the kernel adds it again.


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, K, R, span, stride_xk, stride_xr, stride_os, stride_ok,
    SUM: tl.constexpr, NEUTRAL: tl.constexpr,
    AXIS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    REAL: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    WHOLE: tl.constexpr = tl.int64 if SUM or dtype == tl.int64 else tl.int32
    ACC: tl.constexpr = REAL if dtype.is_floating() else WHOLE
    pid_k, pid_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, end = pid_s * span, tl.minimum(pid_s * span + span, R)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_r = tl.arange(0, BLOCK_R)
    mask_k = tl.expand_dims(offs_k < K, AXIS)
    x_ptrs = x_ptr + tl.expand_dims(offs_k * stride_xk, AXIS)
    x_ptrs += tl.expand_dims((begin + offs_r) * stride_xr, 1 - AXIS)
    step = tl.full([], BLOCK_R, tl.int64) * stride_xr
    acc = tl.full(x_ptrs.shape, NEUTRAL, ACC)
    for start in range(begin, end, BLOCK_R):
        mask = mask_k & tl.expand_dims(start + offs_r < end, 1 - AXIS)
        x = tl.load(x_ptrs, mask, NEUTRAL).to(ACC)
        acc = acc + x if SUM else tl.maximum(acc, x, tl.PropagateNan.ALL)
        x_ptrs += step
    out = tl.sum(acc, axis=AXIS) if SUM else tl.max(acc, axis=AXIS)
    if not SUM:
        out -= tl.sum(tl.where(acc == acc, 0, acc), axis=AXIS)  # NaN or 0
    tl.store(out_ptr + pid_s * stride_os + offs_k * stride_ok, out, offs_k < K)


# %%
# The wrapper
# -----------
#
# Row sums of a transposed view are column sums of what it views. So the axis
# with the smaller stride becomes the tile's last: neighbouring threads read
# neighbours. Four rows would give four programs, and most of the GPU would
# idle. So a long ``r`` is cut: one launch reduces each part, a second one their
# results, in a fixed order.

INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
LEAST = {d: torch.iinfo(d).min for d in INTS} | {torch.bool: 0}
LEAST |= dict.fromkeys(FLOATS, -float("inf"))
OPS, KINDS = ("sum", "max"), ("cuda", "cpu")[: 1 + INTERPRET]
PROGRAMS = (8, 8) if INTERPRET else (2048, 16384)  # by axis, as measured


def launch(op, x, dim, out, programs=None, wide=256):
    """Reduce ``dim`` of x into out, in two stages if one has few programs."""
    steps = [s if n > 1 and s else 2**63 for n, s in zip(x.shape, x.stride())]
    if steps[0] < steps[1]:
        x, dim = x.t(), 1 - dim
    K, R, tile = x.size(1 - dim), x.size(dim), 16384 // max(x.itemsize, 4)
    above = triton.next_power_of_2(R or 1)
    along = max(wide // x.itemsize, tile // above)  # of k, if it lies so
    along = min(triton.next_power_of_2(K), along)
    block_r = min(above, tile) if dim else tile // along
    block_k = tile // block_r
    blocks, steps = triton.cdiv(K, block_k), triton.cdiv(R or 1, block_r)
    programs = programs or PROGRAMS[dim]
    parts = programs // blocks if 2 * blocks < programs else 1
    span = triton.cdiv(steps, parts) * block_r
    parts, part = triton.cdiv(R or 1, span), out.unsqueeze(0)
    if parts > 1:
        same = op == "max" or out.itemsize > 2
        part = x.new_empty(parts, K, dtype=out.dtype if same else torch.float32)
    sizes = K, R, span, x.stride(1 - dim), x.stride(dim), *part.stride()
    neutral = 0 if op == "sum" else LEAST[x.dtype]
    options = op == "sum", neutral, dim, block_k, block_r
    warps = 8 if block_r >= 1024 and x.itemsize >= 4 else 4
    reduce_kernel[blocks, parts](x, part, *sizes, *options, num_warps=warps)
    if parts > 1:
        launch(op, part, 0, out, programs=1, wide=32)


def reduce(op, x, dim, out=None):
    """Return the "sum" or "max" of x along dim, as torch.sum, torch.amax.

    x: any 2-D view on CUDA (interpreted: CPU), of a dtype in ``LEAST``.
    dim: -2 to 1. out: 1-D, apart from x, of its dtype; int64 for integer sums.
    Raises TypeError for a wrong type or dtype, ValueError for the rest;
    IndexError for the maximum of nothing (the sum of nothing is 0).
    """
    ends = []
    for name, t in [("x", x)] + [("out", out)] * (out is not None):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}, no torch.Tensor")
        if t.dtype not in LEAST:
            raise TypeError(f"{name} has {t.dtype}; supported: {[*LEAST]}")
        if t.device != x.device or t.device.type not in KINDS:
            raise ValueError(f"{name}: {t.device}, x: {x.device}, not {KINDS}")
        grad = t.requires_grad and torch.is_grad_enabled()
        if t.layout != torch.strided or t.is_neg() or grad:
            raise ValueError(f"{name} is sparse, negated or needs a gradient")
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        ends.append(t.data_ptr() + (last + 1) * t.itemsize)
    if x.ndim != 2 or type(dim) is not int or not -2 <= dim < 2:
        raise ValueError(f"x has {x.ndim} axes, not 2, or dim is {dim!r}")
    if op not in OPS:
        raise ValueError(f"op is {op!r}, not one of {OPS}")
    dim %= 2
    if op == "max" and x.size(dim) == 0:
        raise IndexError(f"x has size 0 along {dim}: there is no maximum")
    dtype = x.dtype if op == "max" or x.dtype in FLOATS else torch.int64
    shape = x.shape[1 - dim : 2 - dim]
    out = x.new_empty(shape, dtype=dtype) if out is None else out
    if out.dtype != dtype:
        raise TypeError(f"out has {out.dtype}, not {dtype}")
    if out.shape != shape or (len(out) > 1 and out.stride(0) == 0):
        raise ValueError(f"out: {out.shape}, {out.stride()}; wanted {shape}")
    crosses = x.data_ptr() < ends[-1] and out.data_ptr() < ends[0]
    if x.numel() and len(ends) > 1 and crosses:
        raise ValueError("out lies in the memory that x spans; pass a new out")
    if len(out):
        with torch.cuda.device_of(x):  # launch where the data is
            launch(op, x, dim, out)
        torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# A maximum must be equal. A sum in another order rounds elsewhere; fair is one
# rounding of the result, and four of the accumulator, for all ``abs(x)``.


def is_right(op, x, dim, got):
    ref = reduce_ref(op, x, dim)
    if op == "max" or x.dtype not in FLOATS:
        return torch.equal(got, ref)
    eps, size = torch.finfo(x.dtype).eps, x.abs().sum(dim, dtype=torch.float64)
    least = eps * ref.double().abs() + 4 * min(eps, 2**-23) * size
    return bool(((got.double() - ref.double()).abs() <= least).all())


VIEWS = "x; x.t(); x[::2, 1::3]; x[5:6]; x[:, 5:6].expand(-1, 9)".split("; ")
tried = [(view, torch.float32) for view in VIEWS] + [("x", d) for d in LEAST]
for view, dtype in tried:
    room = torch.full((45, 523), 99.0, device=DEVICE)  # around x
    room[1:-1, 1:-1] = 9 * torch.randn(43, 521, device=DEVICE)
    x = eval(view, {"x": room.to(dtype)[1:-1, 1:-1]})
    right = [is_right(op, x, d, reduce(op, x, d)) for op in OPS for d in (0, 1)]
    print(f"{view:25} {str(dtype)[6:]:8}", *right)
    if not all(right):
        raise RuntimeError("a reduction is wrong in the row above")

# %%
# Who adds? Each of many threads adds what it holds. Then they exchange. Here is
# the compiled code for a row of 4096 elements, by one warp and by four:

WORDS = "shfl.sync", "st.shared", "ld.shared", "bar.sync"
for warps in (1, 4) if gpu and not torch.version.hip else ():
    x, out = torch.ones(4096, device=DEVICE), torch.empty(1, device=DEVICE)
    sizes = 1, 4096, 4096, 4096, 1, 1, 1, True, 0, 1, 1, 4096
    ptx = reduce_kernel[1, 1](x, out, *sizes, num_warps=warps).asm["ptx"]
    found = [s.strip() for s in ptx.splitlines() if any(w in s for w in WORDS)]
    excerpts[f"exchange_{warps}_warps"] = "\n".join(found)
    print(f"{warps} warps, sum {out.item():.0f}", *found, sep="\n    ")

# %%
# ``shfl.sync.bfly`` is a *shuffle*: a thread gets the sum of one at distance 16
# in its warp and adds it to its own, then 8, 4, 2, 1. Four warps cannot see
# each other: each stores its sum in shared memory (``st.shared``), all
# wait at a barrier (``bar.sync``), and two more shuffles add the four. Then the
# sum goes back to all threads through shared memory.
#
# How fast is it?
# ---------------
#
# First the bound: *read* reads ``2**28`` float32 elements, which the *ceiling*
# copies, and writes one number for each 16 KiB.
# *Atomic* needs no second stage: its programs add to one place, as they come.
# But ``(a + b) + c`` may round otherwise than ``a + (b + c)``. So run it often.


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + pid, tl.max(x))


@triton.jit
def atomic_sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    tl.atomic_add(out_ptr, tl.sum(x), sem="relaxed")


free = torch.cuda.mem_get_info()[0] if gpu else 0
torch.manual_seed(0)
size = 2 ** (28 if free > 7e9 else 26 if gpu else 12)
data, copied = torch.rand(2, size, device=DEVICE)
shapes = [(size >> e, 2**e, 1) for e in range(8, 21, 2)]  # M, N, dim
shapes += [(size >> e, 2**e, 0) for e in range(4, 21, 4)]
shapes += [(1, N, 1) for N in (2**16, 2**20, 2**24, size)]
cases = [(*shape, "sum", "float32") for shape in shapes]
for kind in [("max", "float32"), ("sum", "bfloat16")]:
    cases += [(*shape, *kind) for shape in shapes[2:10:7]]
cases += [(1, 2**16, 1, "sum", f"{d}") for d in ("float16", "float64")]
for M, N, dim, op, dtype in cases if gpu else [(1, 512, 1, "sum", "float32")]:
    x = data[: M * N].to(getattr(torch, dtype)).view(M, N)
    out, exact = x.new_empty(x.size(1 - dim)), x.sum(dtype=torch.float64).item()
    function = {"sum": torch.sum, "max": torch.amax}[op]
    if gpu:
        torch.compiler.reset()  # compile for this size alone
        compiled = torch.compile(function, dynamic=False)
    add = atomic_sum_kernel[(triton.cdiv(N, 8192),)]
    calls = {
        "torch.compile": lambda: compiled(x, dim, out=out),
        "ceiling": lambda: copied.copy_(data),
        "triton:read": lambda: read_kernel[size // 4096,](data, copied, 4096),
        "torch": lambda: function(x, dim, out=out),
        "triton": lambda: reduce(op, x, dim, out),
        "triton:atomic": lambda: add(x, out.zero_(), N, 8192, num_warps=8),
    }
    print(case := dict(M=M, N=N, dim=dim, op=op, dtype=dtype, bytes=x.nbytes))
    last = 6 if M == 1 and dtype == "float32" else 5
    for provider, call in [*calls.items()][not gpu : last]:
        row, text = case | dict(provider=provider), ""
        out.fill_(torch.nan)
        call()
        if provider in ("torch", "triton") and not is_right(op, x, dim, out):
            raise RuntimeError(f"{provider} is wrong")
        if M == 1 and provider in ("torch", "triton", "triton:atomic"):
            sums = {(call(), out.item())[1] for _ in range(100 if gpu else 2)}
            error = max(abs(s / exact - 1) for s in sums)
            text = f"{len(sums):4} sums, error {error:.1e}"
            results.append(row | dict(metric="distinct_sums", value=len(sums)))
        if gpu:
            graph = torch.cuda.CUDAGraph()
            if provider != "ceiling":  # in a graph, a copy does not use the SMs
                with torch.cuda.graph(graph):
                    call()
                call = graph.replay
            t = triton.testing.do_bench(call, rep=40, quantiles=[0.8, 0.5, 0.2])
            moved = {"ceiling": 8 * size, "triton:read": 4 * size}
            rate = [moved.get(provider, x.nbytes) / ms / 1e6 for ms in t]
            row |= dict(zip(("low", "value", "high"), rate))
            results.append(row | dict(metric="GB/s"))
            text = f"{rate[1]:6.0f} GB/s {1e3 * t[1]:9.1f} us {text}"
        print(f"    {provider:15} {text}")
looks = {"triton:read": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"torch.compile": ("^-", "#A56CC1"), "triton": ("s-", "#3B82C4")}
_, axes = plt.subplots(1, 2, figsize=(7, 3), sharey=True, layout="constrained")
for dim, provider in [(dim, p) for dim in (0, 1) for p in looks if gpu]:
    wanted = dict(provider=provider, dim=dim, op="sum", dtype="float32")
    rows = [r for r in results if r == r | wanted and r["M"] > 1]
    line = [r["N"] for r in rows], [r["value"] for r in rows]
    look = dict(color=looks[provider][1], label=provider)
    axes[1 - dim].semilogx(*line, looks[provider][0], **look)
    axes[1 - dim].set(xlabel="N", title=f"sum, dim={dim}, GB/s")
axes[1].legend(*axes[1].get_legend_handles_labels())
plt.show()

# %%
# Figure. Bytes read per second by sums of float32 against the number of columns
# ``N``: rows left, columns right. Dashed is the kernel that only reads.
#
# At worst (widths 256 to ``2**20``) float32 row sums reach
# :measured:`reductions min(triton/triton:read) metric=GB/s op=sum dim=1 M>1
# dtype=float32` of the read rate, :measured:`reductions min(triton/torch)
# metric=GB/s op=sum dim=1 M>1 dtype=float32` of PyTorch and
# :measured:`reductions min(triton/torch.compile) metric=GB/s op=sum dim=1 M>1
# dtype=float32` of its compiler; column sums :measured:`reductions
# min(triton/torch) metric=GB/s op=sum dim=0 dtype=float32` of PyTorch. One row
# of ``2**28`` runs at :measured:`reductions triton metric=GB/s N=2**28`, by
# atomics at :measured:`reductions triton:atomic metric=GB/s N=2**28`. But 100
# runs gave :measured:`reductions triton:atomic metric=distinct_sums N=2**28`
# sums, two stages :measured:`reductions triton metric=distinct_sums N=2**28`.
#
# .. admonition:: Takeaway
#
#    Fold position by position, meet once at the end, add in a fixed order.
#
# Exercises
# ---------
#
# - Let ``acc`` be float16. From which ``N`` on are sums of ones wrong?
# - Compute means. Where do you divide, in which dtype?
#
# Reading
# -------
#
# - Warp shuffles: https://docs.nvidia.com/cuda/cuda-c-programming-guide/
