r"""
A language model's operators, counted
=====================================

What does a language model spend its time on? You count the bytes and the
operations of each operator, predict its time from two rates of the GPU, and
measure it. For one of them you write the kernel: the cross-entropy of 128,256
logits, in one pass.

- Which data does one program own? One row of logits: the scores of one token.
- How does it move? Once into registers, tile by tile. One number goes back.
- What limits the speed? Reading, if maximum and sum share one pass.
"""

import os
import warnings
from itertools import product

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
free = torch.cuda.mem_get_info()[0] if gpu else 0
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)
HALF = torch.bfloat16 if CAPABILITY >= (8, 0) else torch.float16
F, CLOSE = torch.nn.functional, torch.testing.assert_close
results = []
warnings.filterwarnings("ignore", module="torch._inductor|triton.runtime")
torch.manual_seed(0)
if not gpu:
    print("Left out, no GPU: measured rates and times; bfloat16 in the kernel")

# %%
# What it must cost
# -----------------
#
# Llama 3 with 8 billion parameters has the shape below, by Table 3 of its paper
# and the ``config.json`` of its weights. A product takes two FLOP for each pair
# that it multiplies and adds, other operators a few for an element. *Prefill*
# reads a text of ``M`` tokens, *decode* adds a token to each of ``M`` texts of
# 4096 tokens. A byte of an int4 weight holds two numbers.

HIDDEN, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128
MLP, VOCAB, LAYERS, CONTEXT = 14336, 128_256, 32, 4096
layer = 2 * (HEADS + KV_HEADS) * DIM + 3 * MLP + 2  # rows of 4096 numbers
print(f"{(LAYERS * layer + 2 * VOCAB + 1) * HIDDEN:,} parameters")


def operators(M, prefill, device):
    """Yield name, function, FLOP, inputs of each operator."""
    H, U, V, D, d, both = HIDDEN, MLP, VOCAB, DIM, DIM // 2, HEADS + KV_HEADS
    new = lambda *shape: torch.randn(shape, dtype=HALF, device=device) / 4
    random = lambda high, *shape: torch.randint(high, shape, device=device)
    norm = lambda x, w: F.rms_norm(x, w.shape, w, 1e-5)
    turn = lambda a, b, c, s: torch.cat([a * c - b * s, b * c + a * s], -1)
    how = dict(is_causal=prefill, enable_gqa=True)
    attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, **how)
    swiglu = lambda x: F.silu(x[:, :U]) * x[:, U:]
    int4 = lambda w: torch.stack([w & 15, w >> 4], -1).to(HALF) - 8
    scaled = lambda w, s: (w.view(*s.shape, -1) * s[:, :, None]).flatten(1)
    loss = lambda x, target: F.cross_entropy(x, target, reduction="none")
    gemm = lambda N, K: (F.linear, 2 * M * N * K, new(M, K), new(N, K))
    pairs, kv = M * CONTEXT, (M, KV_HEADS, CONTEXT, D)
    if prefill:
        pairs, kv = M * (M + 1) // 2, (1, KV_HEADS, M, D)
    q, ids = new(kv[0], HEADS, M // kv[0], D), random(V, M)
    # fmt: off
    yield "embedding", F.embedding, 0, ids, new(V, H)
    yield "rms_norm", norm, 4 * M * H, new(M, H), new(H)
    yield "qkv", *gemm((both + KV_HEADS) * D, H)
    yield ("rotary", lambda x, *angle: turn(x[..., :d], x[..., d:], *angle),
           3 * M * both * D, new(M, both, D), new(M, 1, d), new(M, 1, d))
    yield "attention", attend, 4 * pairs * HEADS * D, q, new(*kv), new(*kv)
    yield "out", *gemm(H, HEADS * D)
    yield ("add_norm", lambda x, y, w: (x := x + y, norm(x, w)),
           5 * M * H, new(M, H), new(M, H), new(H))
    yield "gate_up", *gemm(2 * U, H)
    yield "swiglu", swiglu, 5 * M * U, new(M, 2 * U)
    yield "down", *gemm(H, U)
    yield ("gate_up_swiglu", lambda x, w: swiglu(F.linear(x, w)),
           *gemm(2 * U, H)[1:])
    yield ("int8_linear", lambda x, w, s: F.linear(x, w.to(HALF)) * s,
           2 * M * H * U, new(M, U), random(128, H, U).to(torch.int8), new(H))
    yield ("int4_linear", lambda x, w, s: F.linear(x, scaled(int4(w), s)),
           2 * M * H * U, new(M, U), random(256, H, U // 2).to(torch.uint8),
           new(H, U // 128))
    yield "head", *gemm(V, H)
    yield "softmax", lambda x: x.softmax(1), 5 * M * V, new(M, V)
    yield "cross_entropy", loss, 4 * M * V, new(M, V), ids
    # fmt: on


# %%
# Each input and output counts once. The *bound* is the largest of three times,
# which the table names: the bytes over the copy rate, the FLOP over the rate of
# a large product, one launch. Without a GPU, an H200's nominal rates stand in.


def bench(call):
    """Microseconds of a call in a CUDA graph: the median, 20 % and 80 %."""
    call()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        call()
    ms = triton.testing.do_bench(graph.replay, 5, 25, quantiles=[0.5, 0.2, 0.8])
    return dict(zip(("value", "low", "high"), (1e3 * t for t in ms)))


copy, matrix, launch = 4800, 989, 2.0  # GB/s, TFLOP/s, us
if gpu:
    src, dst = torch.randn(2, 2 ** (28 if free > 7e9 else 26), device=DEVICE)
    a, b = torch.randn(2, 8192, 8192, device=DEVICE).to(HALF)
    ms = triton.testing.do_bench(lambda: dst.copy_(src), return_mode="median")
    copy = 2e-6 * src.nbytes / ms
    matrix = 2e-6 * 8192**3 / bench(lambda: a @ b)["value"]
    launch = bench(lambda: dst[:1].add_(1))["value"]
    del src, dst, a, b
print(f"{gpu.name if gpu else 'H200, nominal'}: copy {copy:.0f} GB/s, ", end="")
print(f"product {matrix:.0f} TFLOP/s, launch {launch:.1f} us")

# %%
# Cross-entropy in one pass
# -------------------------
#
# The loss of a token is ``log(sum(exp(x))) - x[target]``: 2 bytes to read for a
# 16-bit logit. PyTorch reads them once or twice, writes the logarithms of all
# probabilities, and picks one in each row. :lesson:`softmax` has the way to one
# pass: keep the sum beside the largest value so far, and shrink it where a
# larger one comes. Here one number is wanted, so no second pass follows.
#
# The kernel
# ----------
#
# A tile has three dimensions: loads of a thread, threads, and neighbours that
# one load fetches. A thread keeps one ``m`` and one ``total`` for all that it
# sees, so ``STEPS * VECTOR`` values cost one exponential more. Threads meet
# once, after the loop. A target off the row is no address: NaN, or 0 for -100.


@triton.jit
def cross_entropy_kernel(
    x_ptr, target_ptr, out_ptr, N, stride_xm, stride_xn, stride_t, stride_o,
    STEPS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    LOWEST: tl.constexpr = -float("inf")
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    steps = tl.arange(0, STEPS).to(tl.int64)[:, None, None] * THREADS
    threads = tl.arange(0, THREADS)[None, :, None]
    offs = (steps + threads) * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    m, total = tl.full((THREADS,), LOWEST, dtype), tl.zeros((THREADS,), dtype)
    for start in range(0, tl.cast(N, tl.int64), STEPS * THREADS * VECTOR):
        cols = start + offs
        x = tl.load(x_ptr + cols * stride_xn, cols < N, LOWEST).to(dtype)
        high = tl.maximum(m, tl.max(tl.max(x, 2), 0))
        shift = tl.where(high == LOWEST, 0, high)  # -inf - -inf is NaN
        e = tl.exp2((x - shift[None, :, None]) * LOG2E)
        total = total * tl.exp2((m - shift) * LOG2E) + tl.sum(tl.sum(e, 2), 0)
        m = high
    top = tl.max(m, 0)
    total = tl.sum(total * tl.exp2((m - top) * LOG2E), 0)
    target = tl.load(target_ptr + row * stride_t)
    known = (target >= 0) & (target < N)
    x = tl.load(x_ptr + target * stride_xn, known, float("nan")).to(dtype)
    loss = tl.where(target == -100, 0, tl.log(total) - (x - top))
    tl.store(out_ptr + row * stride_o, loss)


# %%
# The wrapper
# -----------
#
# Rows off the 16-byte grid load single elements; few rows get more warps.

DTYPES = [torch.float32, torch.float16, torch.float64]
DTYPES += [] if INTERPRET else [torch.bfloat16]  # interpreted, it adds wrongly
PLACES = ["cuda", "cpu"] if INTERPRET else ["cuda"]


def check(name, t, dtypes, shape, device=None):
    """Refuse a tensor that the kernel cannot take."""
    if not isinstance(t, torch.Tensor) or t.is_nested or t.dtype not in dtypes:
        is_a = getattr(t, "dtype", type(t).__name__)
        raise TypeError(f"{name} is {is_a}; needed: a dense tensor of {dtypes}")
    if t.dim() != len(shape) or shape[0] not in (None, len(t)):
        raise ValueError(f"{name} has {tuple(t.shape)}; needed: {shape}")
    if t.device != (device or t.device) or t.device.type not in PLACES:
        raise ValueError(f"{name} is on {t.device}; needed: {device or PLACES}")
    if t.layout != torch.strided or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def cross_entropy(x, target, out=None):
    """Return the loss of each row, -log(softmax(x)[target]).

    x: (M, N) logits, also empty, any strides; float32, float16, float64 or
        bfloat16 on CUDA. Interpreted: on the CPU, no bfloat16.
    target: (M,), int64. Where it is -100, the loss is 0; where it is another
        number outside of 0 .. N - 1, NaN.
    out: where to write, (M,), float32, or float64 like x; its own storage.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("x", x, DTYPES, (None, None))
    M, N, wide = *x.shape, torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(M, dtype=wide, device=x.device) if out is None else out
    check("target", target, [torch.int64], (M,), x.device)
    check("out", out, [wide], (M,), x.device)
    if M == 0:
        return out  # nothing to launch
    own, *others = (t.untyped_storage().data_ptr() for t in (out, x, target))
    if own in others or (M > 1 and out.stride(0) == 0):
        raise ValueError("out shares memory, with an input or itself")
    strides, size = (*x.stride(), target.stride(0), out.stride(0)), x.itemsize
    aligned = (x.data_ptr() | strides[0] * size) % 16 == 0 and strides[1] == 1
    steps, vector = (2, 16 // size) if aligned else (16, 1)
    blocks = triton.next_power_of_2(max(1, N * size // 2048))
    warps = min(blocks, 8 if M > 256 else 32)
    args = x, target, out, N, *strides, steps, 32 * warps, vector
    with torch.cuda.device_of(x):  # launch where the data is
        cross_entropy_kernel[(M,)](*args, num_warps=warps)
    torch.autograd.graph.increment_version(out)  # autograd saw no write
    return out


# %%
# Is it right?
# ------------
#
# Allowed is ``2**-20`` of one plus the loss: the sum is rounded, and powers of
# two are approximate. Logits are windows in NaN, on the 16-byte grid and off.


def cross_entropy_ref(x, target):
    return F.cross_entropy(x.double(), target, reduction="none")


shapes = [(0, 5), (4, 1), (9, 1003), (5, 8192), (3, 8200), (2, 20_001)]
shapes += [(70_000, 8), (300, VOCAB)] * (free > 4e9)
for dtype, (M, N), start in product(DTYPES, shapes, (16, 5)):
    x = torch.full((M, N // 16 * 16 + 48), torch.nan, device=DEVICE).to(dtype)
    x = x[:, start : start + N].normal_(0, 5)
    target = torch.randint(0, N, (M,), device=DEVICE)
    target[::3] = -100
    room = torch.full((M, 3), torch.nan, device=DEVICE)
    room = room.to(torch.promote_types(dtype, room.dtype))
    error = cross_entropy(x, target, room[:, 1]) - cross_entropy_ref(x, target)
    right = error.abs() <= 2**-20 * (1 + room[:, 1])
    if not right.all() or not room[:, ::2].isnan().all():
        raise RuntimeError(f"wrong: {M, N, start} {dtype}")
print("right:", *shapes, *DTYPES)

# %%
# The map
# -------
#
# How long does each take, eager and compiled, and what share of a layer is it?

LIBRARY = "embedding qkv attention out gate_up down head".split()
LAYER = "qkv rotary attention out add_norm add_norm gate_up swiglu down".split()
phases = {4096 if free > 2e10 or not gpu else 1024: "prefill"}
phases |= {64: "decode", 1: "decode"}
looks = {"torch": "o#7f7f7f", "torch.compile": "^#A56CC1", "triton": "s#3B82C4"}
_, panels = plt.subplots(1, 3, figsize=(7, 4), sharey=True, layout="tight")
for axes, (M, phase) in zip(panels, phases.items()):
    roof = [0.5, 1e3 * matrix / copy, 4096], [5e-4 * copy, matrix, matrix]
    axes.loglog(*roof, "--", color="#7f7f7f")
    axes.set(title=f"{phase}, M = {M}", xlabel="FLOP per byte")
    print(f"\n{phase}, M = {M:4}  FLOP/byte     bound, us")
    rows, us = operators(M, phase == "prefill", DEVICE if gpu else "meta"), {}
    for i, (name, f, flop, *inputs) in enumerate(rows, 1):
        out = f(*inputs)
        used = [out] if torch.is_tensor(out) else [*out]
        traffic = [*used, *inputs[:1]] if name == "embedding" else inputs
        moved = sum(t.nbytes for t in (*used, *traffic))
        floors = moved / copy / 1e3, flop / matrix / 1e6, launch
        bound, limit = max(zip(floors, ("bytes", "FLOP", "launch")))
        case = dict(op=name, M=M, dtype=str(HALF)[6:], metric="us")
        results.append(case | dict(provider="ceiling", value=bound, note=limit))
        print(f"{i:2} {name:14}{flop / moved:9.1f}{bound:9.1f}", limit, end="")
        calls = {"torch": f}
        if name not in LIBRARY:
            torch.compiler.reset()  # compile for this shape alone
            calls["torch.compile"] = torch.compile(f, dynamic=False)
        if name == "cross_entropy":
            calls["triton"] = cross_entropy
        for provider, call in calls.items() if gpu else ():
            atol = 0.05 * used[-1].abs().max().item()
            CLOSE(call(*inputs), out, rtol=0.05, atol=atol, check_dtype=False)
            row = case | bench(lambda: call(*inputs)) | dict(provider=provider)
            results.append(row)
            us[name, provider] = row["value"]
            print(f"  {provider} {row['value']:.1f}", end="")
            if flop:
                at = flop / moved, flop / row["value"] / 1e6
                look, far = looks[provider], row["value"] > 2 * bound
                axes.plot(*at, look[0], color=look[1:], markersize=5)
                axes.text(at[0] * 1.4, at[1], i if far else "", size=8)
        us[name, "ceiling"] = bound
        print()
    for provider in ("ceiling", "torch") if gpu else ():
        times = [us[op, provider] for op in LAYER]
        row = dict(op="layer", provider=provider, value=sum(times))
        results.append(case | row)
        shares = (f"{op} {t / sum(times):.0%}" for op, t in zip(LAYER, times))
        print(f"layer: {provider} {sum(times):.1f} us:", *shares)
panels[0].set(ylabel="TFLOP/s")
plt.show()

# %%
# Figure. Eager (grey), compiled (purple) and our kernel (blue) on the roofline
# of this run. Points with a number of the table take over twice the bound.
#
# A product does ``M`` operations for a byte of its weight: at 4096 rows these
# decide, at one row the bytes. (The limit of power slows the long product that
# the bound counts by; a short one may pass it.) Others, but not attention, do
# about one: memory or launch decides. Where fusing pays: the operators' page.
#
# At 4096 rows, the loss takes :measured:`llm_operators ceiling/torch metric=us
# op=cross_entropy M=4096` its bound eager, compiled :measured:`llm_operators
# ceiling/torch.compile metric=us op=cross_entropy M=4096`, in one pass
# :measured:`llm_operators ceiling/triton metric=us op=cross_entropy M=4096`. At
# one row ours uses a single SM: :measured:`llm_operators triton metric=us
# op=cross_entropy M=1`, PyTorch compiled :measured:`llm_operators torch.compile
# metric=us op=cross_entropy M=1`.
#
# .. admonition:: Takeaway
#
#    Count bytes and FLOP. The bound tells what to fuse, and when to stop.
#
# Exercises
# ---------
#
# - Let ``loss(x.float(), target)`` be the last operator; predict, then measure.
# - Split a row over several programs, and beat one SM at one row.
#
# Reading
# -------
#
# - The Llama 3 Herd of Models (2024): https://arxiv.org/abs/2407.21783
