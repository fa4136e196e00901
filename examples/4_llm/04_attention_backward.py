r"""
Attention backward: recompute, do not keep
==========================================

A long sequence has too many attention weights to keep for its gradients. You
keep one number a row instead, compute every tile of weights anew, and write
two kernels that turn them into the gradients of ``q``, ``k`` and ``v``.

- Which data does one program own? A tile of queries, or a tile of keys.
- How does it move? The own tile stays on the SM; all others stream past.
- What limits the speed? Matrix products: seven for each pair of tiles.
"""

import itertools
import os

import matplotlib.pyplot as plt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = triton.knobs.runtime.interpret
CUDA = torch.cuda.is_available() and not INTERPRET
CUDA8 = CUDA and torch.cuda.get_device_capability()[0] >= 8
DEVICE, results = "cuda" if CUDA else "cpu", []
torch.manual_seed(0)
print("" if CUDA8 else "Left out, no GPU from 2020 on: speed, memory, bfloat16")

# %%
# What it must cost
# -----------------
#
# :lesson:`attention` computes scores ``S``, weights ``P`` and the output ``O``.
# Given ``dO``, the gradient of ``O``, the product rule and the derivative of a
# softmax give the others. ``s`` is the scale; the circle multiplies elements:
#
# .. math::
#
#    S &= s\, Q K^T & P &= \mathrm{softmax}(S) & O &= P V \\
#    dV &= P^T dO & dP &= dO\, V^T & dS &= P \circ (dP - \delta) \\
#    dQ &= s\, dS\, K & dK &= s\, dS^T Q & \delta_i &= \sum_j P_{ij}\, dP_{ij}
#
# Five products take ``10 * D`` FLOP for a pair of a query and a key. What must
# be kept? Not ``P``: with :math:`L_i`, the logarithm of the sum of exponentials
# in a row, any tile can be computed anew: :math:`P_{ij} = \exp(S_{ij} - L_i)`.
# Nor ``dP`` for :math:`\delta`: put in ``dO`` times ``V``, and swap the sums:
# :math:`\delta_i = \sum_d dO_{id}\, O_{id}`. One number a row is enough.


def attention_backward_ref(q, k, v, do, causal=False, scale=None):
    """Output and three gradients by autograd, in float64, not rounded."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones_like(s[0, 0]).triu(k.shape[2] - q.shape[2] + 1)
    hidden = (later > 0) & causal
    p = s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    out = p @ values
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do.double())


B, H, L, D = 2, 16, 16384, 128  # float16
print(f"P: {2 * B * H * L * L:,} bytes; q, k, v, O: {8 * B * H * L * D:,}")
print(f"L: {4 * B * H * L:,} bytes; {10 * B * H * L * L * D / 1e12:.1f} TFLOP")

# %%
# At 600 TFLOP/s, 11.0 TFLOP take 18 ms. To move the inputs, ``O``, ``dO`` and
# three gradients once, 1.1 GB, takes 0.3 ms at 4.2 TB/s: products decide.
# Writing and reading ``P`` would take 8 ms; computing it again, one of five
# products, takes 4 ms.
#
# Take four queries and six keys. With a causal mask, the last query sees the
# last key, so query 0 sees keys 0 to 2.

q, do = torch.randn(2, 1, 1, 4, 2).double()
k, v = torch.randn(2, 1, 1, 6, 2).double()
out, *exact = attention_backward_ref(q, k, v, do, causal=True)
s = q @ k.mT * 2**-0.5
s = s.masked_fill(torch.ones(4, 6).triu(3) > 0, -torch.inf)
p, dp = (s - s.logsumexp(-1, keepdim=True)).exp(), do @ v.mT
ds = p * (dp - (do * out).sum(-1, keepdim=True))
found = ds @ k * 2**-0.5, ds.mT @ q * 2**-0.5, p.mT @ do
print("dq, dk, dv are right:", *map(torch.allclose, found, exact))
_, axes = plt.subplots(1, 3, figsize=(7, 2), layout="constrained")
for axis, name, t in zip(axes, ("P", "dP", "dS"), (p, dp, ds)):
    far = 2 * t.abs().max()
    axis.imshow(t[0, 0], "RdBu", interpolation="none", vmin=-far, vmax=far)
    axis.set(title=name, xlabel="key", ylabel="query", yticks=range(4))
    for y, x in itertools.product(range(4), range(6)):
        number = f"{t[0, 0, y, x]:.2f}" if t[0, 0, y, x] else "0"
        axis.text(x, y, number, ha="center", va="center", fontsize=7)
plt.show()

# %%
# Figure. Weights, their gradients, and the gradients of the scores, for 4
# queries and 6 keys, causal. A row of ``P`` adds up to 1, a row of ``dS`` to 0.
#
# Forward: one number more
# ------------------------
#
# This is :lesson:`attention` in short, but it keeps ``lse``, L in base 2, one
# number a row. With ``log2(e)`` in the scale, ``exp2`` is ``exp``. A row that
# sees no key has output 0 and an infinite ``lse``: backward, its weights are
# then 0. Padded to a multiple of ``PAD``, ``lse`` is read without a mask.

PAD = 128  # a multiple of each BLOCK_M
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile(desc, b, h, row):
    x = desc.load([b, h, row, 0])
    return x.reshape(x.shape[2], x.shape[3])


@triton.jit
def put(desc, b, h, row, x):
    x = x.to(desc.dtype).reshape(1, 1, x.shape[0], x.shape[1])
    desc.store([b, h, row, 0], x)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, LQ, LK, LP, GROUP, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    seen = tl.minimum(LK + (offs_m + 1 - LQ) * CAUSAL, LK)  # so many keys
    q = tile(q_desc, b, h, m0)
    acc = tl.zeros(q.shape, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = total - 3e38  # finite, as a row may see no key
    for n0 in range(0, tl.max(seen, 0), BLOCK_N):
        k, v = tile(k_desc, b, h // GROUP, n0), tile(v_desc, b, h // GROUP, n0)
        s = tl.dot(q, k.T) * (scale * LOG2E)
        offs_n = n0 + tl.arange(0, BLOCK_N)
        s = tl.where(offs_n[None, :] < seen[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        total, top = total * shrink + tl.sum(p, 1), new
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    total = tl.where(seen > 0, total, 1)
    put(out_desc, b, h, m0, acc / total[:, None])
    lse = tl.where(seen > 0, top + tl.log2(total), float("inf"))
    row = (b * tl.num_programs(1) + h).to(tl.int64) * LP
    tl.store(lse_ptr + row + offs_m, lse)


# %%
# Backward: who owns a sum?
# -------------------------
#
# ``dq`` of a query is a sum over keys; ``dk`` and ``dv`` of a key are sums over
# queries. No program can own both. ``dq_kernel`` keeps a tile of queries, and
# keys stream past; ``dkdv_kernel`` keeps keys, and queries stream past. Both
# need ``S`` and ``dP``: 7 products for 5. But each gradient has one owner, who
# adds in a fixed order. ``dq_kernel`` comes first and leaves ``delta``.


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, out_desc, do_desc, dq_desc, lse_ptr, delta_ptr,
    LQ, LK, LP, GROUP, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * LP
    lse = tl.load(lse_ptr + row + offs_m)
    q, do = tile(q_desc, b, h, m0), tile(do_desc, b, h, m0)
    out = tile(out_desc, b, h, m0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + row + offs_m, delta)
    seen = tl.minimum(LK + (offs_m + 1 - LQ) * CAUSAL, LK)
    dq = tl.zeros(q.shape, tl.float32)
    for n0 in range(0, tl.max(seen, 0), BLOCK_N):
        k, v = tile(k_desc, b, h // GROUP, n0), tile(v_desc, b, h // GROUP, n0)
        s, dp = tl.dot(q, k.T), tl.dot(do, v.T)
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        if n0 + BLOCK_N > tl.min(seen, 0):
            offs_n = n0 + tl.arange(0, BLOCK_N)
            p = tl.where(offs_n[None, :] < seen[:, None], p, 0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    put(dq_desc, b, h, m0, dq * scale)


# %%
# ``dkdv_kernel`` transposes the scores, ``k @ q.T``: a row for each key. Then
# ``p`` and ``ds`` are *left* operands as they stand, and ``wgmma`` takes those
# from the registers in which they were computed. Keys behind the last are not
# stored, so only a causal mask matters. Heads that share keys come in turn.


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_ptr, delta_ptr,
    LQ, LK, LP, GROUP, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n0, hk, b = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    k, v = tile(k_desc, b, hk, n0), tile(v_desc, b, hk, n0)
    dk, dv = tl.zeros(k.shape, tl.float32), tl.zeros(k.shape, tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    edge = n0 + LQ - LK  # the first query that sees the first key
    first = max(edge, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for h in range(hk * GROUP, hk * GROUP + GROUP):
        row = (b * tl.num_programs(1) * GROUP + h).to(tl.int64) * LP
        for m0 in range(first, LQ, BLOCK_M):
            q, do = tile(q_desc, b, h, m0), tile(do_desc, b, h, m0)
            offs_m = m0 + tl.arange(0, BLOCK_M)
            lse = tl.load(lse_ptr + row + offs_m)
            s, dp = tl.dot(k, q.T), tl.dot(v, do.T)
            p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
            if CAUSAL:
                if edge + BLOCK_N > m0 + 1:
                    keep = offs_n[:, None] <= (offs_m - edge)[None, :]
                    p = tl.where(keep, p, 0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            delta = tl.load(delta_ptr + row + offs_m)  # late: fewer registers
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    put(dk_desc, b, hk, n0, dk * scale)
    put(dv_desc, b, hk, n0, dv)


# %%
# The wrapper
# -----------
#
# ``autograd.Function`` joins both directions; ``save_for_backward`` keeps what
# was listed. A descriptor takes a last stride of 1 and others of multiples of
# 16 bytes, so a transposed ``(batch, length, heads, D)`` is as good. Others are
# copied first.

F16, BF16 = torch.float16, torch.bfloat16
DTYPES = [F16] + [BF16] * CUDA8  # interpreted, bfloat16 is wrong
WIDEST = 128 if CUDA8 or INTERPRET else 64
TILES = {  # for D up to 64, 128: BLOCK_M, BLOCK_N, num_warps, num_stages
    64: dict(dq=(128, 64, 8, 3), dkdv=(64, 64, 4, 3)),
    128: dict(dq=(128, 64, 8, 3), dkdv=(64, 64, 4, 2)),
}
SMALL = dict(dq=(64, 32, 8, 2), dkdv=(32, 32, 4, 2))


def tiles_of(D, device):
    """The tiles to use: small ones where there is less than on Hopper."""
    gpu = device.type == "cuda" and torch.cuda.get_device_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", 0)
    small = gpu and (gpu.major < 9 or shared < 227 << 10)
    return SMALL if small else TILES[64 if D <= 64 else 128]


def launch(kernel, tile, causal, scale, tensors, **rows):
    """One program for each tile of the last tensor."""
    (BM, BN, warps, stages), descs = tile, {}
    q, k, LP = tensors["q"], tensors["k"], rows["lse_ptr"].shape[2]
    for name, t in tensors.items():
        height, length = (BN, t.shape[2]) if name[-1] in "kv" else (BM, LP)
        box = [1, 1, height, triton.next_power_of_2(t.shape[3])]
        descs[f"{name}_desc"] = TensorDescriptor(t, t.shape, t.stride(), box)
    sizes = dict(LQ=q.shape[2], LK=k.shape[2], LP=LP, CAUSAL=int(causal))
    sizes |= dict(GROUP=q.shape[1] // k.shape[1], BLOCK_M=BM, BLOCK_N=BN)
    how = dict(scale=scale, num_warps=warps, num_stages=stages)
    with torch.cuda.device_of(q):  # launch where the data is
        grid = triton.cdiv(length, height), t.shape[1], t.shape[0]
        kernel[grid](**descs, **rows, **sizes, **how)


def dense(t):
    """The tensor, or a copy that a descriptor can hold."""
    *apart, near = t.stride()
    fits = all(0 < n < 2**39 and n % 8 == 0 for n in apart) and near == 1
    fits = fits and t.data_ptr() % 16 == 0 and not t.is_neg()
    return t if fits else t.clone(memory_format=torch.contiguous_format)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, tiles):
        (q, k, v), (B, H, L, _) = map(dense, (q, k, v)), q.shape
        out = q.new_empty(q.shape)
        lse = q.new_empty(B, H, -(L // -PAD) * PAD, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how, tensors = (tiles, causal, scale), dict(q=q, k=k, v=v, out=out)
        how = tiles["dq"], causal, scale
        launch(forward_kernel, *how, tensors, lse_ptr=lse)
        return out

    @staticmethod
    def backward(ctx, do):
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError("attention has no second derivative")
        (q, k, v, out, lse), (tiles, *how) = ctx.saved_tensors, ctx.how
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        inputs = dict(q=q, k=k, v=v, do=dense(do))
        rows = dict(lse_ptr=lse, delta_ptr=torch.empty_like(lse))
        tensors = inputs | dict(out=out, dq=dq)
        launch(dq_kernel, tiles["dq"], *how, tensors, **rows)
        tensors = inputs | dict(dk=dk, dv=dv)
        launch(dkdv_kernel, tiles["dkdv"], *how, tensors, **rows)
        return dq, dk, dv, None, None, None


def attention(q, k, v, *, causal=False, scale=None):
    """Return ``softmax(scale * q @ k.mT) @ v``, with gradients for q, k, v.

    q: (batch, heads, length, D), float16, or bfloat16 from capability 8.0 on;
        D a multiple of 8 from 16 to 128 (below 8.0: 64), batch and heads below
        2**16, length to 2**30, any strides. Interpreted: CPU, float16.
    k, v: alike, of one shape; any length will do; of fewer heads than q, each
        one serves equally many neighbours in q.
    causal: hide later keys; the last query sees the last key. A query that
        sees no key has output 0 and gradient 0.
    scale: a number between -1e20 and 1e20, D ** -0.5 if None.
    Sums are float32, scores below 2**14; weights, gradients of scores and
    results are rounded to the dtype, and must fit: scale a tiny loss. inf and
    NaN may spread to other rows: 0 * inf is NaN. create_graph=True is a
    RuntimeError, a wrong type a TypeError, the rest a ValueError.
    """
    for name, t in dict(q=q, k=k, v=v).items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}, not a tensor")
        if t.dtype not in DTYPES or t.dtype != q.dtype:
            raise TypeError(f"{name} has {t.dtype}; all need one of {DTYPES}")
        if t.device != q.device or not (t.is_cuda or t.is_cpu and INTERPRET):
            raise ValueError(f"{name} is on {t.device}; all need one GPU")
        if t.layout != torch.strided or t.is_nested or t.is_neg():
            raise ValueError(f"{name} is sparse or a negated view; pass a copy")
        B, H, L, D = t.shape if t.dim() == 4 else (0, 0, 0, 0)
        if D % 8 or not 16 <= D <= WIDEST or max(B, H) >= 2**16 or L > 2**30:
            message = f"not 4 sizes, D 16, 24 to {WIDEST}"
            raise ValueError(f"{name} has {t.shape}: {message}")
    (B, H, L, D), heads = q.shape, k.shape[1]
    together = k.shape == v.shape == (B, heads, k.shape[2], D)
    if not together or H != heads and (heads == 0 or H % heads):
        raise ValueError(f"{q.shape}, {k.shape}, {v.shape} do not fit together")
    scale = D**-0.5 if scale is None else scale
    if type(causal) is not bool or type(scale) not in (int, float):
        raise TypeError(f"causal={causal!r}, scale={scale!r}: a bool, a number")
    if not abs(scale) < 1e20:
        raise ValueError(f"scale is {scale!r}, not a number below 1e20")
    if q.numel() == 0 or k.numel() == 0:  # zeros, or nothing
        keys, values = (t[:, :1].expand(-1, H, -1, -1) for t in (k, v))
        return q @ keys.mT @ values
    return Attention.apply(q, k, v, causal, float(scale), tiles_of(D, q.device))


# %%
# Is it right?
# ------------
#
# Tensor cores need ``P`` and ``dS`` in 16 bits. Allowed is ``2 * eps`` of the
# largest number in each tensor. NaN lie around the inputs and, by
# *deterministic algorithms*, in new memory. Each case runs in two tiles.
#
# Does any ``BLOCK_M`` go with any ``BLOCK_N``? Many kernels have two loops, one
# without a mask. Where the bound between them is no multiple of the step, pairs
# count twice, no address is wrong, and in a search by time alone such a tile
# may win. Here each tile asks whether it needs a mask, and is checked.


def errors(found, exact, allowed):
    """The largest error of each, over its largest number."""
    both = [(a.double() - b, b.abs().max()) for a, b in zip(found, exact)]
    rel = [(far.abs().max() / most.clamp(0.01)).item() for far, most in both]
    if not all(error <= allowed for error in rel):  # NaN is not
        raise RuntimeError(f"wrong: errors {rel}, allowed {allowed}")
    return rel


def verify(B, HQ, HK, LQ, LK, D, causal, dtype, tiles=None):
    """Print the errors of output and gradients, in these tiles."""
    tensors = []
    for heads, length in (HQ, LQ), (HK, LK), (HK, LK), (HQ, LQ):
        room = torch.full(
            (B, length + 2, heads, D + 8), torch.nan, device=DEVICE
        )
        inner = room.to(dtype)[:, 1:-1, :, :D].transpose(1, 2).normal_()
        tensors += [inner.requires_grad_(len(tensors) < 3)]
    *leaves, do = tensors
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    how = causal, D**-0.5, tiles or tiles_of(D, do.device)
    out = Attention.apply(*leaves, *how)
    found = out.detach(), *torch.autograd.grad(out, leaves, do)
    torch.use_deterministic_algorithms(False)
    exact = attention_backward_ref(*tensors, causal)
    worst = errors(found, exact, 2 * torch.finfo(dtype).eps)
    print(B, HQ, HK, LQ, LK, D, causal, dtype, *(f"{e:.1e}" for e in worst))


cases = {(2, 4, 2, 67, 131, 64, True, F16): (64, 128)}
cases |= {(1, 3, 1, 131, 67, 16, True, F16): (128, 64)}
cases |= {(1, 2, 2, 208, 304, 64, True, F16): (32, 128)}
cases |= {(1, 2, 2, 129, 1, 24, False, F16): (128, 32)}
cases |= {(2, 8, 2, 1000, 1500, 128, True, BF16): (64, 32)} if CUDA8 else {}
print("B, HQ, HK, LQ, LK, D, causal, dtype; errors of O, dq, dk, dv:")
for case, sides in cases.items():
    verify(*case)
    print("in tiles of", *sides, end=": ")
    verify(*case, dict.fromkeys(("dq", "dkdv"), (*sides, 4, 1)))

# %%
# Speed, memory, and the same bits
# --------------------------------
#
# Everyone runs ``torch.autograd.grad`` of an output that is there: the backward
# pass alone, ``delta`` and new gradients included, in short turns, so at one
# clock. Counted are five products over the pairs that the mask leaves. The
# ceiling is ``torch.mm``, 8192 cubed. ``torch`` is PyTorch without a fused
# kernel, in float16. There are 32,768 tokens in all.

PEERS = {"torch": SDPBackend.MATH, "sdpa:flash": SDPBackend.FLASH_ATTENTION}
PEERS |= {"sdpa:cudnn": SDPBackend.CUDNN_ATTENTION, "triton": SDPBackend.MATH}
torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
square = torch.randn(2, 8192, 8192, device=DEVICE).half() if CUDA8 else None
shapes = itertools.product((1024, 4096, 16384), (64, 128), (False, True))
for L, D, causal in shapes if CUDA8 else ():
    B, H, pairs = 2**15 // L, 2048 // D, L * (L + 1) // 2 if causal else L * L
    tensors = torch.randn(4, B, H, L, D, dtype=F16, device=DEVICE)
    *leaves, do = (t.requires_grad_(i < 3) for i, t in enumerate(tensors))
    calls, exact = {"ceiling": (lambda: torch.mm(*square), {})}, None
    if 80 * L * L < torch.cuda.mem_get_info()[0]:
        exact = attention_backward_ref(*tensors[:, -1:, -1:], causal)[1:]
    for name, backend in PEERS.items():
        sdpa = attention if name == "triton" else scaled_dot_product_attention
        mask = {"causal" if name == "triton" else "is_causal": causal}
        out = call = grads = None  # what they hold would be counted
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            with sdpa_kernel(backend):
                out = sdpa(*leaves, **mask)
            kept = torch.cuda.memory_allocated() - before
            call = lambda out=out: torch.autograd.grad(out, leaves, do, True)
            grads = call()
        except RuntimeError as error:  # also where memory is short
            print(f"Left out: {name}: {error}".splitlines()[0])
            continue
        peak = torch.cuda.max_memory_allocated() - before
        differ = sum((a != b).sum().item() for a, b in zip(grads, call()))
        if exact:
            errors([t[-1:, -1:] for t in grads], exact, 0.02)
        counts = dict(kept=kept >> 20, peak=peak >> 20, differ=differ)
        calls[name] = call, counts
    times, case = {name: [] for name in calls}, dict(L=L, D=D, causal=+causal)
    for _, name in itertools.product(range(7), calls):
        times[name] += [triton.testing.do_bench(calls[name][0], 1, 4)]
    print(case, "TFLOP/s, MiB kept, MiB at most, numbers that differ:")
    for name, ms in times.items():
        flop = 2 * 8192**3 if name == "ceiling" else 10 * B * H * pairs * D
        values = {"TFLOP/s": [flop / t / 1e9 for t in sorted(ms)[5:0:-2]]}
        values |= {what: [n] * 3 for what, n in calls[name][1].items()}
        print(f"    {name:10}", *(f"{v[1]:9.0f}" for v in values.values()))
        for metric, triple in values.items():
            row = dict(zip(("low", "value", "high"), triple), metric=metric)
            results.append(row | dict(provider=name, dtype="float16") | case)

looks = {"ceiling": ("--", "#7f7f7f"), "torch": ("o-", "#7f7f7f")}
looks |= {"sdpa:flash": ("o-", "#C9731E"), "sdpa:cudnn": ("^:", "#C9731E")}
looks |= {"triton": ("s-", "#3B82C4")}
figure, axes = plt.subplots(1, 3, figsize=(7, 2.8), layout="constrained")
shown = ("TFLOP/s", False), ("TFLOP/s", True), ("peak", False)
for (metric, causal), axis in zip(shown, axes):
    scale = "log" if metric == "peak" else "linear"
    axis.set(xscale="log", yscale=scale, xlabel="L")
    axis.set(title=f"{metric}{', causal' * causal}")
    for name, (style, color) in looks.items():
        wanted = dict(provider=name, metric=metric, D=128, causal=causal)
        line = [(r["L"], r["value"]) for r in results if r == r | wanted]
        axis.plot(*zip(*line), style, color=color, label=name) if line else 0
lines = axes[0].get_legend_handles_labels()
figure.legend(*lines, loc="outside lower center", ncols=5)
plt.show()

# %%
# Figure. Heads of 128 in float16, against the length ``L`` of a sequence: speed
# of backward alone, without and with a causal mask, and the MiB that both
# passes need at most.
#
# The geometric mean over all twelve cases is :measured:`attention_backward
# geomean(triton/sdpa:flash) metric=TFLOP/s` of FlashAttention-2's speed, the
# least :measured:`attention_backward min(triton/sdpa:flash) metric=TFLOP/s`. Of
# cuDNN's it is :measured:`attention_backward geomean(triton/sdpa:cudnn)
# metric=TFLOP/s`. Heads of 128 at 16384, no mask, reach
# :measured:`attention_backward triton metric=TFLOP/s L=16384 D=128 causal=0`,
# with 7 products for 5 that count; the ceiling is :measured:`attention_backward
# ceiling metric=TFLOP/s L=16384 D=128 causal=0`. At 4096 ``torch`` keeps
# :measured:`attention_backward torch metric=kept L=4096 D=128 causal=0` MiB,
# with ``P``, and these kernels :measured:`attention_backward triton metric=kept
# L=4096 D=128 causal=0` MiB.
#
# In FlashAttention-2, programs that share a query add to its ``dq`` by atomics,
# in the order in which they come. Two runs differ in
# :measured:`attention_backward sdpa:flash metric=differ L=4096 D=128 causal=0`
# numbers, two of these kernels in :measured:`attention_backward triton
# metric=differ L=4096 D=128 causal=0`.
#
# .. admonition:: Takeaway
#
#    Keep one number a row, and recompute the tile: products are cheaper than
#    memory. Give each sum one owner, and it is the same in each run.
#
# Exercises
# ---------
#
# - Let ``dkdv_kernel`` add to ``dq`` by ``tl.atomic_add``. Faster? Same bits?
# - Split ``dq_kernel``'s loop, one part without a mask. Which tiles go wrong?
#
# Reading
# -------
#
# - FlashAttention-2, the paper (2023): https://arxiv.org/abs/2307.08691
