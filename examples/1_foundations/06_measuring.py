r"""
Measuring: how fast, and why not faster
=======================================

You learn to time a kernel so that the number is true, and to read from it what
limits the kernel: its launch, the memory, or arithmetic.

- Which data does one program own? One block of ``x`` and the same of ``out``.
- How does it move? Into registers, through ``k`` multiply-adds, and back.
- What limits the speed? It depends on ``k``, and on how it is launched.
"""

import os
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
results, excerpts = [], {}
print("" if gpu else "Left out, no GPU: its limits, every time, every figure")

# %%
# The roofs
# ---------
#
# What can this GPU do at best? Clocks give two peaks: memory moves data twice
# per clock, an FP32 lane (a *CUDA core*) does one *fused multiply-add* (FMA, 2
# FLOP). A copy and a matrix product of the vendor are measured.


def bench(call, timer=triton.testing.do_bench):
    """20 %, 50 % and 80 % quantile of a call's microseconds."""
    return [1e3 * ms for ms in timer(call, quantiles=[0.2, 0.5, 0.8])]


def record(provider, metric, values, **case):
    quantiles = dict(zip(("low", "value", "high"), sorted(values)))
    results.append(dict(provider=provider, metric=metric) | quantiles | case)


def box(x, y, w, h, text, color="#3B82C4", alpha=0.3):
    plt.bar(x + w / 2, h, w, y, color=color, alpha=alpha)
    plt.text(x + w / 2, y + h / 2, text, size=9, ha="center", va="center")


if gpu:
    get = lambda name: getattr(gpu, name, 0)  # 0 if PyTorch does not tell
    sms, kind = gpu.multi_processor_count, f"{gpu.major}.{gpu.minor}"
    lanes = 64 if kind in ("7.0", "7.5", "8.0") else 128  # of an SM
    most_programs = {"7.5": 16, "8.6": 16, "8.9": 24, "12.0": 24}.get(kind, 32)
    fma_peak = 2 * lanes * sms * get("clock_rate") / 1e9 or torch.inf
    peak = 2 * get("memory_clock_rate") * get("memory_bus_width") / 8e6
    registers = gpu.regs_per_multiprocessor
    most_warps = gpu.max_threads_per_multi_processor // 32
    shared = get("shared_memory_per_multiprocessor") >> 10
    l2, memory = get("L2_cache_size") >> 20, gpu.total_memory / 2**30
    excerpts["device"] = f"""GPU: {gpu.name}\nSMs: {sms}
warps per SM: {most_warps}\nthreads per SM: {32 * most_warps}
registers per SM: {registers} of 4 bytes\nshared memory per SM: {shared} KiB
shared memory per block: {get("shared_memory_per_block_optin") >> 10} KiB
L2: {l2} MiB\nmemory: {memory:.0f} GiB\nclock: {get("clock_rate") // 1000} MHz
memory bandwidth, nominal: {peak:.0f} GB/s
FP32 FMA peak, nominal: {fma_peak:.1f} TFLOP/s"""
    n = 2**28 if torch.cuda.mem_get_info()[0] > 6e9 else 2**26
    src, dst = torch.randn(n, device=DEVICE), torch.empty(n, device=DEVICE)
    a, b = torch.randn(2, 8192, 8192, device=DEVICE).half()
    copies = [8e-3 * n / us for us in bench(lambda: dst.copy_(src))]
    products = [2e-6 * 8192**3 / us for us in bench(lambda: a @ b)]
    copy, tensor_roof = copies[1], products[1]
    x, y = (t[: get("L2_cache_size") // 16] for t in (src, dst))  # half of L2
    warm = bench(lambda: torch.neg(x, out=y), triton.testing.do_bench_cudagraph)
    record("ceiling", "GB/s", copies, kind="copy", bytes=8 * n)
    for provider in ("cublas", "ceiling"):
        record(provider, "TFLOP/s", products, kind="matmul", dtype="float16")
    rates = f"{copy:.0f} GB/s, matrix product: {tensor_roof:.0f} TFLOP/s"
    print(f"{excerpts['device']}\ncopy of {4 * n:,} bytes: {rates}")
    plt.subplot(xlim=(0, 100), ylim=(0, 66)).axis("off")
    for sm in range(sms):
        box(3.7 * (sm % 12), 62 - 3.2 * (sm // 12), 3.1, 2.6, "")
    plt.plot([44, 54, 54, 44], [64.6, 64.6, 26, 62], color="#3B82C4", lw=1)
    box(54, 26, 46, 38.6, f"1 of {sms} SMs" + 9 * "\n", alpha=0.1)
    box(56, 28, 20, registers / 2304, f"registers\n{registers >> 8} KiB")
    box(78, 28, 20, shared / 9, f"shared memory\n{shared} KiB", "#2A9070")
    text = f"L2: {l2} MiB, {8e-3 * len(x) / warm[1]:.0f} GB/s copied"
    box(0, 14, 100, 6, text, "#C9731E")
    box(0, 7, 100, 7, f"↕ {peak:.0f} GB/s nominal, {copy:.0f} copied", alpha=0)
    box(0, 0, 100, 7, f"memory: {memory:.0f} GiB", "#7f7f7f")
plt.show()

# %%
# Figure. The GPU of this run. Each cell is an SM; one is opened, its registers
# and its shared memory to scale. All SMs share L2 and memory.
#
# The dial
# --------
#
# The kernel replaces each ``v`` by ``A * v + B``, ``k`` times: 8 bytes and
# ``2 * k`` FLOP. As ``A + B`` is 1, that is ``A**k * x + 1 - A**k``. Bytes and
# FLOP take equally long at ``k = 4 * FMA peak / bandwidth``.

A, B = tl.constexpr(1 - 2**-10), tl.constexpr(2**-10)  # exact in float32


@triton.jit
def chain_kernel(x_ptr, out_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    for _ in range(K):  # the compiler unrolls it
        x = x * A + B
    tl.store(out_ptr + offs, x, mask=offs < n)


def chain(x, k, out=None, block=1024, num_warps=4):
    """Return x after k >= 0 steps ``v -> A * v + B``, calculated in float32.
    x, out: contiguous float32 or float16, alike, the same or apart; else it
    raises TypeError or ValueError."""
    out = torch.empty_like(x) if out is None else out
    if type(k) is not int or k < 0:
        raise ValueError(f"k is {k!r}, not an int >= 0")
    for name, t in (("x", x), ("out", out)):
        if t.dtype not in (torch.float32, torch.float16) or t.dtype != x.dtype:
            raise TypeError(f"{name}: {t.dtype}, not float32 or float16 like x")
        ok = (t.shape, t.device, t.device.type) == (x.shape, x.device, DEVICE)
        if not ok or not t.is_contiguous() or t.requires_grad:
            wanted = f"contiguous, on {DEVICE}, of x's shape, without grad"
            raise ValueError(f"{name} must be {wanted}")
    if 0 < abs(out.data_ptr() - x.data_ptr()) < x.nbytes:
        raise ValueError("out overlaps x in part")
    if n := x.numel():
        with torch.cuda.device_of(x):
            launch = chain_kernel[(triton.cdiv(n, block),)]
            launch(x, out, n, k, block, num_warps=num_warps)
    return out


def chain_ref(x, k):
    """The same in closed form, in float64."""
    return A.value**k * x.double() + (1 - A.value**k)


# %%
# First it must be right. A step rounds twice, by up to ``2**-24`` of a value of
# at most 4, and ``A`` shrinks older errors. Around the output lies NaN.

for k, size in [(k, s) for k in (0, 1, 65, 999) for s in (0, 1, 257, 4093)]:
    room = torch.full((size + 16,), torch.nan, device=DEVICE)
    x = torch.randn(size, device=DEVICE).clamp(-4, 4)
    chain(x, k, out=room[8 : size + 8])
    exact = torch.nn.functional.pad(chain_ref(x, k), (8, 8), value=torch.nan)
    close = dict(rtol=0, atol=min(k, 1024) * 2**-21, equal_nan=True)
    torch.testing.assert_close(room.double(), exact, **close)
print("k = 0, 1, 65, 999: right for n = 0, 1, 257, 4093")

# %%
# One call, five clocks
# ---------------------
#
# A launch is *asynchronous*: the call returns when the work is queued. How long
# does it take? Three clocks can watch one call: the CPU's until it returns, the
# CPU's until the GPU is done, and *events*, two marks in the GPU's queue.


def watch(call, calls=1):
    """Microseconds per call: until it returns, until all is done, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = [time.perf_counter() - start]
    end.record()
    torch.cuda.synchronize()
    seconds += [time.perf_counter() - start, begin.elapsed_time(end) / 1e3]
    return [1e6 * s / calls for s in seconds]


CLOCKS = "returns", "done", "events", "do_bench", "graph"
calls = [
    ("triton:kernel", "given", lambda: launch(x, y, 2**22, 1, 1024)),
    ("triton", "given", lambda: chain(x, 1, out=y)),
    ("torch", "given", lambda: torch.add(x, 1, out=y)),
    ("triton", "new", lambda: chain(x, 1)),
    ("torch", "new", lambda: torch.add(x, 1)),
]
if gpu:
    x, y, launch = src[: 2**22], dst[: 2**22], chain_kernel[(2**12,)]
    print(f"first call with k=3: {watch(lambda: chain(x, 3))[1]:,.0f} us")
    print("us, later      out  " + ("{:>12}" * 5).format(*CLOCKS))
for provider, out, call in calls if gpu else ():
    shots = zip(*(watch(call) for _ in range(101)))
    times = [sorted(us)[20:81:30] for us in shots] + [bench(call)]
    times += [bench(call, triton.testing.do_bench_cudagraph)]
    cells = (f"{us:6.1f} ±{(high - low) / 2:3.1f}" for low, us, high in times)
    print(f"{provider:14} {out:5}", *cells)
    for clock, us in zip(CLOCKS, times):
        record(provider, "us", us, clock=clock, out=out, N=2**22)

# %%
# - *returns* times the queueing. Bytes over that time is no real speed.
# - *done* waits for the work; *events* see an idle GPU wait for the launch.
# - ``do_bench`` warms up, repeats, and overwrites L2 before each repetition.
#   Meanwhile the CPU prepares the launch: its time is hidden if it is shorter.
# - A *graph* replays without the CPU. L2 stays warm: a speed of the cache.
#
# The table has the median ± half of the range from 20 % to 80 %. The first call
# compiled: warm up. Checks and a new ``out`` cost CPU time, which some clocks
# see. So compare like with like: one clock, ``out`` given or new, equal bytes.
#
# Roofline
# --------
#
# Turn the dial. From which ``k`` on does the time grow? The roof predicts.

ks = [2**e for e in range(14)] if gpu else []
reached, roofs = [], [min(copy * k / 4e3, fma_peak) for k in ks]
for k, roof in zip(ks, roofs):
    us = bench(lambda: chain(src, k, dst))
    rates = [2e-6 * k * n / t for t in us]
    reached.append(rates[1])
    for provider, values in {"triton": rates, "ceiling": [roof] * 3}.items():
        record(provider, "TFLOP/s", values, kind="fma", dtype="float32", K=k)
    text = f"k {k:4}: {8e-3 * n / us[1]:5.0f} GB/s, {rates[1]:6.2f} TFLOP/s"
    print(f"{text}, {us[1]:6.0f} us, predicted {2e-6 * k * n / roof:6.0f}")
if gpu:
    x = [k / 4 for k in ks]  # FLOP per byte
    plt.loglog(x, roofs, "--", color="#7f7f7f", label="copy rate, CUDA cores")
    plt.loglog(x, reached, "o", color="#3B82C4", label="triton")
    plt.axhline(tensor_roof, color="#C9731E", label="Tensor Cores")
    plt.gca().set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    plt.legend()
plt.show()

# %%
# Figure. The roofline of this run. On the slope the memory decides, on the flat
# part the FP32 lanes. Only matrix products reach the line at the top.
#
# Measured over roof is
# :measured:`measuring triton/ceiling metric=TFLOP/s K=1` at ``k = 1`` and
# :measured:`measuring triton/ceiling metric=TFLOP/s K=8192` at ``k = 8192``.
#
# Bytes counted, bytes moved
# --------------------------
#
# Effective bandwidth is *logical* bytes over time: what the operator must move.
# Nsight Compute counts what the memory really moved. Is it the same?

CHILD = """import torch
for n in 2**22, 2**28:
    x, out = torch.ones(n, device="cuda"), torch.empty(n, device="cuda")
    with torch.cuda.profiler.profile():
        torch.add(x, 1, out=out)"""
OPTIONS = "--profile-from-start off --clock-control none --print-units base "
OPTIONS += "--csv --metrics dram__bytes_read.sum,dram__bytes_write.sum"
command = f"ncu {OPTIONS} '{sys.executable}' -c '{CHILD}'"
said = subprocess.getoutput(command) if gpu else "no GPU"
lines = [s for s in said.splitlines() if '"dram__' in s and "n/a" not in s]
for line in lines:
    number, *_, metric, _, value = line.strip('"').split('","')
    moved, size = int(value.replace(",", "")), [2**22, 2**28][int(number)]
    print(f"{metric}: {moved / 1e6:.2f} MB of {4 * size / 1e6:.2f} MB")
    record("torch", metric[6:-4], [moved] * 3, N=size)
print("" if len(lines) == 4 else f"Left out: Nsight Compute: {said}")

# %%
# A small output stays in L2 when the kernel ends. At 1 GiB both agree.
#
# Which floor is nearest?
# -----------------------
#
# A call takes at least its launch, about its bytes over the copy rate, and its
# FLOP over the roof. Each row has the bytes and FLOP per element of ``2**26``.
# The largest share of the time names the limit, that names the knob, and the
# knob is turned. Fusing saves launches and bytes, so it helps with those two.

FUSE = dict(launch="yes", memory="yes", compute="no", other="?")
rows = [  # name, call, its bytes and FLOP, the knob, the call after turning it
    ("20 s + s", lambda: [s + s for _ in range(20)], 0, 0, "1", lambda: z + z),
    ("x + y", lambda: x + y, 12, 0, "float16", lambda: h + h),
    ("sigmoid", lambda: x.sigmoid(), 8, 0, "float16", lambda: h.sigmoid()),
    ("sum", lambda: x.sum(), 4, 0, "float16", lambda: h.sum()),
    ("softmax", lambda: m.softmax(1), 8, 0, "float16", lambda: a.softmax(1)),
    ("transpose", lambda: m.t().contiguous(), 8, 0, "view", lambda: m.t()),
    ("sort", lambda: m.sort(1), 16, 0, "only max", lambda: m.max(1)),
    ("vector @ m", lambda: m[:1] @ m, 4, 2, "float16", lambda: a[:1] @ a),
    ("m @ m", lambda: m @ m, 12, 2**14, "Tensor Cores", lambda: a @ a),
    ("attention", lambda: attend(q, q, q), 2, 2**13,
     "causal", lambda: attend(q, q, q, is_causal=True)),
    ("twice", lambda: chain(chain(x, 1), 1), 16, 4, "k=2", lambda: chain(x, 2)),
    ("1 warp", lambda: chain(*args, 1), 8, 2, "16", lambda: chain(*args, 16)),
    ("64 programs", lambda: chain(t, 9999, t, 2**14, 16), 1 / 8, 9999 / 32,
     "1024", lambda: chain(t, 9999, t)),
    ("n-3", lambda: chain(h[:-3], 1), 4, 2, "n-16", lambda: chain(h[:-16], 1)),
]  # fmt: skip
if gpu:
    x, y, m = src[: 2**26], dst[: 2**26], src[: 2**26].view(8192, 8192)
    s, z, t, args = x[:4096], x[: 20 * 4096], y[: 2**20], (x, 1, y, 2**14)
    h, q = a.view(-1), a.view(4, 16, 8192, 128)[:1]  # float16
    attend = torch.nn.functional.scaled_dot_product_attention
    print(18 * " " + "us launch  bytes   FLOP   limit  fuse?")
for name, call, moved, flop, knob, turned in rows if gpu else ():
    call(), turned()  # warm up
    host, us, _ = map(sorted, zip(*(watch(call, 20) for _ in range(5))))
    after = sorted(watch(turned, 20)[1] for _ in range(3))[1]
    roof = tensor_roof if name == "attention" else fma_peak
    floors = host[2], moved * 2**26 / 1e3 / copy, flop * 2**26 / 1e6 / roof
    shares = [floor / us[2] for floor in floors]
    limit = max(zip([*shares, 0.5], FUSE))[1]  # other: none is above half
    print(f"{name:11}{us[2]:9.1f}", *(f"{s:6.0%}" for s in shares), end="  ")
    print(f" {limit:7} {FUSE[limit]:4} -> {knob}: {after:.1f} us")
    provider = "torch" if name in [row[0] for row in rows[:10]] else "triton"
    record(provider, "us", us[1:4], op=name, note=f"{limit}, {FUSE[limit]}")

# %%
# - A call that reads more than it writes can pass the rate of a copy.
# - *other*: look inside, repair, then fuse. Here: scattered addresses
#   (transpose), passes (sort), spills (1 warp), idle SMs, narrow loads (n-3).
# - Where ``float16``, half the bytes, does not halve the time, bytes alone are
#   not the limit: compare ``sigmoid`` and ``softmax``.
#
# ``BLOCK`` and ``num_warps``
# ---------------------------

sizes, counts = (64, 256, 1024, 4096, 16384), (1, 2, 4, 8, 16)
for i, j in [divmod(cell, 5) for cell in range(25)] if gpu else ():
    block, warps = sizes[i], counts[j]
    launch = chain_kernel[(2**26 // block,)]
    call = lambda: launch(src, dst, 2**26, 1, block, num_warps=warps)
    kernel, us = call(), bench(call)
    rate, regs, spills = 2**29 / us[1] / 1e3, kernel.n_regs, kernel.n_spills
    held = registers // 4 // (triton.cdiv(regs, 8) * 256) * 4  # warps
    resident = min(held // warps, most_warps // warps, most_programs)
    occupancy = resident * warps / most_warps
    note = f"{regs} registers, occupancy {occupancy:.2f}"
    record("triton", "us", us, BLOCK=block, num_warps=warps, note=note)
    text = f"{rate:.0f} GB/s\n{regs} r, {occupancy:.0%}"
    text += f"\n{spills} spilled" if spills else ""
    box(j - 0.5, i - 0.5, 0.95, 0.95, text, alpha=min(0.9, 0.6 * rate / copy))
if gpu:
    plt.xticks(range(5), [f"warps {count}" for count in counts])
    plt.yticks(range(5), [f"BLOCK {size}" for size in sizes])
    plt.grid(False)
plt.show()

# %%
# Figure. Bandwidth, registers per thread (r), occupancy and spilled registers.
#
# *Occupancy* is the share of an SM's warps that are resident. Registers set it:
# the more a thread holds, the fewer warps fit. It is no speed: the lowest row
# mostly starts programs, while at 12 %, a thread has much in flight.
#
# It is a triangle. Values kept in registers or shared memory save *memory
# traffic* but cost *occupancy*, which hides waiting: *hardware utilization*.
# Keep too many, and registers spill: the traffic is back. So sweep.
#
# .. admonition:: Takeaway
#
#    Name the clock, then the floor: launch, bytes or FLOP. Then turn a knob.
#
# Exercises
# ---------
#
# - Predict where ``h`` instead of ``src`` bends the roofline. Then measure.
# - Add your slowest operation to ``rows``. Which floor is it near?
#
# Reading
# -------
#
# - Roofline, the paper (2009): https://doi.org/10.1145/1498765.1498785
