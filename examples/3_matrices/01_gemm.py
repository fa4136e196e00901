r"""
Matrix product: tiles, a loop over K, three masks
=================================================

You write ``C = A @ B`` for any size and any stride, and learn how exact it is:
in float32, in half precision, and in 8 bits.

- Which data does one program own? One tile of ``C``.
- How does it move? Tiles of ``A`` and ``B`` come in, step by step along ``K``.
- What limits the speed? Arithmetic, once the tiles are large enough.
"""

import inspect
import linecache
import os

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
results = []
if DEVICE == "cpu":
    print("Left out, no GPU: TF32, bfloat16, 8 bits, compiled sizes, speed")

# %%
# What it must cost
# -----------------
#
# Each of ``M * N`` results is a sum of ``K`` products: ``2 * M * N * K`` FLOP.
# At least ``(M * K + K * N + M * N) * size`` bytes move. For 4096 cubed in
# float16 that is over a thousand FLOP per byte: the bound is FLOP over the
# GPU's rate, if each number is used often. A program that owns a tile of ``m``
# by ``n`` loads ``m + n`` numbers for ``2 * m * n`` FLOP. Per byte, that is:


def gemm_ref(a, b):
    """``a @ b`` in float64, of the numbers that a and b hold."""
    return a.double() @ b.double()


for m, n in ((1, 1), (16, 16), (64, 64), (128, 256), (4096, 4096)):
    print(f"tile {m:4} x {n:4}: {m * n / (m + n):6.1f} FLOP per byte")

# %%
# Which tiles a program reads
# ---------------------------
#
# Take ``M, N, K = 24, 56, 40`` and tiles of 16: ``C`` has 2 rows of 4 tiles, so
# 8 programs run, 3 steps each. What does the last one read?

M, N, K = 24, 56, 40
_, movie = plt.subplots(1, 3, figsize=(7, 2.9), layout="constrained")
for k, axes in zip(range(0, K, 16), movie):
    tiles = [(0, 50, M, K, 16, k, "A"), (50, 0, K, N, k, 48, "B")]
    tiles += [(50, 50, M, N, 16, 48, "C")]
    for x, y, rows, cols, row, col, name in tiles:
        live = min(16, cols - col), min(16, rows - row)
        box, at = plt.Rectangle, (x + col, y + row)
        axes.add_patch(box(at, 16, 16, fc="#D1495B66", hatch="///"))
        axes.add_patch(box(at, *live, fc="#3B82C4"))
        axes.add_patch(box((x, y), cols, rows, fill=False, ec="gray"))
        axes.text(x + 2, y + 9, name)
    axes.set(xlim=(-1, 115), ylim=(83, -1), aspect="equal", title=f"k = {k}")
    axes.axis("off")
plt.show()

# %%
# Figure. The three steps of the last program: tiles of ``A`` and ``B`` that it
# reads (blue), and the tile of ``C`` that it writes. Hatched parts lie out of a
# matrix: below ``M``, right of ``N``, past ``K``.
#
# The kernel
# ----------
#
# ``tl.dot`` adds a product of tiles to ``acc``, in registers and float32. Why
# three masks? Those of ``M`` and ``N`` keep loads and stores off neighbours.
# That of ``K`` does more: positions past ``K`` take part in every sum, so they
# must be 0, in ``A`` *and* in ``B``: 0 times NaN is NaN.


@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    PRECISION: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    pid_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N)
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
        acc = tl.dot(a, b, acc, PRECISION, max_num_imprecise_acc=PROMOTE)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    mask_c = mask_m[:, None] & mask_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_c)


# %%
# The wrapper
# -----------
#
# Inputs may have any strides: a transposed view is another pair of numbers.
# ``out`` must be apart, as programs still read when others write. Unless told
# ``"ieee"``, ``tl.dot`` cuts float32 to TF32 on NVIDIA, with 10 bits after the
# point. The tile is large if loads are 16 bytes wide and most SMs get one;
# float32 in ``"ieee"`` keeps a small one.

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
WIDE = [F32, F16] + [BF16] * (CAPABILITY >= (8, 0))
DTYPES = WIDE + FP8 * (CAPABILITY >= (8, 9))  # none is right interpreted


def check(name, t, a, dtypes):
    """Refuse a tensor that the kernel cannot take beside ``a``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} has {t.dtype}; supported here: {dtypes}")
    if t.device != a.device:
        raise ValueError(f"{name} is on {t.device}, a is on {a.device}")
    if not (t.is_cuda or t.is_cpu and INTERPRET):
        raise ValueError(f"{name} is on {t.device}; the kernel runs on cuda")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.dim() != 2 or max(t.shape) > 2**31 - 512:
        raise ValueError(f"{name} has {t.shape}, not two sizes below 2**31-511")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def ends(t):
    """The address of the first byte, and that after the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize


def pick_tile(a, b, precision):
    """BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages."""
    size, wide = a.itemsize, a.is_cuda and (a.dtype, precision) != (F32, "ieee")
    for near, far, t in ((*sorted(t.stride()), t) for t in (a, b)):
        wide &= near == 1 and (far * size | t.data_ptr()) % 16 == 0
    if wide:
        gpu = torch.cuda.get_device_properties(a.device)
        BN = 256 if size == 2 and gpu.major in (9, 10) else 128
        BN = 64 if a.dtype == F32 and precision == "tf32x3" else BN
        tiles = triton.cdiv(len(a), 128) * triton.cdiv(b.shape[1], BN)
        if gpu.major >= 8 and 2 * tiles > gpu.multi_processor_count:
            return 128, BN, 128 // size, 8, 3
    return 64, 64, {4: 16, 2: 64, 1: 128}[size], 4, 3


def launch(kernel, a, b, c, tile, precision="ieee", promote=None):
    """Start one program for each tile of c."""
    (M, K), N, (BM, BN, BK, warps, stages) = a.shape, b.shape[1], tile
    strides = *a.stride(), *b.stride(), *c.stride()
    constants = precision, promote if a.itemsize == 1 else None, BM, BN, BK
    options = dict(num_warps=warps, num_stages=stages)
    run = kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)]
    return run(a, b, c, M, N, K, *strides, *constants, **options)


def gemm(a, b, out=None, out_dtype=None, input_precision="ieee", promote=128):
    """Return ``a @ b``, accumulated in float32, rounded once to its dtype.

    a, b: (M, K) and (K, N), any sizes and strides, one device and dtype of
        DTYPES. Interpreted: CPU, only float32 and float16. K = 0: zeros.
    out: where to write, (M, N), of WIDE, any strides that do not overlap. Else
        a new tensor of out_dtype, by default that of a, for 8 bits float32.
    input_precision: of float32: "ieee", "tf32x3" or "tf32".
    promote: 8-bit sums go to float32 after 32 or 128 products, or None: never;
        heeded on compute capability 9.0 alone.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("a", a, a, DTYPES)
    check("b", b, a, [a.dtype])
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(f"a has {K} columns, b has {b.shape[0]} rows")
    if input_precision not in ("ieee", "tf32x3", "tf32"):
        raise ValueError(f"input_precision: {input_precision!r} is unknown")
    if promote not in (None, 32, 128):
        raise ValueError(f"promote is {promote!r}, not 32, 128 or None")
    if out is None:
        dtype = out_dtype or (a.dtype if a.dtype in WIDE else F32)
        out = torch.empty(M, N, dtype=dtype, device=a.device)
    check("out", out, a, WIDE)
    if (out.shape, out.dtype) != ((M, N), out_dtype or out.dtype):
        raise ValueError(f"out is {out.shape}, {out.dtype}: not as asked")
    if out.numel() == 0:
        return out  # nothing to launch
    reach, (start, end) = 0, ends(out)
    for stride, n in sorted(zip(out.stride(), out.shape)):
        if n > 1 and stride <= reach:
            raise ValueError(f"out may overlap itself: strides {out.stride()}")
        reach += stride * (n - 1)
    for name, (first, last) in (("a", ends(a)), ("b", ends(b))):
        if K and max(start, first) < min(end, last):
            raise ValueError(f"out lies among the bytes of {name}; copy {name}")
    with torch.cuda.device_of(a):  # launch where the data is
        tile = pick_tile(a, b, input_precision)
        launch(gemm_kernel, a, b, out, tile, input_precision, promote)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# Inputs are windows with NaN around, ``out`` is one among 7s: a cell forgotten
# stays 7, one too many is no 7. The error allowed is ``K * 2**-23`` of the sum
# of ``abs(a) * abs(b)``, what TF32 and 8-bit sums lose, and one rounding.

KINDS = {  # dtype, input_precision, promote, what is lost
    "ieee": (F32, "ieee", 128, 0),
    "tf32x3": (F32, "tf32x3", 128, 2**-18),
    "tf32": (F32, "tf32", 128, 2**-9),
    "float16": (F16, "ieee", 128, 0),
    "bfloat16": (BF16, "ieee", 128, 0),
} | {f"e4m3,{n}": (FP8[0], "ieee", n, 2**-9) for n in (None, 128, 32)}


def window(rows, cols, dtype, step=1, fill=torch.nan):
    """Random numbers in the midst of a buffer, ``step`` apart."""
    room = torch.full((step * rows + 80, step * cols + 80), fill, device=DEVICE)
    view = room.to(dtype)[8:, 8:][: step * rows : step, : step * cols : step]
    return view.copy_(torch.randn(rows, cols, device=DEVICE))


def verdict(c, a, b, loss=0):
    """0 as before, 1 right, 2 wrong, 3 NaN, 4 missing, 5 around c."""
    exact, limits = gemm_ref(a, b), torch.finfo(c.dtype)
    sums = gemm_ref(a.double().abs(), b.double().abs())
    bound = sums * (a.shape[1] * 2**-23 + loss) + limits.tiny * limits.eps
    right = (c - exact).abs() <= bound + exact.abs() * limits.eps / 2
    state = torch.where(c._base == 7, 0, 5)
    inside = torch.where(c.isnan(), 3, torch.where(c == 7, 4, 2))
    view = state.as_strided(c.shape, c.stride(), c.storage_offset())
    view.copy_(inside.where(~right, 1))
    return state.flatten().bincount(minlength=6).tolist()[1:], state


kinds, cases = {}, [(5, 7, 0, 1), (1, 257, 3, 2), (127, 129, 65, 1)]
for name, (dtype, *how, loss) in KINDS.items():
    if dtype not in DTYPES:
        print(f"Left out: {name}, this device has no {dtype}")
        continue
    kinds[name] = dtype, *how
    for M, N, K, step in cases:
        a, b = window(M, K, dtype, step), window(N, K, dtype).t()
        c = window(M, N, WIDE[step - 1], step, fill=7).fill_(7)
        gemm(a, b, c, None, *how)
        counts, _ = verdict(c, a, b, loss)
        if counts != [M * N, 0, 0, 0, 0]:
            raise RuntimeError(f"{name} {M, N, K} is wrong: {counts}")
    print(f"{name:12} is right in {len(cases)} cases")

# %%
# A mask in the wrong place
# -------------------------
#
# What do mistakes look like? ``C`` is 24 by 56, with ``K = 40`` and tiles of
# 16. ``offs_m % M`` needs no mask when it loads. Does it when it stores?


def changed(edits):
    """The kernel with some of its text replaced."""
    text = inspect.getsource(gemm_kernel.fn)
    for old, new in edits.items():
        text = text.replace(old, new)
    name = f"<{edits}>"  # where Triton will look for the source
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    space = dict(triton=triton, tl=tl, __name__="changed")
    exec(compile(text, name, "exec"), space)
    return space["gemm_kernel"]


MN, TAIL = "offs_m < M, offs_n < N", "offs_k < K - k"
EDITS = {
    "as above": {},
    "M, N swapped": {MN: "offs_m < N, offs_n < M"},
    "M, K swapped": {MN: "offs_m < K, offs_n < N", TAIL: "offs_k < M - k"},
    "no K mask": {TAIL: "offs_k < BLOCK_K"},
    "K: only B": {"mask_m[:, None] & mask_k[None, :]": "mask_m[:, None]"},
    "% M": {
        "+ offs_m[:, None] * stride_am": "+ offs_m[:, None] % M * stride_am",
        MN: "offs_m < BLOCK_M * M, offs_n < N",
    },
}
COLORS = "none", "#3B82C4", "#D1495B", "#D1495B", "#D1495B55", "#D1495B"
cmap = plt.matplotlib.colors.ListedColormap(COLORS)
for i, (title, edits) in enumerate(EDITS.items()):
    a, b = window(24, 40, F32), window(40, 56, F32)
    c = window(24, 56, F32, fill=7).fill_(7)
    launch(changed(edits), a, b, c, (16, 16, 16, 4, 2))
    counts, state = verdict(c, a, b)
    print(f"{title:12} right, wrong, NaN, missing, around: {counts}")
    axes = plt.gcf().add_subplot(2, 3, i + 1, title=title, xticks=[], yticks=[])
    axes.imshow(state[:48, :80].cpu(), cmap, vmax=5, interpolation="none")
    axes.add_patch(plt.Rectangle((7.5, 7.5), 56, 24, fill=False, ec="gray"))
plt.show()

# %%
# Figure. ``C`` (framed) and what lies around it. Blue: right. Red: wrong, NaN
# or written outside. Pale: missing.
#
# No mistake gives an error. A square ``C`` hides that ``M`` and ``N`` are
# swapped. Unmasked, NaN past ``K`` ruins *every* result; zeros there would
# hide it. ``% M`` pads nothing: rows are stored again, below ``C``.
#
# How small may a tile be?
# ------------------------

for dtype in [dtype for dtype in (F16, FP8[0]) if dtype in DTYPES]:
    a, b = torch.ones(2, 16, 16, device=DEVICE).to(dtype)
    for BLOCK_K in (8, 16, 32):
        c = torch.zeros(16, 16, device=DEVICE)
        try:
            launch(gemm_kernel, a, b, c, (1, 1, BLOCK_K, 4, 1))
            said = "right" if (c == 16).all() else "WRONG"
        except Exception as error:
            said = str(error.__cause__ or error).splitlines()[-1]
        print(f"{dtype}, tile 1 x 1 x {BLOCK_K}: {said}")

# %%
# The interpreter takes any size. NVIDIA's compiler wants ``K >= 16``, or 32 for
# 8 bits, and is content with ``M = N = 1``, at the cost of a larger tile.
#
# How exact is it?
# ----------------
#
# Inputs are drawn from a normal distribution, results are float32. The error is
# the norm of all differences over that of the exact product: of the converted
# inputs in 8 bits, else of the inputs before conversion.

ks = [2**e for e in range(4, 17 if DEVICE == "cuda" else 10)]
_, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, (dtype, *how) in kinds.items():
    errors = []
    for k in ks:
        x = torch.randn(256, k, device=DEVICE)
        y = torch.randn(k, 256, device=DEVICE)
        a, b = x.to(dtype), y.to(dtype)
        exact = gemm_ref(a, b) if dtype in FP8 else gemm_ref(x, y)
        loss = (gemm(a, b, None, F32, *how) - exact).norm() / exact.norm()
        errors += [float(f"{loss:.2e}")]
        row = dict(provider="triton", metric="error", value=errors[-1])
        results.append(row | dict(M=256, N=256, K=k, kind=name))
    axes.loglog(ks, errors, ".--" if dtype in FP8 else ".-", label=name)
    print(f"{name:12}", *(f"{e:.0e}" for e in errors[::2]))
axes.set(xlabel="K", ylabel="error")
axes.legend(bbox_to_anchor=(1, 1))
plt.show()

# %%
# Figure. Relative error against ``K``. Dashed: 8 bits, by the number of
# products after which the sum moves to float32; ``None`` is never.
#
# ``ieee`` sums in float32, so it is not exact:
# :measured:`gemm triton metric=error K=65536 kind=ieee` at 65536. ``tf32x3``
# takes three products of TF32 for one, and adds in another order:
# :measured:`gemm triton metric=error K=65536 kind=tf32x3`. TF32 and 16 bits
# lose digits of the inputs, at any ``K``. Hopper's Tensor Cores keep fewer bits
# of an 8-bit sum than float32 has, and ``tl.dot`` leaves it at that:
# :measured:`gemm triton metric=error K=65536 kind=e4m3,None`. With
# ``max_num_imprecise_acc=128`` parts are added in float32:
# :measured:`gemm triton metric=error K=65536 kind=e4m3,128`, and with 32
# :measured:`gemm triton metric=error K=65536 kind=e4m3,32`.
#
# How fast is it?
# ---------------
#
# The peer is cuBLAS, taken in turns. For 8 bits and TF32 the columns of ``B``
# are contiguous, else its rows.

cases = [(n, "float16") for n in (1024, 4095, 4096, 8192)]
cases += [(4096, kind) for kind in kinds if kind != "float16"]
roofs, shown = {}, []
for n, name in cases * (DEVICE == "cuda"):
    dtype, *how = kinds[name]
    x, y = torch.randn(2, n, n, device=DEVICE).to(dtype)
    b = y.t() if dtype in FP8 or "tf32" in name else y
    c = torch.empty(n, n, device=DEVICE, dtype=BF16 if dtype in FP8 else dtype)
    one = torch.ones((), device=DEVICE)
    scaled = dict(out_dtype=BF16, use_fast_accum=how[1] is None)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    calls = {"triton": lambda: gemm(x, b, c, None, *how)}
    if dtype in FP8:
        calls["cublas"] = lambda: torch._scaled_mm(x, b, one, one, **scaled)
    elif name != "tf32x3":
        calls["cublas"] = lambda: torch.mm(x, b, out=c)
    shown += [dict(metric="TFLOP/s", M=n, N=n, K=n, kind=name)]
    times = {provider: [] for provider in calls}
    for provider, call in list(calls.items()) * 3:
        call()  # compiled before it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        bench = triton.testing.do_bench
        times[provider] += bench(graph.replay, 10, 30, return_mode="all")
    for provider, ms in times.items():
        rates = [2e-9 * n**3 / sorted(ms)[len(ms) * i // 10] for i in (8, 5, 2)]
        row = dict(zip(("low", "value", "high"), rates), provider=provider)
        results.append(shown[-1] | row)
        print(f"{n} {name:11} {provider:6} {rates[1]:6.1f} TFLOP/s")
    roofs[name] = max(rates[1], roofs.get(name, 0))
roofs["tf32x3"] = roofs.get("tf32", 0) / 3
for case in shown:
    results.append(case | {"provider": "ceiling", "value": roofs[case["kind"]]})

# %%
# At 4096 float16 reaches :measured:`gemm triton/cublas metric=TFLOP/s M=4096
# kind=float16` of cuBLAS, at 1024 :measured:`gemm triton/cublas metric=TFLOP/s
# M=1024 kind=float16`, where only the small tile gives most SMs a program. At
# 4095 rows are not aligned to 16 bytes: each element gets its own load, the
# tile is small, and :measured:`gemm triton metric=TFLOP/s M=4095` are left of
# :measured:`gemm triton metric=TFLOP/s M=4096 kind=float16`; cuBLAS falls as
# well. ``ieee`` runs on CUDA cores: :measured:`gemm triton metric=TFLOP/s
# kind=ieee`; ``tf32`` has :measured:`gemm triton metric=TFLOP/s kind=tf32`. In
# 8 bits, 128 costs speed: :measured:`gemm triton metric=TFLOP/s kind=e4m3,128`
# instead of :measured:`gemm triton metric=TFLOP/s kind=e4m3,None`.
#
# .. admonition:: Takeaway
#
#    A program owns a tile of ``C`` and walks along ``K``. Masks of ``M`` and
#    ``N`` protect neighbours, the mask of ``K`` protects every sum. Say which
#    precision you want: the defaults of ``tl.dot`` are not exact.
#
# Exercises
# ---------
#
# - Accumulate in float16. From which ``K`` on does a test notice?
# - Multiply a vector: ``M = 1``. What limits it now, and which share of the
#   arithmetic is wasted?
#
# Reading
# -------
#
# - Operators: https://triton-lang.org/main/python-api/triton.language.html
