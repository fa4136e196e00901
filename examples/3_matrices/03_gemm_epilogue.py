r"""
Epilogue: bias, activation, residual in the product
===================================================

A layer of a language model is a product and what is done with it: a bias, an
activation, a residual. You do all of it before the product leaves the
registers, and see when that pays.

- Which data does one program own? Tiles of the output, one after the other.
- How does it move? Inputs come by descriptor, ahead of time; results go once.
- What limits the speed? The product, or for few rows the bytes of the weight.
"""

import os
import warnings
from functools import lru_cache, partial
from itertools import product
from statistics import quantiles

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
DTYPES = [torch.float16] + [torch.bfloat16] * (CAPABILITY >= (8, 0))
gpu, results = DEVICE == "cuda", []
warnings.filterwarnings("ignore", module="torch._inductor|triton.runtime")
torch.manual_seed(0)
if len(DTYPES) < 2:
    print("Left out:", "bfloat16" if gpu else "no GPU: bfloat16, speed")

# %%
# Count first
# -----------
#
# Eager PyTorch runs a kernel for the product with its bias, one for the
# activation, one for the residual. A kernel less saves ``4 * M * N`` bytes in
# 16 bits, read and written. Say the memory moves 4 TB/s, and Tensor Cores do
# 700 TFLOP/s. Then the time saved, over that of the product, is:

F = torch.nn.functional
ACTS = {None: lambda y: y, "relu": torch.relu, "silu": F.silu}
ACTS |= {"gelu_tanh": partial(F.gelu, approximate="tanh")}


def eager(x, weight, bias=None, activation=None, residual=None):
    y = ACTS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


def linear_act_ref(*arguments):
    """``activation(x @ weight.T + bias) + residual`` in float64."""
    return eager(*(t.double() if torch.is_tensor(t) else t for t in arguments))


LAYERS = {"up": (14336, 4096, "gelu_tanh", False)}  # N, K, act, residual?
LAYERS |= {"down": (4096, 14336, None, True)}
print("layer     M   GFLOP  saved MB  gain")
for (op, (N, K, *_)), M in product(LAYERS.items(), (1, 64, 512, 4096)):
    flop, saved = 2 * M * N * K, 4 * M * N
    gain = saved / 4e12 / max(flop / 7e14, 2 * N * K / 4e12)
    print(f"{op:5} {M:5} {flop / 1e9:7.1f} {saved / 1e6:9.2f} {gain:5.1%}")

# %%
# These are the layers of an MLP of a model of 8 billion parameters. There is
# little to win: up, from 4096 numbers to 14336, one twelfth by this count;
# down, where each result costs 3.5 times the work, a fortieth. A product that
# much slower than the library's loses it. (PyTorch loses more than this count,
# below.)
#
# Who owns what
# -------------
#
# One or two programs for each SM take tile after tile, if tiles are large.
# Those at work together should share data in L2: the order fills groups of rows
# (2 in the figure, 8 in the kernel), column by column.

order = torch.empty(3, 4, dtype=int)
for t in range(12):
    top, tall = (0, 2) if t < 8 else (2, 1)  # rows of a group
    order[top + t % 8 % tall, t % 8 // tall] = t
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.imshow(order % 4 == 1, cmap="Blues", vmax=2)
for i, j in product(range(3), range(4)):
    axes.text(j, i, order[i, j].item())
axes.set(xlabel="weight.T and bias", ylabel="rows of x", xticks=[], yticks=[])
plt.show()

# %%
# Figure. The 12 tiles of an output, in their order. Program 1 of 4 owns tiles
# 1, 5 and 9. For each it reads a strip of ``x`` and one of ``weight.T``, part
# of the bias, and the same tile of the residual.
#
# The kernel
# ----------
#
# ``x`` and ``w`` are *tensor descriptors*: address, shape, strides, and the
# shape of a tile. Hopper's copy engine (TMA) fetches tiles by them, and zeros
# for what lies outside: no masks. What TMA cannot read comes as a pointer
# (``TMA`` is false). For large tiles the outer loop is *flattened*, made one
# with the inner: so the loads of the next tile are under way during the
# epilogue.


@triton.jit
def linear_act_kernel(
    x, w, bias_ptr, res_ptr, out_ptr, M, N, K,
    stride_xm, stride_xk, stride_wn, stride_wk, stride_b,
    stride_rm, stride_rn, stride_om, stride_on,
    ACT: tl.constexpr, TMA: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    HALVES: tl.constexpr = 2 if BLOCK_M * BLOCK_N >= 16384 else 1  # registers
    PART: tl.constexpr = BLOCK_N // HALVES
    first, step = tl.program_id(0), tl.num_programs(0)
    for t in tl.range(first, rows * cols, step, flatten=FLAT):
        top = t // (8 * cols) * 8
        tall = min(rows - top, 8)
        m = (top + t % (8 * cols) % tall) * BLOCK_M
        n = t % (8 * cols) // tall * BLOCK_N
        offs_m = m + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if TMA:
                a, b = x.load([m, k]), w.load([n, k])
            else:
                ks = k + tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
                ns = n + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
                mask_a, mask_b = (offs_m < M) & (ks < K), (ns < N) & (ks < K)
                a = tl.load(x + offs_m * stride_xm + ks * stride_xk, mask_a, 0)
                b = tl.load(w + ns * stride_wn + ks * stride_wk, mask_b, 0)
            acc = tl.dot(a, b.T, acc)
        halves = acc, acc
        if HALVES == 2:
            halves = acc.reshape(BLOCK_M, 2, PART).permute(0, 2, 1).split()
        for i in tl.static_range(HALVES):
            y = halves[i]
            offs_n = n + i * PART + tl.arange(0, PART).to(tl.int64)[None, :]
            mask = (offs_m < M) & (offs_n < N)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + offs_n * stride_b, offs_n < N, 0.0)
                y += bias.to(tl.float32)
            if ACT == "gelu_tanh":
                y /= 1 + tl.exp2(y * (-2.302208198 - 0.1029432397 * y * y))
            elif ACT == "silu":
                y /= 1 + tl.exp2(y * -1.4426950408889634)
            elif ACT == "relu":
                y = tl.where(y < 0, 0.0, y)  # NaN is not below 0 and stays
            if res_ptr is not None:
                res = res_ptr + offs_m * stride_rm + offs_n * stride_rn
                y += tl.load(res, mask, 0.0).to(tl.float32)
            to = out_ptr + offs_m * stride_om + offs_n * stride_on
            tl.store(to, y.to(out_ptr.dtype.element_ty), mask)


# %%
# GELU by ``tanh`` needs no ``tanh``: with ``u = sqrt(2 / pi) * (y + 0.044715 *
# y**3)`` it is ``y / (1 + exp(-2 * u))``, in powers of 2 in the kernel. ReLU
# keeps NaN, as PyTorch's does: a NaN turned into 0 would be hidden.
#
# The wrapper
# -----------
#
# A large tile uses what it loads more often; the last ones may leave SMs idle.
# So each has a speed, timed on an H200, and the rule counts rounds. With an
# activation, two programs of the second tile on an SM beat one of the first:
# one multiplies while the other ends.

TILES = [  # BLOCK_M, N, K, num_warps, num_stages, programs on an SM, speed
    (128, 256, 64, 8, 3, 1, 1.0), (128, 128, 64, 4, 3, 2, 0.98),
    (128, 128, 64, 4, 5, 1, 0.93), (64, 128, 128, 4, 4, 1, 0.75),
    (64, 64, 128, 4, 6, 1, 0.6), (64, 32, 256, 4, 4, 1, 0.4),
    (32, 128, 128, 8, 4, 1, 0.45), (32, 32, 256, 4, 5, 1, 0.3),
    (16, 128, 128, 4, 4, 1, 0.3), (16, 32, 256, 4, 6, 1, 0.2),
]  # fmt: skip
ODD = 64, 64, 64, 8, 3  # where TMA cannot read an input


def check(name, t, x, *shape):
    """Refuse a tensor that does not fit x, or not the shape (None: any)."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in DTYPES or t.dtype != x.dtype:
        said = f"{name} has {t.dtype}, x has {x.dtype}"
        raise TypeError(f"{said}; supported here: {DTYPES}")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if not (t.is_cuda or t.is_cpu and INTERPRET):
        raise ValueError(f"{name} is on {t.device}; the kernel runs on cuda")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    fits = [s in (None, n) and n < 2**31 - 512 for n, s in zip(t.shape, shape)]
    if t.dim() != len(shape) or not all(fits):
        raise ValueError(f"{name} has {tuple(t.shape)}, needed: {shape}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def ends(t):
    """The address of the first byte, and that after the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize


def describe(t, *block):
    """A descriptor of t for tiles of a shape; None where TMA cannot read t."""
    cols = t.shape[1]
    pitch = t.stride(0) if len(t) > 1 else cols
    if t.numel() and t.stride(1) == 1 and pitch >= cols:
        if (t.data_ptr() | pitch * t.itemsize | cols * t.itemsize) % 16 == 0:
            return TensorDescriptor(t, [*t.shape], [pitch, 1], [*block])


@lru_cache
def pick_tile(M, N, act, device):
    """BLOCK_M, N, K, warps, stages, programs at once, and whether by TMA."""
    if device.type == "cpu":
        return 64, 64, 64, 4, 3, 2, True
    gpu = torch.cuda.get_device_properties(device)
    tma = gpu.major >= 9 and not torch.version.hip
    sms, large = gpu.multi_processor_count, tma and gpu.major < 11

    def cost(tile):  # of all rounds
        BM, BN, *_, per_sm, speed = tile
        tiles = triton.cdiv(M, BM) * triton.cdiv(N, BN)
        return triton.cdiv(tiles, sms * per_sm) * per_sm * BM * BN / speed

    first = int(bool(act)) if large else 2  # by shared memory
    BM, BN, BK, warps, stages, per_sm, _ = min(TILES[first:], key=cost)
    if first == 2:
        BK, warps = 64, 8 if BM * BN == 16384 else 4
    room = getattr(gpu, "shared_memory_per_block_optin", 2**16) // per_sm
    room = (room - BM * BN) // (2 * (BM + BN) * BK)
    return BM, BN, BK, warps, max(1, min(stages, room)), sms * per_sm, tma


def launch(x, w, bias, res, out, act, tile):
    """Start as many programs as run at once, or one for each small tile."""
    (M, K), N, (BM, BN, BK, warps, stages, most, tma) = x.shape, len(w), tile
    inputs = (describe(x, BM, BK), describe(w, BN, BK)) if tma else (x, w)
    if None in inputs:
        inputs, tma, (BM, BN, BK, warps, stages) = (x, w), False, ODD
    strides = [*x.stride(), *w.stride(), 0 if bias is None else bias.stride(0)]
    strides += [*((0, 0) if res is None else res.stride()), *out.stride()]
    tiles, flat = triton.cdiv(M, BM) * triton.cdiv(N, BN), tma and BM == 128
    constants = act, tma, flat, BM, BN, BK
    options = dict(num_warps=warps, num_stages=stages)
    run = linear_act_kernel[(min(tiles, most) if flat else tiles,)]
    run(*inputs, bias, res, out, M, N, K, *strides, *constants, **options)


def linear_act(x, weight, bias=None, activation=None, residual=None, out=None):
    """Return ``activation(x @ weight.T + bias) + residual``.

    All of it is calculated in float32 and rounded once, to the dtype of x.
    x, weight: (M, K), (N, K), any sizes and strides, one CUDA device, float16
        or bfloat16. Interpreted: on the CPU, only float16.
    bias, residual: None, or (N,) and (M, N); any strides, dtype as x.
    activation: None, "gelu_tanh", "silu" or "relu", which keeps NaN.
    out: where to write, (M, N), dtype as x, any strides that do not overlap;
        may be the residual itself, else it lies apart from all inputs.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("x", x, x, None, None)
    check("weight", weight, x, None, x.shape[1])
    if activation not in ACTS:
        raise ValueError(f"activation is {activation!r}, not of {[*ACTS]}")
    M, N = len(x), len(weight)
    if out is None:
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    for name, t in dict(bias=bias, residual=residual, out=out).items():
        if t is not None:
            check(name, t, x, *([N] if name == "bias" else [M, N]))
    if out.numel() == 0:
        return out  # nothing to launch
    reach, (start, end) = 0, ends(out)
    for stride, n in sorted(zip(out.stride(), out.shape)):
        if n > 1 and stride <= reach:
            raise ValueError(f"out may overlap itself: strides {out.stride()}")
        reach += stride * (n - 1)
    inputs = dict(x=x, weight=weight, bias=bias, residual=residual)
    for name, t in inputs.items():
        first, last = (0, 0) if t is None or t.numel() == 0 else ends(t)
        same = (name, first) == ("residual", start)  # read before it is written
        same = same and t.stride() == out.stride()
        if max(start, first) < min(end, last) and not same:
            raise ValueError(f"out lies among the bytes of {name}; copy {name}")
    with torch.cuda.device_of(x):  # launch where the data is
        tile = pick_tile(M, N, activation, x.device)
        launch(x, weight, bias, residual, out, activation, tile)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# Inputs are windows with NaN around, ``out`` is one among 7s. Allowed are one
# rounding, and the error of a float32 sum of ``K`` products.


def window(rows, cols, dtype, edge, fill=torch.nan):
    """Random numbers amid ``fill``."""
    pitch = triton.cdiv(cols + 2 * edge, 8) * 8 + edge % 2
    room = torch.full((rows + 2, pitch), fill, device=DEVICE, dtype=dtype)
    values = torch.randn(rows, cols, device=DEVICE) * 0.6
    return room[1:-1, edge : edge + cols].copy_(values)


def error(out, x, weight, *rest):
    """The largest error of out, in units of what is allowed."""
    exact, limits = linear_act_ref(x, weight, *rest), torch.finfo(out.dtype)
    bound = linear_act_ref(x.abs(), weight.abs()) * (x.shape[1] + 8) * 2**-22
    bound += exact.abs() * (limits.eps / 2 + 2**-18) + limits.tiny * limits.eps
    return ((out - exact).abs() / bound).nan_to_num(torch.inf).max().item()


shapes = [(0, 5, 3), (5, 7, 0), (1, 33, 24), (64, 64, 64), (65, 130, 104)]
shapes = shapes[1:] + [(2050, 2056, 520)] if gpu else shapes * 9
for dtype, (i, (M, N, K)) in product(DTYPES, enumerate(shapes)):
    act, first, second = [*ACTS][i % 4], 16 + i // 4 % 2, 16 + i % 2
    x, w = window(M, K, dtype, first), window(N, K, dtype, first)
    bias = window(N, 1, dtype, second)[:, 0] if i % 3 else None
    res = window(M, N, dtype, second) if i % 2 else None
    out = window(M, N, dtype, second, 7).fill_(7)
    linear_act(x, w, bias, act, res, out)
    wrong = out.numel() and error(out, x, w, bias, act, res) > 1
    if wrong or not (out.fill_(7)._base == 7).all():
        raise RuntimeError(f"wrong: {dtype} {act} {M, N, K} {first, second}")
print(f"right {len(shapes)} times: {DTYPES}")

# %%
# How fast is it?
# ---------------
#
# Beside PyTorch and ``torch.compile`` is the product alone, by cuBLAS and by
# our kernel. A CUDA graph replays four layers, each with a weight of its own:
# none is in L2. At the GPU's limit of power, short turns give all the same
# clock.

cases = [*product((1, 16, 64, 128, 256), DTYPES[1:], LAYERS)]
cases += product((512, 1024, 2048, 4096), DTYPES[1:], LAYERS)
cases += product((512, 4096), DTYPES[:1], LAYERS)
for M, dtype, op in cases * gpu:
    N, K, act, add = LAYERS[op]
    shapes = (M, K), (4, N, K), (N,), *[(M, N)] * 3
    drawn = (torch.randn(s, device=DEVICE).to(dtype) for s in shapes)
    x, weights, bias, res, out, y = drawn
    weights = weights.mul_(K**-0.5).unbind()
    rest = bias, act, res if add else None
    torch.compiler.reset()  # compile for this shape alone
    compiled = torch.compile(eager, dynamic=False)
    calls = {
        "torch": lambda w: eager(x, w, *rest),
        "torch.compile": lambda w: compiled(x, w, *rest),
        "cublas": lambda w: torch.mm(x, w.t(), out=y),
        "triton": lambda w: linear_act(x, w, *rest, out=out),
    }
    if M >= 512:
        calls["triton:product"] = lambda w: linear_act(x, w, out=y)
    out.fill_(torch.nan)
    got, w = calls["triton"](weights[0])[-64:], weights[0]
    if error(got, x[-64:], w, bias, act, res[-64:] if add else None) > 1:
        raise RuntimeError(f"wrong: {op} {M} {dtype}")
    case = dict(op=op, M=M, N=N, K=K, dtype=str(dtype)[6:])
    graphs, times = {}, {provider: [] for provider in calls}
    for provider, call in calls.items():
        call(weights[0])  # compiled before it is captured
        graphs[provider] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[provider]):
            for w in weights:
                call(w)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for provider, graph in [*graphs.items()] * 25:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times[provider].append(1e3 * start.elapsed_time(end) / len(weights))
    for provider, us in times.items():
        cuts = dict(zip(("low", "value", "high"), quantiles(us, n=10)[1::3]))
        results.append(case | cuts | dict(provider=provider, metric="us"))
        times[provider] = cuts["value"]
    print(*case.values(), *(f"{p} {us:.1f}" for p, us in times.items()))
    del graph, graphs
looks = {"torch": ("o-", "#7f7f7f"), "torch.compile": ("^-", "#A56CC1")}
looks |= {"triton:product": ("v-", "#2A9070"), "triton": ("s-", "#3B82C4")}
_, panels = plt.subplots(1, 2, sharey=True, figsize=(7, 3.2), layout="tight")
for axes, op in zip(panels, LAYERS):
    rows = [r for r in results if r == r | dict(op=op, dtype="bfloat16")]
    base = {r["M"]: r["value"] for r in rows if r["provider"] == "cublas"}
    for provider, (style, color) in looks.items():
        line = {r["M"]: r["value"] for r in rows if r["provider"] == provider}
        share = [us / base[M] for M, us in line.items()]
        axes.plot([*line], share, style, color=color, label=provider)
    axes.axhline(1, color="#C9731E", label="cublas")
    axes.set(xscale="log", xlim=(0.8, 5000), xlabel="M", title=op)
panels[0].set(ylabel="time / cublas")
panels[0].legend(loc="upper left", fontsize="x-small")
plt.show()

# %%
# Figure. Time in bfloat16 over the time of the product alone by cuBLAS, against
# the number of rows. Left: up, with bias and GELU. Right: down, with bias and
# residual. ``triton:product`` is our kernel with nothing after the product.
#
# Up at 4096 rows, PyTorch takes :measured:`gemm_epilogue torch metric=us op=up
# M=4096 dtype=bfloat16`, ``torch.compile`` :measured:`gemm_epilogue
# torch.compile metric=us op=up M=4096 dtype=bfloat16`: its GELU is a kernel of
# its own. Ours takes :measured:`gemm_epilogue triton metric=us op=up M=4096
# dtype=bfloat16`, its product alone :measured:`gemm_epilogue triton:product
# metric=us op=up M=4096 dtype=bfloat16`.
#
# From 512 rows up, ours is :measured:`gemm_epilogue
# geomean(triton/torch.compile) metric=us M>=512` as fast as ``torch.compile``
# by geometric mean, and :measured:`gemm_epilogue geomean(triton/torch)
# metric=us M>=512` as fast as PyTorch. The product of cuBLAS with a free
# epilogue would be :measured:`gemm_epilogue geomean(cublas/torch) metric=us
# M>=512` as fast. What follows the product takes a part of the difference, the
# product itself another: up at 512 rows its tiles fill 1.7 rounds and take two.
# From 16 rows up, the worst case against PyTorch is :measured:`gemm_epilogue
# min(triton/torch) metric=us M>=16`.
#
# With one row fusion can only save a launch. Up it does:
# :measured:`gemm_epilogue triton metric=us op=up M=1` against
# :measured:`gemm_epilogue torch metric=us op=up M=1`. Down, for the same 117 MB
# of weight, ours is slower: :measured:`gemm_epilogue triton metric=us op=down
# M=1` against :measured:`gemm_epilogue torch metric=us op=down M=1`.
#
# What a production kernel still needs
# ------------------------------------
#
# .. list-table::
#    :header-rows: 1
#
#    * - It needs
#      - Here
#    * - a tile for each shape and GPU
#      - a short list and a rule, timed on an H200; pointers where no TMA is
#    * - inputs that TMA cannot read
#      - pointers, right but not fast; make a padded copy, once
#    * - SMs that are busy to the end
#      - not here: share the last tiles along ``K`` (split-K, stream-K)
#    * - a cheap call
#      - not here: checks and descriptors cost CPU time; CUDA graphs hide it
#    * - the same bits each time
#      - yes, in a fixed order; another ``M`` may choose another tile
#    * - gradients
#      - refused: the backward pass needs ``y`` before the activation
#    * - 8 bits
#      - not here: multiply ``acc`` by the scales, before the bias
#
# .. admonition:: Takeaway
#
#    An epilogue saves a kernel and its bytes, a few per cent of a large
#    product. Match the library's product first, and round once, at the end.
#
# Exercises
# ---------
#
# - Write SwiGLU, ``silu(x @ gate.T) * (x @ up.T)``. Which tile holds two sums?
# - Return ``y`` before the activation, too. What does that cost?
#
# Reading
# -------
#
# - StarCoder 2, whose MLP has this form: https://arxiv.org/abs/2402.19173
