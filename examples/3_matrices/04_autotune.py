r"""
Autotuning: let the GPU choose, and check the choice
====================================================

Which tile is best? It depends on the sizes, the dtype, the strides and the GPU.
You let ``triton.autotune`` measure a list of them, and learn what that costs,
what it does to your data, and how far its answer reaches.

- Which data does one program own? A tile, as large as the configuration says.
- How does it move? The configuration says how far ahead, and by how many warps.
- What limits the speed? Waste, idle SMs, traffic or arithmetic: it depends.
"""

import os
import tempfile
import time
from functools import partial

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
results = []
folder = tempfile.TemporaryDirectory()
triton.knobs.cache.dir = folder.name  # so that all is compiled in this run
triton.knobs.autotuning.cache = False  # and all is measured
if DEVICE == "cpu":
    print("Left out, no GPU: all times, the choices, files, bfloat16")


def record(provider, metric, value, **case):
    results.append(dict(provider=provider, metric=metric, value=value) | case)


# %%
# From parameters to configurations
# ---------------------------------
#
# A sum of vectors. Now a list names the configurations, and the launch no
# longer names ``BLOCK``: that is an error. So the grid is a function of
# ``meta``, the parameters of the one that runs. In the interpreter ``once``
# finds all equally fast.


def once(call, quantiles):
    """Run a call, and return its median and two quantiles, in ms."""
    call()
    return [1.0, 1.0, 1.0]


BENCH = None if DEVICE == "cuda" else once  # None: triton.testing.do_bench
ADD_SPACE = [triton.Config({"BLOCK": block}) for block in (512, 1024, 4096)]


@triton.autotune(ADD_SPACE, key=["n"], do_bench=BENCH)
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, stride_x, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs * stride_x, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + y, mask=mask)


def add(kernel, x, y, out, grid=None, **config):
    """Write ``x + y`` to out, which may be x, by a tuner or a kernel."""
    n = len(out)
    grid = grid or (lambda meta: (triton.cdiv(n, meta["BLOCK"]),))
    kernel[grid](x, y, out, n, x.stride(0), **config)


n = 2**26 if DEVICE == "cuda" else 2**13
x, y, out = torch.randn(3, n, device=DEVICE)
add(add_kernel, x, y, out)
print("right:", torch.equal(out, x + y))
try:
    add(add_kernel, x[1:], y, out[1:], BLOCK=512)
except ValueError as error:
    print(f"ValueError: {error}")

# %%
# Fast and wrong
# --------------
#
# Someone leaves the old grid in place, for 4096 elements per program. What is
# chosen? ``add_kernel.fn`` is the kernel below the tuner: it runs each by hand.

for name, grid in (("meta", None), ("fixed", (triton.cdiv(n, 4096),))):
    tuner = triton.autotune(ADD_SPACE, ["n"], do_bench=BENCH)(add_kernel.fn)
    add(tuner, x, y, out, grid)
    for config, (ms, *_) in tuner.configs_timings.items():
        out.fill_(torch.nan)
        add(add_kernel.fn, x, y, out, grid, **config.all_kwargs())
        wrong = (out != x + y).double().mean()
        text = f", {1e3 * ms:.1f} us" if DEVICE == "cuda" else ""
        print(f"grid {name:5}: {config.kwargs}, wrong {wrong:5.1%}{text}")
    if DEVICE == "cuda":
        us = 1e3 * tuner.configs_timings[tuner.best_config][0]
        record("triton", "us", us, N=n, grid=name)
        print("chosen:", tuner.best_config)

# %%
# It chose one that leaves most undone, because that is the fastest:
# :measured:`autotune triton metric=us grid=fixed` instead of
# :measured:`autotune triton metric=us grid=meta`. A tuner compares times, never
# values: it *selects* for bugs that skip work. So check every configuration.
#
# When does it tune again?
# ------------------------
#
# It keeps one configuration for each value of its *key*: the arguments that
# ``key`` names, and the dtypes of the tensors. Which of these calls tunes?

x = y = torch.ones(2000, device=DEVICE)
calls = {"1000 elements": x[:1000], "others": x[1000:], "1001": x[:1001]}
calls |= {"every other one": x[::2], "float16": x[:1000].half()}
for key in (["n"], ["N"]):
    tuner = triton.autotune(ADD_SPACE, key, do_bench=once)(add_kernel.fn)
    print(f"key={key}, unknown: {set(key) - set(tuner.arg_names) or 'none'}")
    for name, t in calls.items():
        known, out = len(tuner.cache), torch.empty_like(t)
        add(tuner, t, y.to(t.dtype), out)
        print(f"  {name:15}", "tunes" if len(tuner.cache) > known else "-")

# %%
# - A new length tunes again, even by 1. Put a size rounded up to a power
#   of two into the key.
# - A dtype enters by itself. Strides do not, nor does the device.
# - ``N`` is no argument: it is ignored, silently. Compare the names yourself.
#   (Triton 3.9 raises a ``ValueError``.)
#
# It runs your kernel many times
# ------------------------------
#
# Add 1 to a vector of zeros, in place, three times: 1, 2, 3 would be right.

one = torch.ones(2**24 if DEVICE == "cuda" else 2**10, device=DEVICE)
for how in ("nothing", "reset_to_zero", "restore_value"):
    option = {} if how == "nothing" else {how: ["out_ptr"]}
    make = triton.autotune(ADD_SPACE, ["n"], do_bench=BENCH, **option)
    tuner, x, seen = make(add_kernel.fn), torch.zeros_like(one), []
    for _ in range(3):
        add(tuner, x, one, x)
        seen += [int(x.max())] if x.min() == x.max() else ["unequal"]
    if DEVICE == "cuda":
        us = sorted(1e3 * t for t, *_ in tuner.configs_timings.values())
        seen += [f"fastest {us[0]:.1f} us, slowest {us[-1]:.1f} us"]
        record("triton", "us", us[0], N=len(one), repair=how)
    print(f"{how:13}", *seen)

# %%
# ``reset_to_zero`` acts while it tunes, and once after. Later calls zero
# nothing, nor does a tuner with a single configuration: if a kernel sums, its
# wrapper must call ``out.zero_()``. Without repair each run of the tuner added
# 1. Repairs are inside the timed call: :measured:`autotune triton metric=us
# repair=restore_value`, not :measured:`autotune triton metric=us
# repair=nothing`.
#
# A product, and its search space
# -------------------------------
#
# ``C = A @ B`` costs ``2 * M * N * K`` FLOP, whatever the tile. Small tiles
# fill the SMs. Large ones load less. Each member of the list needs a reason.
#
# - Tiles from 16 rows, the least that a Tensor Core instruction takes, to 256.
# - ``BLOCK_K``: 64 numbers are a line of 128 bytes. Thin tiles take
#   more. The last is too large, to be left out.
# - ``num_warps``: at least 4, and so many that a thread holds 128 sums at most.
# - ``num_stages``: 3 or 4 steps under way hide the latency of memory.
#
# A pipeline holds ``num_stages`` tiles of ``A`` and ``B`` in shared memory.
# What does not fit would be compiled, fail, and count as infinitely slow:
# ``fitting`` leaves it out. A *cost model* ranks by the work of the busiest SM,
# a load as 64 products. Only the 8 cheapest are measured.

TILES = [(16, 32, 256), (16, 64, 128), (16, 128, 128), (64, 64, 64)]
TILES += [(64, 128, 64), (128, 64, 64), (128, 128, 64), (128, 256, 64)]
TILES += [(256, 128, 64), (128, 256, 128)]
SPACE = [
    triton.Config(dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k), warps, stages)
    for m, n, k in TILES
    for warps in [max(4, m * n // 4096)]
    for stages in (3, 4)
]


def gemm_ref(a, b):
    """``a @ b`` in float64."""
    return a.double() @ b.double()


def shared_bytes(config, size):
    """Of shared memory, with 1024 to spare for barriers: at most so many."""
    m, n, k = config.kwargs.values()
    return config.num_stages * (m + n) * k * size + 1024


def fitting(configs, args, **_):
    """Those whose pipeline fits on the GPU that holds a_ptr."""
    a, utils = args["a_ptr"], triton.runtime.driver.active.utils
    limit = utils.get_device_properties(a.device.index)["max_shared_mem"]
    return [c for c in configs if shared_bytes(c, a.itemsize) <= limit]


def cost(a_ptr, M, N, K, BLOCK_M, BLOCK_N, **_):
    """The time of the busiest SM, in products."""
    gpu = torch.cuda.get_device_properties(a_ptr.device)
    programs = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    rounds = triton.cdiv(programs, gpu.multi_processor_count)
    return rounds * K * (BLOCK_M * BLOCK_N + 64 * (BLOCK_M + BLOCK_N))


# %%
# In the kernel ``bucket``, ``M`` rounded up to a power of two, is for the key.
# ``timed`` replays a CUDA graph: a launch can take longer than its kernel. At
# its power limit a GPU slows down: ``in_turns`` measures a little of each.


def graphed(call):
    """The same work, to be replayed without the launch."""
    call()  # compile it; where it does not fit, this raises
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=here):  # on the current device
        call()
    return graph.replay


def timed(call, quantiles):
    """Milliseconds of a call, with L2 emptied before each repetition."""
    return triton.testing.do_bench(graphed(call), 5, 20, quantiles=quantiles)


def in_turns(calls):
    """The median microseconds of each of some calls, named as they are."""
    bench = partial(triton.testing.do_bench, warmup=1, rep=3, return_mode="all")
    replays = {name: graphed(call) for name, call in calls.items()}
    ms = {name: [] for name in calls}
    for name in [*calls] * 10:
        ms[name] += bench(replays[name])
    return {name: 1e3 * sorted(t)[len(t) // 2] for name, t in ms.items()}


KEY = ["bucket", "N", "K", "stride_ak", "stride_bn"]
PRUNE = {"early_config_prune": fitting, "perf_model": cost, "top_k": 8}
CHOICES = SPACE if DEVICE == "cuda" else SPACE[6:7]


@triton.autotune(CHOICES, KEY, prune_configs_by=PRUNE, do_bench=timed)
@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, bucket,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
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
        acc = tl.dot(a, b, acc)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    mask_c = mask_m[:, None] & mask_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_c)


# %%
# The wrapper takes no ``out``: the many runs write to a new tensor. The tuner
# measures one configuration after the other. So its three best meet again, in
# turns, and the winner is put into its ``cache``.

F16, BF16 = torch.float16, torch.bfloat16
NEW = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
DTYPES = [F16, BF16] if NEW else [F16]  # interpreted, bfloat16 is wrong


def check(name, t, a, dtypes):
    """Refuse a tensor that the kernel cannot take beside ``a``."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, not a torch.Tensor")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} has {t.dtype}; supported here: {dtypes}")
    if t.device != a.device or t.device.type != ["cuda", "cpu"][INTERPRET]:
        raise ValueError(f"{name} is on {t.device}; needed: one cuda device")
    if t.layout != torch.strided or t.is_nested or t.is_neg():
        raise ValueError(f"{name} is sparse or a negated view; pass a copy")
    if t.dim() != 2 or max(t.shape) > 2**31 - 512:
        raise ValueError(f"{name} has {t.shape}, not two sizes below 2**31-511")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; pass {name}.detach()")


def launch(kernel, a, b, c, **config):
    """Run a tuner; or, with a configuration, the kernel below one."""
    (M, K), N = a.shape, b.shape[1]
    rows = lambda meta: triton.cdiv(M, meta["BLOCK_M"])
    grid = lambda meta: (rows(meta) * triton.cdiv(N, meta["BLOCK_N"]),)
    sizes = M, N, K, max(16, triton.next_power_of_2(M)), *a.stride()
    kernel[grid](a, b, c, *sizes, *b.stride(), *c.stride(), **config)


def finals(a, b, c):
    """Choose again among the tuner's three best, for its latest key."""
    ms, cache = gemm_kernel.configs_timings, gemm_kernel.cache
    run, best = partial(launch, gemm_kernel.fn, a, b, c), sorted(ms, key=ms.get)
    us = in_turns({one: partial(run, **one.all_kwargs()) for one in best[:3]})
    cache[[*cache][-1]] = min(us, key=us.get)


def gemm(a, b):
    """Return ``a @ b``, a new tensor, summed in float32 and rounded once.

    a, b: (M, K) and (K, N), any sizes and strides, one device, both float16 or
        both bfloat16. Interpreted: CPU, only float16. K = 0 gives zeros.
    The first call with another dtype, N, K, stride along the rows of a or b, or
    power of two that M fits into, tunes: seconds, and not in a CUDA graph.
    Raises TypeError for a wrong type or dtype, ValueError for the rest.
    """
    check("a", a, a, DTYPES)
    check("b", b, a, [a.dtype])
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns, b has {len(b)} rows")
    c = a.new_empty(len(a), b.shape[1])
    if 0 in (*c.shape, len(b)):
        return c.zero_()  # nothing to launch
    known = len(gemm_kernel.cache)
    with torch.cuda.device_of(a):  # launch where the data is
        launch(gemm_kernel, a, b, c)
        if len(gemm_kernel.cache) > known:
            finals(a, b, c)
    return c


# %%
# Is every configuration right?
# -----------------------------
#
# Sizes are multiples of 16, so that the code is the one timed below, but of
# hardly any tile. Inputs are windows amid NaN, ``c`` is one of 7s.


def window(rows, cols, dtype, fill=torch.nan):
    """Random numbers in the midst of a buffer."""
    room = torch.full((rows + 32, cols + 32), fill, dtype=dtype, device=DEVICE)
    return room[16:-16, 16:-16].copy_(torch.randn(rows, cols))


def judge(a, b):
    """A function that counts the wrong, missing and NaN results in a ``c``."""
    exact, limits = gemm_ref(a, b), torch.finfo(a.dtype)
    bound = gemm_ref(a.abs(), b.abs()) * (a.shape[1] * 2**-23)
    bound += exact.abs() * limits.eps / 2 + limits.tiny * limits.eps
    return lambda c: int((~((c - exact).abs() <= bound)).sum())


for dtype in DTYPES:
    start = time.perf_counter()
    a, b = window(208, 80, dtype), window(80, 272, dtype)
    usable = fitting(SPACE, {"a_ptr": a}) if DEVICE == "cuda" else SPACE
    errors = judge(a, b)
    for config in usable:
        c = window(208, 272, dtype, fill=7).fill_(7)
        launch(gemm_kernel.fn, a, b, c, **config.all_kwargs())
        around = (c._base != 7).sum() - (c != 7).sum()
        if errors(c) or around:
            raise RuntimeError(f"{config} is wrong")
    print(f"{dtype}: {len(usable)} of {len(SPACE)} fit and are right")
    seconds = round(time.perf_counter() - start, 2)
    record("triton", "seconds", seconds, part="compile", dtype=str(dtype)[6:])
for M, N, K in ((1, 1, 1), (5, 7, 0), (131, 67, 129)) * (DEVICE == "cpu"):
    a, b = window(M, K, F16), window(K, N, F16)
    print(f"gemm {M, N, K}: {judge(a, b)(gemm(a, b))} wrong")

# %%
# Choice against truth
# --------------------
#
# Is the choice as good as an exhaustive sweep, and how good for other products?

CASES = [(F16, *[n] * 3, "rows") for n in (4096, 2048)]
CASES += [(F16, 4096, 4096, 4096, "columns")]
CASES += [(BF16, m, 14336, 4096, "rows") for m in (4096, 512, 16)]
CASES += [(BF16, 16, 4096, 14336, "rows")]
CASES = [case for case in CASES if case[0] in DTYPES] * (DEVICE == "cuda")
sweeps, chosen, labels = [], [], []
short = lambda c: "x".join(map(str, (*c.kwargs.values(), c.num_stages)))
for dtype, M, N, K, lines in CASES:
    case = dict(M=M, N=N, K=K, dtype=str(dtype)[6:], B=lines)
    labels += [",".join(map(str, case.values()))]
    a, b = (torch.randn(s, device=DEVICE).to(dtype) for s in ((M, K), (K, N)))
    b = b if lines == "rows" else b.t().contiguous().t()
    c, errors = a.new_empty(M, N), judge(a, b)
    start = time.perf_counter()
    gemm(a, b)  # its finals wait for the GPU
    seconds = round(time.perf_counter() - start, 2)
    mine, calls = [*gemm_kernel.cache.values()][-1], {}
    run = partial(launch, gemm_kernel.fn, a, b, c)
    for config in usable:
        c.fill_(torch.nan)
        calls[config] = partial(run, **config.all_kwargs())
        calls[config]()
        if errors(c):
            raise RuntimeError(f"{config} is wrong: {case}")
    calls["cublas"] = partial(torch.mm, a, b, out=c)
    us = in_turns(calls)
    record("cublas", "us", us.pop("cublas"), **case)
    best = min(us, key=us.get)
    record("triton", "us", us[mine], **case)
    record("triton:best", "us", us[best], **case)
    for config in us:
        record("triton:sweep", "us", us[config], config=short(config), **case)
    record("triton", "seconds", seconds, part="tune", **case)
    print(f"{labels[-1]}: {seconds} s, {us[mine]:.1f} us by {short(mine)}")
    print(f"  best: {us[best]:.1f} us by {short(best)}")
    sweeps, chosen = [*sweeps, us], [*chosen, mine]

look = dict(figsize=(7, 8), height_ratios=(5, 2), layout="constrained")
_, panels = plt.subplots(2, sharex=True, **look)
drawn = zip(panels, (usable, chosen), ([*map(short, usable)], labels))
for axes, configs, names in drawn if sweeps else ():
    rows = [[us[c] / min(us.values()) for us in sweeps] for c in configs]
    axes.imshow(rows, cmap="Blues", vmin=1, vmax=3, aspect="auto")
    for i, row in enumerate(rows):
        for j, x in enumerate(row):
            look = dict(color="white" if x > 2 else "black", size=7)
            look |= dict(weight="bold") if configs[i] == chosen[j] else {}
            axes.text(j, i, f"{x:.2f}", look, ha="center", va="center")
            if configs is chosen:
                case = dict(tuned=labels[i], run=labels[j])
                record("triton", "regret", round(x, 3), **case)
    axes.set_yticks(range(len(names)), names, size=7)
    axes.set_xticks(range(len(labels)), labels, size=7, rotation=90)
    axes.grid(False)
plt.show()

# %%
# Figure. Time over that of the best, for each product (sizes, dtype, rows or
# columns of ``B`` contiguous). Above: each configuration (tile, stages). Below:
# the one chosen for each product. Bold: chosen for the product of its column.
#
# How near to the best is the choice? At worst, in speed: :measured:`autotune
# min(triton/triton:best) metric=us M>=16`. What did it cost? To measure 8, then
# 3, all compiled: :measured:`autotune triton metric=seconds part=tune M=2048`
# s. For columns, 8 were compiled first: :measured:`autotune triton
# metric=seconds part=tune B=columns` s. To compile all that fit:
# :measured:`autotune triton metric=seconds part=compile dtype=float16` s, with
# their check.
#
# A choice is made *for* a key. That for 4096 rows takes :measured:`autotune
# triton metric=regret tuned=4096,4096,4096,float16,rows
# run=16,4096,14336,bfloat16,rows` times the best for the last, of 16 rows.
# Strides alone cost :measured:`autotune triton metric=regret
# tuned=4096,4096,4096,float16,rows run=4096,4096,4096,float16,columns` times:
# so two are in ``KEY``. How far it is fitted to this GPU, only a second
# recording can say, on another one.
#
# What is kept?
# -------------
#
# The next process tunes anew, unless ``cache_results=True`` or
# ``TRITON_CACHE_AUTOTUNING=1`` keeps a file. How often do two tuners measure?

hook = [triton.Config({"BLOCK": b}, pre_hook=id) for b in (512, 1024)]
for name, space in (("off", ADD_SPACE), ("on", ADD_SPACE), ("hook", hook)):
    keep, runs = dict(cache_results=name != "off"), [[], []]
    for seen in runs:
        note = lambda call, quantiles: seen.append(call()) or [1.0] * 3
        make = triton.autotune(space, ["n"], do_bench=note, **keep)
        add(make(add_kernel.fn), one, one, torch.empty_like(one))
    print(f"{name:4}: {len(runs[0])} measured, then {len(runs[1])}")

# %%
# It is off by default, and not for configurations with a ``pre_hook``. The file
# knows Triton, the kernel, the key, the list and the compute capability, but
# neither the grid nor *which* GPU: an H100 takes over what an H200 chose.
#
# .. admonition:: Takeaway
#
#    A tuner finds what is fast, for one key and one GPU, by many runs. That
#    each configuration is right is your part.
#
# Exercises
# ---------
#
# Split ``K`` among programs, with ``tl.atomic_add``. Who zeroes ``C``?
#
# Reading
# -------
#
# ``triton.autotune``: https://triton-lang.org/main/python-api/triton.html
