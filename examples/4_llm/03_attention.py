r"""
Attention: a matrix that is never stored
========================================

Every query of a language model is compared with every key. You start with three
kernels that store all scores, write one that stores none, and then give loading
and calculating to different warps.

- Which data does one program own? A tile of queries, of one head.
- How does it move? Keys and values pass by, a tile at a time.
- What limits the speed? Tensor Cores and exponentials, if they overlap.
"""

import functools
import itertools
import math
import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
CUDA8 = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
results = []
if not CUDA8:
    print("Left out, no GPU from 2020 on: bfloat16, speed, memory")

# %%
# What it must cost
# -----------------
#
# Each of ``M`` queries takes a mean of ``N`` values, weighted with the softmax
# of its scaled scores :math:`q \cdot k`. With ``D`` numbers in a head, ``H``
# heads and a batch of ``B``, both products below take ``4 * B * H * M * N * D``
# FLOP:
#
# .. math:: o_i = \sum_j \frac{e^{s_{ij}}}{\sum_n e^{s_{in}}} v_j, \qquad
#           s_{ij} = \frac{q_i \cdot k_j}{\sqrt D}
#
# A *causal* mask hides later keys. The last query stands beside the last key,
# so query ``i`` sees keys up to ``i + N - M``; if there are none, its result is
# 0. With *grouped queries*, several heads share keys and values.


def attention_ref(q, k, v, causal=False, scale=None):
    """The result in float64, and the same mean of absolute values."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    s = q.double() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    M, N = s.shape[2:]
    if causal:
        later = torch.ones(M, N, dtype=torch.bool, device=q.device)
        s = s.masked_fill(later.triu(N - M + 1), -math.inf)
    p = s.softmax(-1).masked_fill((s == -math.inf).all(-1, True), 0)
    return p @ v, p @ v.abs()


for N in (1024, 4096, 16384):
    flop, gb = 4 * N * N / (8 * N), 2 * 32 * N * N / 1e9  # D is in both
    print(f"{N:5} keys: {flop:4.0f} FLOP a byte; 32 heads' scores: {gb:.2f} GB")

# %%
# Read and written once, the tensors allow 512 FLOP a byte or more: Tensor Cores
# should decide. But the scores have ``N / (4 * D)`` times as many bytes as all
# tensors. Which weights do they become? Six keys, the last four queries:

torch.manual_seed(0)
q, k = torch.randn(2, 1, 1, 6, 4, dtype=torch.float64)
p = attention_ref(q[:, :, 2:], k, torch.eye(6)[None, None], causal=True)[0]
plt.figure(figsize=(7, 2.4), layout="constrained")
for (y, x), value in zip(itertools.product(range(4), range(6)), p.flatten()):
    color = "#3B82C4" if value else "#D1495B"
    plt.gca().add_patch(plt.Rectangle((x, y), 1, 1, fc=color, alpha=0.3))
    plt.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center")
plt.axis((0, 6, 4, 0))
plt.vlines((2, 4), 0, 4, color="gray")
plt.xticks([x + 0.5 for x in range(6)], [f"key {x}" for x in range(6)])
plt.yticks([y + 0.5 for y in range(4)], [f"query {y}" for y in range(4)])
plt.grid(False)
plt.show()

# %%
# Figure. Causal weights of four queries for six keys. Each row sums to 1; red
# is hidden. Lines cut the keys into tiles of two.
#
# Three kernels
# -------------
#
# First as the formula reads: a product, a softmax, a product. Each is fast on
# its own; between them lie ``M * N`` scores in memory.


def naive(q, k, v, causal=False):
    """As many queries as keys, no shared heads; scale and mask apart."""
    s = (q * q.shape[3] ** -0.5) @ k.mT
    if causal:
        later = torch.ones_like(s[0, 0], dtype=torch.bool).triu(1)
        s.masked_fill_(later, -math.inf)
    return s.softmax(-1) @ v


# %%
# One kernel
# ----------
#
# The online softmax of :lesson:`softmax` corrects its sum when the maximum
# grows. Here the sum has company: ``acc``, the weighted sum of values so far,
# is corrected by the same ``alpha``. So a tile of scores may vanish as soon as
# its values are added:
#
# .. math:: m' = \max(m, \max_j s_j), \quad \alpha = e^{m - m'}, \quad
#           \ell' = \alpha \ell + \sum_j e^{s_j - m'}, \quad
#           a' = \alpha a + \sum_j e^{s_j - m'} v_j
#
# The maximum starts at a finite number, so ``-inf`` minus it is never NaN, and
# a row that sees no key keeps a sum of 0. ``scale`` contains
# :math:`\log_2 e`: a score takes a multiply-add and the hardware's ``exp2``.

LOWEST, FLOOR = tl.constexpr(-math.inf), tl.constexpr(-3e38)


@triton.jit
def add_scores(s, m, total, scale, SLACK: tl.constexpr):
    """Weights of a tile, the correction, what is subtracted, the sum so far."""
    high = tl.max(s, 1) * scale
    high = tl.where(high - m > SLACK, high, m)
    p = tl.exp2(s * scale - high[:, None])
    alpha = tl.exp2(m - high)
    return p, alpha, high, total * alpha + tl.sum(p, 1)


# %%
# Tiles come through tensor descriptors, as in :lesson:`gemm_fast`: past the
# ends there are zeros, so ``D = 80`` takes a block of 128. Which keys need a
# mask? All rows of a tile see those before ``full``; none sees any from ``end``
# on. Only keys between are compared with each row. The last tiles of queries
# see most keys, so they begin. ``ROUND`` and ``seen_ptr`` are for experiments
# below.


@triton.jit
def store_rows(
    acc, total, out_ptr, b, h, offs_m, M, D,
    stride_ob, stride_oh, stride_om, stride_od, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, and store; a row that saw nothing is 0."""
    acc /= tl.where(total == 0, 1, total)[:, None]
    out_ptr += b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    offs_d, offs_m = tl.arange(0, BLOCK_D)[None, :], offs_m[:, None]
    mask = (offs_m < M) & (offs_d < D)
    offs = offs_m.to(tl.int64) * stride_om + offs_d.to(tl.int64) * stride_od
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def attention_kernel(
    q_desc, k_desc, v_desc, out_ptr, seen_ptr, heads, group, M, N, D,
    stride_ob, stride_oh, stride_om, stride_od, scale,
    CAUSAL: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid, tiles = tl.program_id(0), tl.cdiv(M, BLOCK_M)
    b, h, tile = pid // tiles // heads, pid // tiles % heads, pid % tiles
    row = (tiles - 1 - tile) * BLOCK_M
    q = q_desc.load([b, h, row, 0]).reshape(BLOCK_M, BLOCK_D)
    offs_m, offs_n = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    last, end, full = offs_m * 0 + N - 1, N, N
    if CAUSAL:
        last = tl.minimum(offs_m - M + N, N - 1)  # that a row sees
        end = tl.minimum(row - M + N + BLOCK_M, N)
        full = tl.maximum(tl.minimum(row - M + N, N), 0)
    if ROUND:
        full = full // BLOCK_N * BLOCK_N
    m = tl.full((BLOCK_M,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for MASK in tl.static_range(2):
        for n in range(full if MASK else 0, end if MASK else full, BLOCK_N):
            k = k_desc.load([b, h // group, n, 0]).reshape(BLOCK_N, BLOCK_D)
            s = tl.dot(q, k.T)
            if MASK:
                live = (n + offs_n)[None, :] <= last[:, None]
                s = tl.where(live, s, LOWEST)
            p, alpha, m, total = add_scores(s, m, total, scale, SLACK=0)
            v = v_desc.load([b, h // group, n, 0]).reshape(BLOCK_N, BLOCK_D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            if seen_ptr is not None:  # of a single head: 1, if masked 2
                at = row // BLOCK_M * tl.cdiv(N, BLOCK_N) + n // BLOCK_N
                tl.store(seen_ptr + at, 1 + MASK)
    strides = stride_ob, stride_oh, stride_om, stride_od
    store_rows(acc, total, out_ptr, b, h, offs_m, M, D, *strides, BLOCK_D)


# %%
# Warps that load, warps that calculate
# -------------------------------------
#
# Above, a warp that calculates scores waits for keys, asks for the next, waits
# until all warps have read the last: meanwhile its Tensor Core idles. With
# ``warp_specialize`` the compiler makes three groups of ``num_warps`` out of
# the loop: one only loads, and two calculate, each half of the rows. While one
# is at its exponentials, the other can multiply. The loop goes over tiles of
# queries, so loading can run ahead into the next: program ``pid`` of ``SMS``,
# one an SM, takes the tiles ``pid``, ``pid + SMS``, and so on.
#
# The compiler is particular. It halves the tile of queries. A descriptor from
# the host fetches whole tiles, so theirs is made in the kernel. It has two
# axes: of four, the compiler would halve the wrong one, and a barrier would
# wait for ever. Past the end of a head come rows of the next, calculated, but
# not stored. Only one loop over keys is accepted, so each tile of scores passes
# the mask. The tiles of four heads alternate: with 8 tiles a head and 132
# programs, program 0 would else get only a head's tiles 0 and 4, and program 3
# only 3 and 7, which see fewer keys.
#
# Where the mask changes nothing, in most tiles, it should cost next to nothing.
# ``alpha``, too, changes few rows: the more keys a row has seen, the rarer a
# new maximum. But a warp skips nothing unless all its 16 rows agree. Need ``m``
# be the maximum? Whatever is subtracted, ``acc`` and ``total`` have the same
# factor, which the division removes. So ``m`` stays, and ``alpha`` is 1, until
# a scaled score, the exponent of 2, exceeds it by more than ``SLACK = 8``.
# Weights are then at most ``2**8``, which float16 holds.
#
# How can a warp skip both? With an ``if`` in Triton, the compiler makes no
# groups. But inline assembly is to it one element-wise operation, and it does
# not look inside: so the jump is written in PTX. Half a tile, 64 by 128, lies
# in 4 warps: a thread has 64 numbers, and ``step`` is there 64 times. A byte
# for each number says whether it has work: in ``hide`` all bytes are alike, in
# ``correct`` those of a row. ``or`` joins a thread's bytes, ``vote`` asks the
# warp's 32 threads. Without work, they jump to ``DONE``.


def unless_idle(step, kinds):
    """PTX and operands: a thread's 64 numbers change if its warp has work."""
    kinds = ["=&f"] * 64 + [*map(str, range(64)), *kinds] + ["r"] * 16
    regs = [f"${i}" for i in range(len(kinds))]  # 64 to 127 are 0 to 63 again
    ptx = "{.reg .b32 w; .reg .pred p; mov.b32 w,0;"
    ptx += "".join(f"or.b32 w,w,{bytes4};" for bytes4 in regs[-16:])
    ptx += "setp.ne.b32 p,w,0; vote.sync.any.pred p,p,-1; @!p bra.uni DONE;"
    ptx += "".join(step.format(*regs[i:-16:64]) for i in range(64))
    return tl.constexpr((ptx + "DONE:}", ",".join(kinds)))


STEP = "setp.le.s32 p,{2},{3}; selp.f32 {0},{0},0fFF800000,p;"
HIDE = unless_idle(STEP, "r" * 128)
CORRECT = unless_idle("mul.f32 {0},{0},{2};", "f" * 64)


@triton.jit
def hide(s, key, last, work, PTX: tl.constexpr):
    """-inf for keys after the last that a row sees; work: are there any?"""
    if not PTX:
        return tl.where((key > last) & work, LOWEST, s)
    args = s, key, last, work.to(tl.int8)
    return tl.inline_asm_elementwise(
        HIDE[0], HIDE[1], args, tl.float32, is_pure=True, pack=64
    )


@triton.jit
def correct(acc, alpha, PTX: tl.constexpr):
    """acc * alpha, where alpha is 1 nearly always."""
    if not PTX:
        return acc * alpha
    args = acc, alpha, (alpha != 1).to(tl.int8)
    return tl.inline_asm_elementwise(
        CORRECT[0], CORRECT[1], args, tl.float32, is_pure=True, pack=64
    )


@triton.jit
def specialised_kernel(
    q_ptr, k_desc, v_desc, out_ptr, all_heads, heads, group, M, N, D,
    stride_q, stride_ob, stride_oh, stride_om, stride_od, scale,
    CAUSAL: tl.constexpr, PTX: tl.constexpr, SMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid, tiles = tl.program_id(0), tl.cdiv(M, BLOCK_M)
    stride_q = tl.cast(stride_q, tl.int64)
    q_desc = tl.make_tensor_descriptor(
        q_ptr, [all_heads * M, D], [stride_q, 1], [BLOCK_M, BLOCK_D]
    )
    for at in tl.range(pid, tiles * all_heads, SMS, warp_specialize=True):
        first = at // (4 * tiles) * 4  # four heads at once
        width = tl.minimum(all_heads - first, 4)
        head = first + at % (4 * tiles) % width
        row = (tiles - 1 - at % (4 * tiles) // width) * BLOCK_M
        b, h = head // heads, head % heads
        q = q_desc.load([head * M + row, 0])
        offs_m, offs_n = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        last, end, full = offs_m * 0 + N - 1, N, N
        if CAUSAL:
            last = tl.minimum(offs_m - M + N, N - 1)
            end = tl.minimum(row - M + N + BLOCK_M, N)
            full = row - M + N + 1  # keys that its first row sees
        m = tl.full((BLOCK_M,), FLOOR, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for n in range(0, end, BLOCK_N):
            k = k_desc.load([b, h // group, n, 0]).reshape(BLOCK_N, BLOCK_D)
            s = tl.dot(q, k.T)
            key, cut = n + offs_n[None, :], n + BLOCK_N > full
            s = hide(s, key, last[:, None], cut, PTX)
            p, alpha, m, total = add_scores(s, m, total, scale, SLACK=8)
            v = v_desc.load([b, h // group, n, 0]).reshape(BLOCK_N, BLOCK_D)
            acc = correct(acc, alpha[:, None], PTX)
            acc = tl.dot(p.to(v.dtype), v, acc)
        strides = stride_ob, stride_oh, stride_om, stride_od
        store_rows(acc, total, out_ptr, b, h, offs_m, M, D, *strides, BLOCK_D)


# %%
# The wrapper
# -----------
#
# A descriptor holds heads whose numbers are neighbours, and whose rows begin at
# multiples of 16 bytes; others are copied first. Which kernel? The second on a
# Hopper GPU, with ``D`` from 65 to 128. Which tile? An H200's fastest; a
# smaller one without TMA, where pointers take registers, or without 227 KiB.

F16, BF16 = torch.float16, torch.bfloat16
DTYPES = [F16] + [BF16] * CUDA8  # interpreted, bfloat16 is wrong
WIDEST = 256 if CUDA8 or INTERPRET else 128
TILES = {  # BLOCK_D: BLOCK_M, BLOCK_N, num_warps, num_stages; if not large
    64: ((64, 128, 4, 2), (64, 32, 4, 2)),
    128: ((64, 64, 4, 3), (64, 32, 8, 2)),
    256: ((128, 32, 8, 2), (64, 32, 8, 1)),
}
SPECIALISED = 128, 128, 4, 2  # for Hopper, with BLOCK_D = 128


@functools.cache
def traits(device):
    """Is it a Hopper? How many SMs? Has it TMA and 227 KiB for a program?"""
    if device.type == "cpu":  # interpreted
        return False, 4, True
    gpu = torch.cuda.get_device_properties(device)
    major = 0 if torch.version.hip else gpu.major
    shared = getattr(gpu, "shared_memory_per_block_optin", 0)
    large = major >= 9 and shared >= 227 << 10
    return major == 9, gpu.multi_processor_count, large


def suited(t):
    """The tensor, or a copy that a descriptor can hold."""
    *far, near = t.stride()
    bits = functools.reduce(int.__or__, far) * t.itemsize | t.data_ptr()
    if near == 1 and bits % 16 == 0 and 0 < min(far) and max(far) < 2**39:
        return t
    *most, D = t.shape
    return t.new_empty(*most, D + -D % 8)[..., :D].copy_(t)


def launch(q, k, v, out, causal, scale=None, tile=None, ROUND=True, seen=None):
    """Start the kernel, arguments being checked; with a tile: the plain one."""
    (B, H, M, D), (_, heads, N, _) = q.shape, k.shape
    block = max(16, triton.next_power_of_2(D))
    hopper, sms, large = traits(q.device)
    special = hopper and block == 128 and tile is None
    tile = tile or TILES[max(64, block)][not large]
    BM, BN, warps, stages = SPECIALISED if special else tile
    q = suited(q.flatten(0, 2) if special else q)
    boxes = (suited(k), BN), (suited(v), BN), (q, BM)
    descs = [
        TensorDescriptor(t, t.shape, t.stride(), [1, 1, rows, block])
        for t, rows in boxes[: 2 if special else 3]
    ]
    scale = math.log2(math.e) * (D**-0.5 if scale is None else scale)
    tail = H, H // heads, M, N, D
    options = dict(BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=block, CAUSAL=bool(causal))
    options |= dict(num_warps=warps, num_stages=stages)
    programs = -(M // -BM) * B * H  # rounded up
    if special:
        new = lambda n, *_: torch.empty(n, dtype=torch.int8, device="cuda")
        triton.set_allocator(new)  # for the descriptor of queries
        args = q, *descs, out, B * H, *tail, q.stride(0), *out.stride()
        options |= dict(PTX=not INTERPRET, SMS=sms)
        specialised_kernel[(min(sms, programs),)](*args, scale, **options)
    else:
        args = descs[2], *descs[:2], out, seen, *tail, *out.stride(), scale
        attention_kernel[(programs,)](*args, ROUND=ROUND, **options)
    return out


def check(name, t, q):
    """Refuse a tensor that no kernel here can take beside ``q``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in DTYPES or t.dtype != q.dtype:
        raise TypeError(f"{name} has {t.dtype}; all need one dtype of {DTYPES}")
    if t.device != q.device or not (t.is_cuda or t.is_cpu and INTERPRET):
        raise ValueError(f"{name} is on {t.device}; all need one cuda device")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.dim() != 4 or t.shape[3] > WIDEST:
        raise ValueError(f"{name} has {t.shape}: not 4 sizes, D to {WIDEST}")
    if max(t.shape[:3].numel(), *t.shape) > 2**31 - 512:
        raise ValueError(f"{name} has {t.shape}: 2**31 rows or nearly")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def ends(t):
    """The addresses of the first number and of the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + last * t.itemsize


def attention(q, k, v, *, causal=False, scale=None, out=None):
    """Return ``softmax(scale * q @ k.mT) @ v`` of each head, in q's dtype.

    q: (batch, heads, length, D). k, v: the same, but of any other length, and
        of as many heads or a divisor. On one CUDA device: from capability 8.0
        on float16 or bfloat16, D to 256; below, float16, D to 128. Interpreted:
        CPU, float16. Any strides; aligned, contiguous heads are fastest.
    causal: query i sees keys up to i + keys - queries; where none, it gets 0.
    scale: a number above 1e-30, below 1e20; None is ``D ** -0.5``.
    out: like q, any strides that do not overlap, apart from q, k and v.
    Scaled scores must be below 2**27; sums are float32, and must fit, as must
    the result. inf and NaN may spread to other rows. A wrong type is a
    TypeError, the rest a ValueError.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check(name, t, q)
    (B, H, _, D), (_, heads, N, _) = q.shape, k.shape
    if not k.shape == v.shape == (B, heads, N, D):
        raise ValueError(f"q, k, v have {q.shape}, {k.shape}, {v.shape}")
    if H % heads if heads else H:
        raise ValueError(f"q has {H} heads, not a multiple of {heads}")
    factor = 1 if scale is None else scale
    if type(causal) is not bool or type(factor) not in (int, float):
        raise TypeError(f"causal={causal!r}, scale={scale!r}: a bool, a number")
    if not 1e-30 < factor < 1e20:
        raise ValueError(f"scale is {scale}, not between 1e-30 and 1e20")
    out = q.new_empty(q.shape) if out is None else out
    check("out", out, q)
    if out.shape != q.shape:
        raise ValueError(f"out has {out.shape}, q has {q.shape}")
    if out.numel() == 0:
        return out  # nothing to launch
    reach = 0
    for stride, n in sorted(zip(out.stride(), out.shape)):
        if n > 1 and stride <= reach:
            raise ValueError(f"out may overlap itself: strides {out.stride()}")
        reach += (n - 1) * stride
    for name, t in (("q", q), ("k", k), ("v", v)):
        (start, end), (first, last) = ends(out), ends(t)
        if t.numel() and max(start, first) <= min(end, last):
            raise ValueError(f"out lies among the bytes of {name}; copy {name}")
    if N == 0:
        return out.zero_()
    with torch.cuda.device_of(q):  # launch where the data is
        launch(q, k, v, out, causal, scale)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# NaN lie around all tensors. A weight is rounded to 16 bits before it meets its
# value, a result once more: together at most ``eps`` of the mean of absolute
# values, for ordinary weights; below ``2**-25`` of the largest, float16 may
# have 0. Three heads share keys; some lengths fill no tile, some leave queries
# without a key. ``pad = 7`` is not aligned for a descriptor.


def random(B, H, length, D, dtype=F16, pad=8):
    """Normal numbers amid NaN."""
    room = torch.full((B, H, length + 2, D + 2 * pad), torch.nan, device=DEVICE)
    return room.to(dtype)[:, :, 1:-1, pad : pad + D].normal_()


def verify(call, q, k, v, out, causal, rows=10**9):
    """All of a result must be there, and its last rows must be right."""
    out.fill_(torch.nan)
    got, q = call(), q[..., -rows:, :]
    exact, size = attention_ref(q, k, v, causal)
    off = (got[..., -rows:, :] - exact).abs()
    allowed = torch.finfo(q.dtype).eps * size + 1e-5
    if got.isnan().any() or (off > allowed).any():
        raise RuntimeError(f"attention is wrong by {off.max():.4f}: {call}")


cases = [(1, 1, 16), (5, 0, 16), (67, 200, 40), (200, 67, 64), (130, 130, 72)]
cases += [(1111, 1000, 128), (640, 1513, 80), (300, 300, 256)] * CUDA8
for (M, N, D), pad in itertools.product(cases, (8, 7)):
    dtype = DTYPES[pad % len(DTYPES)]
    q, out = (random(2, 6, M, D, dtype, pad) for _ in range(2))
    q *= 4  # maxima grow by more than 8, in late tiles too
    k, v = (random(2, 2, N, D, dtype, pad) for _ in range(2))
    for causal in (False, True):
        call = functools.partial(attention, q, k, v, causal=causal, out=out)
        verify(call, q, k, v, out, causal)
    if not out.fill_(torch.nan)._base.isnan().all():
        raise RuntimeError("written around out")
    print(f"{M} queries, {N} keys, D {D}, {dtype}, pad {pad}: right")

# %%
# How fast is it?
# ---------------
#
# 32,768 tokens in all; 16 heads of 128 or 32 of 64. Peers are the three kernels
# where their scores fit, and PyTorch's FlashAttention-2 and cuDNN.
# ``triton:plain`` is ``attention_kernel`` also where the wrapper takes the
# other. All take turns, call by call, at one clock; so does the ceiling, cuBLAS
# at 8192 cubed. FLOP of hidden scores do not count.


def record(provider, metric, values, **case):
    row = dict(zip(("low", "value", "high"), values))
    results.append(row | dict(provider=provider, metric=metric) | case)


def race(calls, rounds=25):
    """Milliseconds of each call, in turns: 20 %, 50 %, 80 %."""
    clocks = []
    for call in [*calls.values()] * rounds if CUDA8 else ():
        clocks += [[torch.cuda.Event(enable_timing=True) for _ in range(2)]]
        clocks[-1][0].record()
        call()
        clocks[-1][1].record()
    [end.synchronize() for _, end in clocks[-1:]]
    ms = [begin.elapsed_time(end) for begin, end in clocks]
    shots = [sorted(ms[i :: len(calls)]) for i in range(len(calls))]
    return {name: shot[5:20:7] for name, shot in zip(calls, shots) if shot}


def peer(backend, q, k, v, causal):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


PEERS = {"sdpa:flash": SDPBackend.FLASH_ATTENTION}
PEERS["sdpa:cudnn"] = SDPBackend.CUDNN_ATTENTION
free = torch.cuda.mem_get_info()[0] if CUDA8 else 0
tokens = 2**15 if free > 7e9 else 2**13
cases = itertools.product((128, 64), (False, True), (1024, 4096, 16384), [F16])
cases = [c for c in [*cases, (128, True, 4096, BF16)] if c[2] <= tokens]
side = 8192 if CUDA8 else 0
a, b, c = torch.randn(3, side, side, device=DEVICE).half()
for D, causal, N, dtype in cases if CUDA8 else ():
    B, H = tokens // N, 2048 // D
    q, k, v, out = torch.randn(4, B, H, N, D, device=DEVICE).to(dtype)
    calls = {"triton": lambda: attention(q, k, v, causal=causal, out=out)}
    tile = TILES[D][not traits(q.device)[2]]
    calls["triton:plain"] = lambda: launch(q, k, v, out, causal, tile=tile)
    if free > 10 * B * H * N * N:
        calls["torch"] = lambda: naive(q, k, v, causal)
    for name, backend in PEERS.items():
        try:
            peer(backend, q, k, v, causal)
            calls[name] = functools.partial(peer, backend, q, k, v, causal)
        except RuntimeError as error:
            print(f"Left out: {name}: {error}")
    for call in calls.values():
        verify(call, q, k, v, out, causal, 64)
    calls["ceiling"] = lambda: torch.mm(a, b, out=c)
    case = dict(D=D, causal=causal, N=N, dtype=str(dtype)[6:])
    print(f"\nD {D:3}{', causal' * causal}, N {N}, {dtype}, TFLOP/s", end=":")
    pairs = N * (N + 1) // 2 if causal else N * N
    for name, ms in race(calls).items():
        work = 2 * side**3 if name == "ceiling" else 4 * B * H * D * pairs
        record(name, "TFLOP/s", [work / t / 1e9 for t in ms[::-1]], **case)
        print(f" {name.split(':')[-1]} {work / ms[1] / 1e9:.0f}", end="")

LOOKS = {"ceiling": ("--", "#7f7f7f"), "torch": ("o:", "#7f7f7f")}
LOOKS |= {"sdpa:flash": ("v-", "#C9731E"), "sdpa:cudnn": ("^-", "#C9731E")}
LOOKS |= {"triton:plain": ("+-", "#2A9070"), "triton": ("s-", "#3B82C4")}


def draw(plot, **wanted):
    """A line for each provider against N."""
    for name, (style, color) in LOOKS.items():
        rows = [r for r in results if r == r | wanted | dict(provider=name)]
        line = [r["N"] for r in rows], [r["value"] for r in rows]
        plot(*line, style, base=2, color=color, label=name) if rows else None


size = dict(figsize=(7, 3), layout="constrained", sharey=True)
panels = plt.subplots(1, 4, **size)[1] if results else ()
for axes, (D, causal) in zip(panels, itertools.product((128, 64), (0, 1))):
    draw(axes.semilogx, D=D, causal=causal, dtype="float16")
    axes.set(title=f"D {D}" + ", causal" * causal, ylim=0, xlabel="N")
for axes in panels[:1]:
    names = axes.get_legend_handles_labels()
    plt.figlegend(*names, loc="outside upper center", ncols=6, fontsize=7)
plt.show()

# %%
# Figure. TFLOP/s in float16 against the number of queries and keys.
#
# FlashAttention-2 uses none of Hopper's new instructions: the wrapper has at
# least :measured:`attention min(triton/sdpa:flash) metric=TFLOP/s` of its
# speed; of cuDNN's, as a geometric mean, :measured:`attention
# geomean(triton/sdpa:cudnn) metric=TFLOP/s`, at worst :measured:`attention
# min(triton/sdpa:cudnn) metric=TFLOP/s`. What do groups of warps, larger tiles
# and jumps bring together? With heads of 128 and 16,384 keys,
# :measured:`attention triton/triton:plain metric=TFLOP/s D=128 causal=0 N=16384
# dtype=float16` of the plain kernel; with a causal mask :measured:`attention
# triton/triton:plain metric=TFLOP/s D=128 causal=1 N=16384 dtype=float16`. With
# heads of 64 the wrapper takes the plain kernel: several programs fit on an SM,
# and one calculates while another waits.
#
# What lies in memory
# -------------------
#
# How many bytes does a call allocate at most, its result included, for one
# batch of 16 heads of 128?

for N in [2**e for e in range(10, 17)] if results else ():
    q, k, v = torch.randn(3, 1, 16, N, 128, device=DEVICE).half()
    for name, call in {"triton": attention, "torch": naive}.items():
        if name == "triton" or 160 * N * N < free:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call(q, k, v)
            peak = torch.cuda.max_memory_allocated() - before
            record(name, "MB", [round(peak / 1e6)] * 3, N=N)
            print(f"N {N:6} {name:7} {peak / 1e6:8,.1f} MB")
if results:
    draw(plt.loglog, metric="MB")
    plt.gca().set(xlabel="N", ylabel="MB")
    plt.legend()
plt.show()

# %%
# Figure. Peak memory of a call against the number of queries and keys.
#
# With 16,384 keys the three kernels need :measured:`attention torch metric=MB
# N=16384` MB, and four times as much for twice the length. One kernel needs
# room for the result: :measured:`attention triton metric=MB N=16384` MB.
#
# Tiles that a causal mask visits
# -------------------------------
#
# The kernel stores 1 for each tile that it comes to, 2 if masked.

M, N, side = 1000, 1500, 64
q, out = torch.randn(2, 1, 1, M, 64, device=DEVICE).half()
k, v = torch.randn(2, 1, 1, N, 64, device=DEVICE).half()
tiles = triton.cdiv(M, side), triton.cdiv(N, side)
seen = torch.zeros(tiles, dtype=torch.int32, device=DEVICE)
launch(q, k, v, out, True, tile=(side, side, 4, 2), seen=seen)
for value, kind in enumerate(("never", "unmasked", "masked")):
    count = int((seen == value).sum())
    record("triton", "tiles", [count] * 3, M=M, N=N, kind=kind)
    print(f"{kind}: {count} tiles of {side} by {side}")
plt.figure(figsize=(7, 4), layout="constrained")
colors = ListedColormap(["none", "#3B82C4", "#D1495B"])
extent = 0, tiles[1] * side, tiles[0] * side, 0
plt.imshow(seen.cpu(), colors, extent=extent, interpolation="none")
plt.plot([N - M, N], [0, M], "--", color="#7f7f7f")
plt.gca().set(xlabel="key", ylabel="query")
plt.grid(False)
plt.show()

# %%
# Figure. Tiles, as the kernel recorded them: blue without a mask, red with one.
# Dashed: the last key that a query sees.
#
# :measured:`attention triton metric=tiles kind=never` tiles cost nothing, and
# only :measured:`attention triton metric=tiles kind=masked` of the others
# compare positions.
#
# Two right, one wrong
# --------------------
#
# Where does the loop without a mask end? All rows see the keys before
# ``row + N - M``: an obvious bound, and right while it is a multiple of
# ``BLOCK_N``. If not, the last step passes it, over keys that not every row may
# see; and the masked loop counts some of them again. ``ROUND`` rounds it down.
# With and without:

sizes = (8, 32, 4096, 64) if free > 7e9 else (1, 1, 256, 64)
q, k, v, out = torch.randn(4, *sizes, device=DEVICE).half()
exact, _ = attention_ref(*(t[:1, :1] for t in (q, k, v)), True)
shapes = (64, 64), (128, 64), (64, 128)
for (BM, BN), ROUND in itertools.product(shapes, (True, False)):
    tile = BM, BN, 4, 2
    call = functools.partial(launch, q, k, v, out, True, None, tile, ROUND)
    off = float(f"{(call()[:1, :1] - exact).abs().max():.2g}")
    case = dict(BLOCK_M=BM, BLOCK_N=BN, ROUND=ROUND)
    record("triton", "error", [off] * 3, **case)
    print(f"{BM:3} x {BN:3}, ROUND {ROUND:1}: error {off:.4f}", end="")
    for ms in race({"": call}).values():
        record("triton", "us", [1e3 * t for t in ms], **case)
        print(f", {1e3 * ms[1]:.0f} us", end="")
    print()

# %%
# Without ``ROUND`` two tiles are still right, since ``row`` is a multiple of
# their ``BLOCK_N``. The third is off by :measured:`attention triton
# metric=error BLOCK_M=64 BLOCK_N=128 ROUND=0`. Here it is slower, too:
# :measured:`attention triton metric=us BLOCK_M=64 BLOCK_N=128 ROUND=0`, rounded
# :measured:`attention triton metric=us BLOCK_M=64 BLOCK_N=128 ROUND=1`. That is
# luck: a tuner sees times alone. So :lesson:`autotune` checks every
# configuration.
#
# .. admonition:: Takeaway
#
#    A maximum and a sum that are corrected on the way make one pass of three
#    kernels, and need memory for ``N`` numbers, not ``N`` squared.
#
# Exercises
# ---------
#
# - Let a query see only the last 256 of its keys. Which two bounds change?
# - Count the tiles in which a maximum grows, with ``SLACK`` 0 and 8.
# - Store each sum's logarithm, the maximum added; :lesson:`attention_backward`
#   needs it.
#
# Reading
# -------
#
# - FlashAttention-3, the paper (2024): https://arxiv.org/abs/2407.08608
