r"""
Fast matrix product: order, stages, instruction, tile
=====================================================

You take a kernel that is right and slow, and make it nearly as fast as the
vendor's library, in steps that have a name. Each step is measured alone.

- Which data does one program own? One tile of ``C``; the order says which.
- How does it move? Through L2 into shared memory, some steps ahead of its use.
- What limits the speed? Tensor Cores, if data is there when they want it.
"""

import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt
import torch

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
    print("Left out, no GPU from 2020 on: bfloat16, speed, counters, PTX")

# %%
# What it must cost
# -----------------
#
# ``2 * M * N * K`` FLOP, at the rate of Tensor Cores: the ceiling here is the
# best that cuBLAS reaches in the run (a kernel may pass it). A tile of ``m`` by
# ``n`` asks L2 for ``(m + n) * K`` numbers; what L2 does not hold comes from
# memory.

n = 8192
print(f"{n} cubed, float16: {2 * n**3:,} FLOP, {6 * n * n:,} bytes at least")
for m in (64, 128, 256):
    print(f"tiles {m:3} x {m:3}: L2 is asked for {4 * n**3 / m / 1e9:.1f} GB")

# %%
# Who works at the same time?
# ---------------------------
#
# ``C`` has 81 tiles, and 9 programs run at once. In row order they share one
# strip of ``A`` but need nine of ``B``. ``tile_of`` makes them form a square:
# it goes through ``GROUP`` rows of tiles column by column.


@triton.jit
def tile_of(pid, rows, cols, GROUP: tl.constexpr):
    """Row and column of a program's tile; GROUP = 1 is row order."""
    first = pid // (GROUP * cols) * GROUP
    height = min(rows - first, GROUP)  # the last group may be lower
    within = pid % (GROUP * cols)
    return first + within % height, within // height


def strips(rows, cols, group, wave):
    """For each wave of programs, their tiles' rows and columns."""
    tiles = [tile_of.fn(pid, rows, cols, group) for pid in range(rows * cols)]
    waves = [tiles[i : i + wave] for i in range(0, len(tiles), wave)]
    return [tuple(map(set, zip(*tiles))) for tiles in waves]


_, both = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
for axes, group in zip(both, (1, 3)):
    rows, cols = strips(9, 9, group, 9)[0]
    print(f"GROUP {group}: {len(rows)} + {len(cols)} strips of A and B")
    text = {tile_of.fn(pid, 9, 9, group): pid for pid in range(81)}
    text |= {(y, -1.3): "A" for y in rows} | {(-1.3, x): "B" for x in cols}
    for (y, x), label in text.items():
        color = "#3B82C499" if label in ("A", "B", *range(9)) else "none"
        axes.add_patch(plt.Rectangle((x, y), 1, 1, fc=color, ec="gray"))
        axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", size=8)
    axes.set(xlim=(-1.4, 9.1), ylim=(9.1, -1.4), title=f"GROUP = {group}")
    axes.axis("off")
plt.show()

# %%
# Figure. Tiles of ``C`` by program. Blue: the first nine, and what they read.
#
# Two kernels
# -----------
#
# The first takes any strides; its threads calculate addresses and masks. The
# second leaves addresses to the hardware. A *tensor descriptor* holds base,
# sizes, strides and the shape of a tile. From Hopper on, one thread asks the
# *Tensor Memory Accelerator* (TMA) for a tile, with zeros past the edge. Rows
# are contiguous; beginnings and lengths are multiples of 16 bytes, as a store
# fills up the last 16 bytes of a row, past its end. (The interpreter does not
# show that.)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), rows, cols, GROUP)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_m, mask_n = offs_m < M, offs_n < N
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step = tl.full((), BLOCK_K, tl.int64)  # times a stride, it may pass 2**31
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    mask_c = mask_m[:, None] & mask_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_c)


@triton.jit
def descriptor_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), rows, cols, GROUP)
    row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
    c_desc.store([row, col], acc.to(c_desc.dtype))


# %%
# The wrapper
# -----------
#
# The first kernel takes what does not suit TMA, and ``K = 0``. Which tile is
# best? Count waves: a nearly empty one takes as long as a full one. That is the
# area of a tile times a sum: ``K`` over its speed, and a cost of its ends.

F16, BF16 = torch.float16, torch.bfloat16
DTYPES = [F16] + [BF16] * CUDA8  # interpreted, bfloat16 is wrong
GROUP = 16
SMALL = 64, 64, 64, 4, 3  # BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
LARGE = 128, 256, 64, 8, 3
TILES = {  # relative speed, and what is outside of the loop, in steps of K
    "descriptors": {LARGE: (1.0, 250), (128, 128, 64, 4, 3): (0.94, 60)}
    | {(64, 128, 64, 4, 6): (0.75, 300), SMALL: (0.5, 60)},
    "pointers": {(128, 128, 64, 8, 3): (1.0, 60), SMALL: (0.6, 60)},
    "single loads": {(64, 64, 64, 8, 3): (1.0, 0)},
}


@functools.cache
def traits(device):
    """Has it TMA? How many SMs? How much shared memory may a program have?"""
    if device.type == "cpu":  # interpreted
        return True, 4, 2**18
    gpu = torch.cuda.get_device_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", 2**16)
    tma = gpu.major >= 9 and not torch.version.hip
    return tma, gpu.multi_processor_count, shared


def need(tile):
    """Bytes of shared memory: for each stage, a tile of A and one of B."""
    BLOCK_M, BLOCK_N, BLOCK_K, _, stages = tile
    return stages * (BLOCK_M * BLOCK_K + BLOCK_K * BLOCK_N) * F16.itemsize


def suits(t):
    """Can a descriptor hold it?"""
    (apart, near), cols = t.stride(), t.shape[1]
    aligned = ((apart | cols) * t.itemsize | t.data_ptr()) % 16 == 0
    return aligned and near == 1 and 2**39 > apart >= cols > 0


@functools.lru_cache  # else it would take longer than the launch
def best(kind, M, K, N, device):
    """The tile of that kind that should be done first."""
    _, sms, shared = traits(device)

    def cost(tile):
        BM, BN, (speed, outside) = *tile[:2], TILES[kind][tile]
        waves = triton.cdiv(triton.cdiv(M, BM) * triton.cdiv(N, BN), sms)
        return waves * BM * BN * (K / speed + outside)

    return min((t for t in TILES[kind] if need(t) + 1024 <= shared), key=cost)


def pick(a, b, c):
    """The tile, and whether by descriptors."""
    described = traits(a.device)[0] and suits(a) and suits(b) and suits(c)
    wide = all(suits(t) or suits(t.t()) for t in (a, b))
    kind = "pointers" if wide else "single loads"
    kind = "descriptors" if described else kind
    return best(kind, *a.shape, b.shape[1], a.device), described


def launch(a, b, c, tile, described=False, group=GROUP):
    """Start one program for each tile of c."""
    (M, K), N, (BM, BN, BK, warps, stages) = a.shape, b.shape[1], tile
    grid = (-(M // -BM) * -(N // -BN),)  # rounded up
    options = dict(BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, GROUP=group)
    options |= dict(num_warps=warps, num_stages=stages)
    if not described:
        strides = *a.stride(), *b.stride(), *c.stride()
        return matmul_kernel[grid](a, b, c, M, N, K, *strides, **options)
    boxes = (a, [BM, BK]), (b, [BK, BN]), (c, [BM, BN])
    descs = [TensorDescriptor(t, t.shape, t.stride(), box) for t, box in boxes]
    return descriptor_kernel[grid](*descs, M, N, K, **options)


def check(name, t, a):
    """Refuse a tensor that no kernel here can take beside ``a``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in DTYPES or t.dtype != a.dtype:
        raise TypeError(f"{name} has {t.dtype}; all need one dtype of {DTYPES}")
    if t.device != a.device or not (t.is_cuda or t.is_cpu and INTERPRET):
        raise ValueError(f"{name} is on {t.device}; all need one cuda device")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.dim() != 2 or max(t.shape) > 2**31 - 512:
        raise ValueError(f"{name} has {t.shape}, not two sizes below 2**31-511")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def ends(t):
    """The addresses of the first number and of the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + last * t.itemsize


def matmul(a, b, out=None):
    """Return ``a @ b``, accumulated in float32, rounded once to its dtype.

    a, b: (M, K) and (K, N), any sizes and strides, on one CUDA device; both
        float16, or bfloat16 from compute capability 8.0 on. K = 0: zeros.
        Interpreted: CPU, only float16. Contiguous, aligned rows are fastest.
    out: (M, N), their dtype, any strides that do not overlap, apart from both.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("a", a, a)
    check("b", b, a)
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(f"a has {K} columns, b has {b.shape[0]} rows")
    out = a.new_empty(M, N) if out is None else out
    check("out", out, a)
    if out.shape != (M, N):
        raise ValueError(f"out has {out.shape}, not {(M, N)}")
    if out.numel() == 0:
        return out  # nothing to launch
    (near, n), (far, m) = sorted(zip(out.stride(), out.shape))
    if n > 1 and near == 0 or m > 1 and far <= near * (n - 1):
        raise ValueError(f"out may overlap itself: strides {out.stride()}")
    for name, t in (("a", a), ("b", b)):
        (start, end), (first, last) = ends(out), ends(t)
        if K and max(start, first) <= min(end, last):
            raise ValueError(f"out lies among the bytes of {name}; copy {name}")
    with torch.cuda.device_of(a):  # launch where the data is
        launch(a, b, out, *pick(a, b, out))
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# NaN lie around all. A result may differ from the float64 one by ``eps`` times
# the norms of its row and column: one rounding, and ``K`` up to 8192 sums in
# float32. Rows whose length is a multiple of 8 begin at 16 bytes; with ``pad =
# 7`` none do.


def random(M, N, K, dtype=F16, pad=0):
    """Two matrices and room for their product, each amid NaN."""
    found = []
    for m, n in (M, K), (K, N), (M, N):
        room = torch.full((m + 2 * pad, n + 2 * pad), torch.nan, device=DEVICE)
        found += [room.to(dtype)[pad : pad + m, pad : pad + n].normal_()]
    return found


def verify(call, a, b, c, rows=64):
    """Call: all of c must be written, and its last rows must be right."""
    c.fill_(torch.nan)
    kernel, limits = call(), torch.finfo(c.dtype)
    a, b = a[-rows:].double(), b.double()
    bound = limits.eps * a.norm(dim=1)[:, None] * b.norm(dim=0) + limits.tiny
    if c.isnan().any() or ((c[-rows:] - a @ b).abs() > bound).any():
        raise RuntimeError(f"a product is wrong: {call}")
    return kernel


cases = [(0, 5, 3), (5, 7, 0), (1, 1, 1), (127, 129, 65), (199, 304, 72)]
cases += [(4099, 8200, 520)] * (DEVICE == "cuda")
for (M, N, K), pad, dtype in itertools.product(cases, (8, 7), DTYPES):
    a, b, c = random(M, N, K, dtype, pad)
    verify(functools.partial(matmul, a, b, c), a, b, c, rows=M)
    if not c.fill_(torch.nan)._base.isnan().all():
        raise RuntimeError(f"{M, N, K, pad, dtype}: written around c")
    kind = "descriptors" if pick(a, b, c)[1] else "pointers"
    print(f"{M} x {N} x {K}, {dtype}, {kind}: right")

# %%
# The steps
# ---------
#
# Each step changes one thing; a new tile needs warps and stages of its own. The
# first version is small: a tile of 64 by 64 in row order, two warps, and one
# *stage*: load, wait, multiply. The last is ``matmul``. All are checked, then
# replayed from CUDA graphs in turns: so all have the same clock, at the limit
# of the GPU's power.

STEPS = {  # tile, num_warps and num_stages; GROUP
    "plain": ((64, 64, 64, 2, 1), 1),
    "order": ((64, 64, 64, 2, 1), GROUP),
    "stages": ((64, 64, 64, 2, 4), GROUP),
    "instruction": ((64, 64, 64, 4, 4), GROUP),
    "tile": (LARGE, GROUP),
}
SIZES = [(n, n, n) for n in (1024, 2048, 4096, 8192)] + [(16384, 8192, 1024)]
TMA, SMS, SHARED = traits(torch.empty(0, device=DEVICE).device)


def record(provider, metric, values, **case):
    row = dict(zip(("low", "value", "high"), values))
    results.append(row | dict(provider=provider, metric=metric) | case)


def race(calls, copies=1):
    """Microseconds of each call, in turns, with cold L2: 20 %, 50 %, 80 %."""
    if not calls:
        return {}  # as without a GPU
    graphs, flush = [], torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    for call in calls.values():
        call()  # compiled before it is captured
        graphs += [torch.cuda.CUDAGraph()]
        with torch.cuda.graph(graphs[-1]):
            [call() for _ in range(copies)]
    clocks = []
    for graph in graphs * 50:
        clocks += [[torch.cuda.Event(enable_timing=True) for _ in range(2)]]
        flush.zero_()
        clocks[-1][0].record()
        graph.replay()
        clocks[-1][1].record()
    torch.cuda.synchronize()
    us = [1e3 * begin.elapsed_time(end) / copies for begin, end in clocks]
    shots = [sorted(us[i :: len(graphs)]) for i in range(len(graphs))]
    return {name: shot[9:40:15] for name, shot in zip(calls, shots)}


fits = {name: how for name, how in STEPS.items() if need(how[0]) <= SHARED}
if len(fits) < len(STEPS):
    print("Left out, it takes too much shared memory:", *STEPS.keys() - fits)
roofs, cases = dict.fromkeys(DTYPES, 0), itertools.product(DTYPES, SIZES)
for dtype, (M, N, K) in cases if CUDA8 else ():
    a, b, c = random(M, N, K, dtype)
    calls = {"cublas": lambda: torch.mm(a, b, out=c)}
    for step, (tile, group) in fits.items() if dtype == F16 else ():
        run = functools.partial(launch, a, b, c, tile, group=group)
        calls[f"triton:{step}"] = run
    calls["triton"] = lambda: matmul(a, b, c)
    for call in calls.values():
        verify(call, a, b, c)
    print(f"{M} x {N} x {K}, {dtype}, TFLOP/s", end=": ")
    case = dict(M=M, N=N, K=K, dtype=str(dtype)[6:])
    for name, us in race(calls).items():
        rates = [2e-6 * M * N * K / t for t in us[::-1]]
        record(name, "TFLOP/s", rates, **case)
        print(f"{name.split(':')[-1]} {rates[1]:.0f}", end="  ")
        roofs[dtype] = max(roofs[dtype], rates[1] * (name == "cublas"))
    print()
for dtype, (M, N, K) in itertools.product(DTYPES, SIZES) if CUDA8 else ():
    case = dict(M=M, N=N, K=K, dtype=str(dtype)[6:])
    record("ceiling", "TFLOP/s", [roofs[dtype]] * 3, **case)

# %%
# At 4096 cubed in float16, cuBLAS has :measured:`gemm_fast cublas
# metric=TFLOP/s M=4096 dtype=float16`. ``plain`` waits for its loads:
# :measured:`gemm_fast triton:plain metric=TFLOP/s M=4096 dtype=float16`.
# ``order`` waits too: :measured:`gemm_fast triton:order metric=TFLOP/s M=4096
# dtype=float16`. ``stages`` has three loads under way: :measured:`gemm_fast
# triton:stages metric=TFLOP/s M=4096 dtype=float16`. ``instruction``, for four
# warps: :measured:`gemm_fast triton:instruction metric=TFLOP/s M=4096
# dtype=float16`. ``tile`` uses numbers two or four times as often:
# :measured:`gemm_fast triton:tile metric=TFLOP/s M=4096 dtype=float16`.
# Descriptors: :measured:`gemm_fast triton metric=TFLOP/s M=4096 dtype=float16`.
#
# At all sizes but 1024 that is, over cuBLAS, :measured:`gemm_fast
# geomean(triton/cublas) metric=TFLOP/s dtype=float16 N>=2048` as a geometric
# mean, at least :measured:`gemm_fast min(triton/cublas) metric=TFLOP/s
# dtype=float16 N>=2048`; in bfloat16 :measured:`gemm_fast
# geomean(triton/cublas) metric=TFLOP/s dtype=bfloat16 N>=2048` and
# :measured:`gemm_fast min(triton/cublas) metric=TFLOP/s dtype=bfloat16
# N>=2048`. At 1024 the large tile makes only 32 programs: :measured:`gemm_fast
# triton:tile metric=TFLOP/s M=1024 dtype=float16`; 64 by 128 has
# :measured:`gemm_fast triton metric=TFLOP/s M=1024 dtype=float16`.
#
# Order, counted
# --------------
#
# Take a long ``B``: 128 tiles of 256 columns. In the model, ``strips``, each SM
# has a program, and what a wave has in common comes from memory once. Nsight
# Compute, if there is one, counts bytes from L2 (``ncu_asked``) and from memory
# (``ncu_fetched``).

M, N, K = 4096, 32768, 4096
GROUPS = 1, 2, 4, 8, 16, 32
CHILD = """import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
a, b, c = (torch.ones(size, device="cuda").half() for size in {sizes})
GROUP = 16
{code}
for group in {GROUPS}:
    with torch.cuda.profiler.profile():
        launch(a, b, c, *{how}, group=group)"""
METRICS = {"l1tex__m_xbar2l1tex_read_bytes.sum": "ncu_asked"}
METRICS |= {"dram__bytes_read.sum": "ncu_fetched"}
command = "ncu --profile-from-start off --clock-control none --print-units base"
command += f" --csv --metrics {','.join(METRICS)} '{sys.executable}' "
times, said, counted = {}, "", {group: {} for group in GROUPS}
if CUDA8:
    a, b, c = random(M, N, K)
    how = pick(a, b, c)
    run = functools.partial(launch, a, b, c, *how)
    times = race({g: functools.partial(run, group=g) for g in GROUPS})
    parts = tile_of.fn, matmul_kernel.fn, descriptor_kernel.fn, launch
    text = dict(code="\n".join(map(inspect.getsource, parts)), how=how)
    text |= dict(sizes=[(M, K), (K, N), (M, N)], GROUPS=GROUPS)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        print(CHILD.format(**text), file=file, flush=True)
        said = subprocess.getoutput(command + file.name)
for line in [s for s in said.splitlines() if s.count('","') > 8]:
    number, *_, metric, _, value = line.strip('"').split('","')
    if metric in METRICS and value != "n/a":
        value = float(value.replace(",", "")) / 1e9
        counted[GROUPS[int(number)]][METRICS[metric]] = value
for group, us in times.items():
    rows, cols = M // how[0][0], N // how[0][1]
    waves = strips(rows, cols, group, SMS)
    read = sum(len(y) * M / rows + len(x) * N / cols for y, x in waves)
    sizes = dict(asked=cols * M + rows * N, fetched=read)
    row = {name: n * K * 2 / 1e9 for name, n in sizes.items()} | counted[group]
    record("triton", "us", us, GROUP=group)
    print(f"GROUP {group:2}: {us[1]:5.0f} us; GB:", end=" ")
    for name, value in row.items():
        record("triton", name, [round(value, 2)] * 3, GROUP=group)
        print(f"{name} {value:.2f}", end="  ")
    print("" if len(row) == 4 else "left out: Nsight Compute")

# %%
# At ``GROUP = 1`` a wave is about a row of tiles: it needs all of ``B``. With
# 16 it is nearly a square of numbers. The model is right: memory delivered
# :measured:`gemm_fast triton metric=ncu_fetched GROUP=1` GB, then
# :measured:`gemm_fast triton metric=ncu_fetched GROUP=16` GB. Time falls from
# :measured:`gemm_fast triton metric=us GROUP=1` to :measured:`gemm_fast triton
# metric=us GROUP=2` with two rows, and hardly further: memory is fast enough.
# What SMs ask of L2 is the same in any order; a larger tile asks less.
#
# Stages, and where they do nothing
# ---------------------------------
#
# With ``num_stages = s`` loads of later steps run while this step multiplies.
# That needs ``s * (BLOCK_M * BLOCK_K + BLOCK_K * BLOCK_N) * size`` bytes of
# shared memory. Does it? And what about vector addition, with no later step?


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    y = tl.load(y_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x + y, mask=offs < n)


n, side = (2**26, 4096) if CUDA8 else (1003, 8)
a, b, c = random(side, side, side)
x, y, out = torch.randn(3, n, device=DEVICE)
add = functools.partial(add_kernel[(triton.cdiv(n, 512),)], x, y, out, n, 512)
codes = set()
for stages in range(1, 6):
    tile = 128, 128, 64, 8, stages
    calls = {"add": functools.partial(add, num_stages=stages)}
    out.fill_(torch.nan)
    kernels = {"add": calls["add"]()}
    if need(tile) <= SHARED:
        calls["product"] = functools.partial(launch, a, b, c, tile)
        kernels["product"] = verify(calls["product"], a, b, c)
    if not torch.equal(out, x + y):
        raise RuntimeError(f"the addition is wrong with {stages} stages")
    print(f"{stages} stages: counted {need(tile):7,} bytes", end="")
    for op, us in race(calls if CUDA8 else {}).items():
        taken, case = kernels[op].metadata.shared, dict(op=op, stages=stages)
        record("triton", "us", us, **case)
        record("triton", "shared", [taken] * 3, **case)
        print(f"; {op}: {taken:7,} taken, {us[1]:5.1f} us", end="")
        codes |= {kernels["add"].asm.get("ptx")}
    print("" if "product" in calls else "; left out, it takes too much")
if CUDA8:
    print(f"Different codes of the addition: {len(codes)}")

# %%
# On this GPU the count is exact. The product, 4096 cubed in tiles of 128 by
# 128, takes :measured:`gemm_fast triton metric=us op=product stages=1` with one
# stage, then :measured:`gemm_fast triton metric=us op=product stages=2`,
# :measured:`gemm_fast triton metric=us op=product stages=3`, and with four
# :measured:`gemm_fast triton metric=us op=product stages=4`. Why is more not
# better? An SM has 228 KiB: room for two programs of 96 KiB, but for one of
# 128. The addition has no loop, so nothing can be loaded ahead: its code is the
# same five times.
#
# Which instruction, which tile?
# ------------------------------
#
# The compiler chooses the instruction of ``tl.dot`` by tile and warps; its PTX
# tells. ``mma.sync`` is done by one warp, which first brings both operands into
# registers. Hopper's ``wgmma`` is done by four warps, 64 rows at a time, from
# shared memory, while they do something else. All tiles: 4096 cubed, float16.

MMA = r"\b(wgmma|mma\.sync|tcgen05\.mma)[.\w:]*?(m\d+n\d+k\d+|kind)"
calls, said, heights = {}, {}, (32, 64, 128, 256)
for warps, BM, BN in itertools.product((4, 8), heights, (64, 128, 256)):
    tile = BM, BN, 64, warps, 3
    if CUDA8 and need(tile) + 1024 <= SHARED:
        calls[tile] = functools.partial(launch, a, b, c, tile, TMA)
        kernel = verify(calls[tile], a, b, c)
        found = re.search(MMA, kernel.asm.get("ptx", ""))
        said[tile] = " ".join(found.groups()) if found else "none found"
        said[tile] += f" {kernel.n_spills} spilled" * (kernel.n_spills > 0)
for tile, us in race(calls).items():
    rates = [2e-6 * 4096**3 / t for t in us[::-1]]
    case = dict(BLOCK_M=tile[0], BLOCK_N=tile[1], num_warps=tile[3])
    record("triton", "TFLOP/s", rates, note=said[tile], **case)
    record("ceiling", "TFLOP/s", [roofs[F16]] * 3, **case)
    sizes = f"{tile[0]:3} x {tile[1]:3}, {tile[3]} warps"
    print(f"{sizes}: {rates[1]:3.0f} TFLOP/s, {said[tile]}")

# %%
# ``m64n256k16`` reads ``(64 + 256) * 16`` numbers of 2 bytes for ``2 * 64 * 256
# * 16`` FLOP: 51 per byte of shared memory. ``n64`` has 32. So a wide tile
# mostly pays, while ``acc`` fits in registers: :measured:`gemm_fast triton
# metric=TFLOP/s BLOCK_M=128 BLOCK_N=256 num_warps=8`. On four warps a thread
# needs 256 registers for ``acc`` alone, may have 255, and they spill:
# :measured:`gemm_fast triton metric=TFLOP/s BLOCK_M=128 BLOCK_N=256
# num_warps=4`.
#
# What a launch costs
# -------------------
#
# From Python, a call is checked, described and launched. A graph skips Python;
# among 50 copies a launch overlaps with the copy before, and L2 holds all
# matrices. ``launch`` is ``matmul`` without checks, the tile chosen.

a, b, c = random(*(1024,) * 3 if CUDA8 else (8,) * 3)
calls = {"cublas": lambda: torch.mm(a, b, out=c)}
calls["triton"] = lambda: matmul(a, b, c)
calls["triton:launch"] = functools.partial(launch, a, b, c, *pick(a, b, c))
for name, call in calls.items() if CUDA8 else ():
    clocks = {f"graph_{n}": race({name: call}, n)[name] for n in (1, 50)}
    start = time.perf_counter()
    [call() for _ in range(1000)]
    torch.cuda.synchronize()
    clocks["python"] = [1e3 * (time.perf_counter() - start)] * 3
    for clock, us in clocks.items():
        record(name, "us", us, M=1024, clock=clock)
        print(f"{name} {clock:8}: {us[1]:5.1f} us")

# %%
# Alone in a graph it takes :measured:`gemm_fast triton metric=us M=1024
# clock=graph_1`, among 50 :measured:`gemm_fast triton metric=us M=1024
# clock=graph_50`; from Python :measured:`gemm_fast triton metric=us M=1024
# clock=python`, without checks :measured:`gemm_fast triton:launch metric=us
# M=1024 clock=python`, cuBLAS :measured:`gemm_fast cublas metric=us M=1024
# clock=python`. Put small products into a graph.
#
# .. admonition:: Takeaway
#
#    Order decides what memory must deliver, stages what is under way, the tile
#    and its warps which instruction runs and how often a number is used.
#
# Exercises
# ---------
#
# - Walk the columns of a group in turns down and up. Does the model fetch less?
# - Give a transposed ``b`` a descriptor: describe ``b.t()``, turn the tile.
#
# Reading
# -------
#
# - PTX: https://docs.nvidia.com/cuda/parallel-thread-execution/
# - Ends of rows: https://github.com/triton-lang/triton/issues/11583
