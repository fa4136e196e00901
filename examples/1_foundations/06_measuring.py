r"""
Measuring: how fast, and why not faster
=======================================

You learn to time a kernel so that the number is true, and to read from it what
limits the kernel. The kernel is a dial: turned up, it stops waiting for the
memory and waits for arithmetic.

- Which data does one program own? One block of ``x`` and the same of ``out``.
- How does it move? Into registers once, through ``k`` FMAs, and back once.
- What limits the speed? That depends on ``k``, and on what else you turn.

Without a GPU the kernel is still checked, but there is nothing to time.
"""

import csv
import os
import shutil
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

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
# What can this GPU do at best? The driver tells sizes and clocks. The manual
# tells what one SM does per clock. A *fused multiply-add* (FMA) is 2 FLOP.

PER_SM = {  # (FP32 lanes, programs at once, FP16 Tensor-Core FLOP per clock)
    "8.0": (64, 32, 2048),
    "8.6": (128, 16, 1024),
    "8.9": (128, 24, 1024),
    "9.0": (128, 32, 4096),
    "10.0": (128, 32, 8192),
}


def peaks(gpu):
    """Nominal GB/s, FP32 TFLOP/s, FP16 Tensor-Core TFLOP/s; 0 if unknown."""
    lanes, _, tensor = PER_SM.get(f"{gpu.major}.{gpu.minor}", (0, 0, 0))
    clocks = gpu.multi_processor_count * getattr(gpu, "clock_rate", 0) / 1e9
    bits = 2 * getattr(gpu, "memory_bus_width", 0)  # two transfers per clock
    bandwidth = getattr(gpu, "memory_clock_rate", 0) * bits / 8 / 1e6
    return bandwidth, 2 * lanes * clocks, tensor * clocks


def limits(gpu):
    """The limits of a GPU, one a line."""
    bandwidth, fma, tensor = peaks(gpu)
    return f"""GPU: {gpu.name}
SMs: {gpu.multi_processor_count}
warps per SM: {gpu.max_threads_per_multi_processor // 32}
threads per SM: {gpu.max_threads_per_multi_processor}
registers per SM: {gpu.regs_per_multiprocessor} of 32 bits
shared memory per SM: {gpu.shared_memory_per_multiprocessor // 1024} KiB
shared memory per block: {gpu.shared_memory_per_block_optin // 1024} KiB
L2: {gpu.L2_cache_size // 2**20} MiB
memory: {gpu.total_memory / 2**30:.0f} GiB
memory bandwidth, nominal: {bandwidth:.0f} GB/s
FP32 FMA peak, nominal: {fma:.1f} TFLOP/s
FP16 Tensor-Core peak, nominal: {tensor:.0f} TFLOP/s
clock: {getattr(gpu, "clock_rate", 0) // 1000} MHz"""


def bench(call, timer=triton.testing.do_bench):
    """20 %, 50 % and 80 % quantile of a call's microseconds."""
    return [1e3 * ms for ms in timer(call, quantiles=[0.2, 0.5, 0.8])]


def record(provider, metric, values, **case):
    low, value, high = sorted(values)
    row = dict(provider=provider, metric=metric, value=value)
    results.append(row | dict(low=low, high=high) | case)


if gpu:
    excerpts["device"] = limits(gpu)
    peak, fma_peak, tensor_peak = peaks(gpu)
    n = 2**28 if torch.cuda.mem_get_info()[0] > 6e9 else 2**26
    src, dst = torch.randn(n, device=DEVICE), torch.empty(n, device=DEVICE)
    a, b = torch.randn(2, 8192, 8192, device=DEVICE).half()
    copies = [8 * n / us / 1e3 for us in bench(lambda: dst.copy_(src))]
    products = [2 * 8192**3 / us / 1e6 for us in bench(lambda: a @ b)]
    matmul = dict(kind="matmul", dtype="float16", N=8192)
    record("ceiling", "GB/s", copies, kind="copy", bytes=8 * n)
    record("cublas", "TFLOP/s", products, **matmul)
    record("ceiling", "TFLOP/s", [tensor_peak or products[1]] * 3, **matmul)
    copy, tensor_roof = copies[1], products[1]
    print(excerpts["device"])
    print(f"\ncopy of {4 * n:,} bytes: {copy:.0f} GB/s")
    print(f"8192 x 8192 matrix product: {tensor_roof:.0f} TFLOP/s")

# %%
# The last two lines are measured: a copy and a matrix product of the vendor are
# hard to beat, so they serve as roofs. How they are timed comes below.


def box(axes, x, y, width, height, text, color, alpha=0.3):
    style = dict(facecolor=color, edgecolor=color, alpha=alpha)
    axes.add_patch(plt.Rectangle((x, y), width, height, **style))
    middle = dict(ha="center", va="center", fontsize=9)
    axes.text(x + width / 2, y + height / 2, text, **middle)


if gpu:
    _, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.set(xlim=(0, 100), ylim=(0, 66))
    axes.axis("off")
    for sm in range(gpu.multi_processor_count):
        corner = 3.7 * (sm % 12), 60 - 3.2 * (sm // 12)
        box(axes, *corner, 3.1, 2.6, "", "#3B82C4", 0.8 if sm == 11 else 0.3)
    axes.plot([44, 54, 54, 44], [62.6, 62.6, 26, 60], color="#3B82C4", lw=1)
    box(axes, 54, 26, 46, 36.6, "", "#3B82C4", 0.1)
    warps = gpu.max_threads_per_multi_processor // 32
    axes.text(56, 58, f"1 SM: {warps} warps of 32 threads", fontsize=9)
    axes.text(0, 64, f"{gpu.multi_processor_count} SMs", fontsize=9)
    registers = gpu.regs_per_multiprocessor / 256  # KiB
    shared = gpu.shared_memory_per_multiprocessor / 1024
    text = f"registers\n{registers:.0f} KiB"
    box(axes, 56, 28, 20, registers / 10, text, "#3B82C4")
    text = f"shared\nmemory\n{shared:.0f} KiB"
    box(axes, 78, 28, 20, shared / 10, text, "#2A9070")
    text = f"L2: {gpu.L2_cache_size // 2**20} MiB for all SMs"
    box(axes, 0, 14, 100, 6, text, "#C9731E")
    text = f"memory (HBM): {gpu.total_memory / 2**30:.0f} GiB"
    box(axes, 0, 0, 100, 7, text, "#7f7f7f")
    text = f"{peak:.0f} GB/s nominal, {copy:.0f} GB/s copied"
    axes.text(10, 10.5, text, va="center", fontsize=9)
    arrow = dict(arrowstyle="<->", color="#7f7f7f", lw=2)
    axes.annotate("", (6, 14), (6, 7), arrowprops=arrow)
    axes.annotate("", (6, 26), (6, 20), arrowprops=arrow)
plt.show()

# %%
# Figure. The GPU of this run. Every cell is an SM; one is opened, with its
# registers and its shared memory to scale. All SMs share L2 and memory.
#
# The dial
# --------
#
# The kernel loads a block, replaces each value ``v`` by ``A * v + B`` ``k``
# times, and stores it. It moves 8 bytes per float32 element and does ``2 * k``
# FLOP. As ``A + B`` is 1, values only drift towards 1; nothing overflows, and
# the float64 answer has a closed form: ``A**k * x + 1 - A**k``. A loop that ran
# 64 rounds without a branch keeps its own cost small.

A, B = tl.constexpr(1 - 2**-10), tl.constexpr(2**-10)  # exact in float32


def fma_chain_ref(x, k):
    return A.value**k * x.double() + (1 - A.value**k)


@triton.jit
def fma_chain_kernel(x_ptr, out_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    for _ in range(K // 64):
        for _ in tl.static_range(64):
            x = x * A + B
    for _ in tl.static_range(K % 64):
        x = x * A + B
    tl.store(out_ptr + offs, x, mask=offs < n)


def fma_chain(x, k, out=None, block=256, num_warps=2):
    """Apply ``v -> A * v + B`` k times to each element, in float32.

    x: float32 or float16, contiguous, any shape. k: int >= 0, each compiles.
    out: where to write, like x; may be x, not overlap it in part.
    Raises TypeError for a wrong type, ValueError for the rest.
    """
    out = torch.empty_like(x) if out is None else out
    for name, t in (("x", x), ("out", out)):
        if t.dtype not in (torch.float32, torch.float16) or t.dtype != x.dtype:
            raise TypeError(f"{name} has {t.dtype}, not float32 or float16 as x")
        if t.device.type != DEVICE or t.device != x.device:
            raise ValueError(f"{name} is on {t.device}; pass {name}.cuda()")
        if t.shape != x.shape or not t.is_contiguous() or t.requires_grad:
            raise ValueError(f"{name}: want {x.shape}, contiguous, no gradient")
    if type(k) is not int or k < 0:
        raise ValueError(f"k is {k}; it must be an int >= 0")
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        with torch.cuda.device_of(x):
            arguments = x, out, x.numel(), k, block
            fma_chain_kernel[grid](*arguments, num_warps=num_warps)
    return out


# %%
# Never time what is not right. Every step rounds at most twice, by ``2**-24`` of
# a value, and shrinks older errors by ``A``. So the error stays below
# ``min(k, 1024) * 2**-23`` of the largest value. Around the output lies NaN.

print(f"{'k':>5} {'n':>6} {'error':>9} {'allowed':>9}")
for k, size in [(k, s) for k in (0, 1, 65, 1000) for s in (0, 1, 257, 4093)]:
    x, room = torch.randn(2, size + 16, device=DEVICE).fill_(torch.nan)
    x[:size].normal_()
    fma_chain(x[:size], k, out=room[8 : size + 8])
    error = (room[8 : size + 8] - fma_chain_ref(x[:size], k)).abs().nan_to_num(9)
    allowed = min(k, 1024) * 2**-23 * x[:size].abs().clamp(min=1)
    if not (error <= allowed).all() or room.isnan().sum() != 16:
        raise RuntimeError(f"fma_chain is wrong for k={k}, n={size}")
    if size == 4093:
        print(f"{k:5} {size:6} {error.max():9.1e} {allowed.max():9.1e}")

# %%
# One call, six clocks
# --------------------
#
# How long does one call take, on 2**22 elements? Ask six clocks.


def queued(call):
    """Microseconds until the call returns."""
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def waited(call):
    """Microseconds until the GPU is done as well."""
    return queued(lambda: (call(), torch.cuda.synchronize()))


def events(call):
    """Microseconds of the GPU between two marks in its queue."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def repeated(clock, call):
    """20 %, 50 % and 80 % quantile of a clock that starts with an idle GPU."""
    us = []
    for _ in range(101):
        torch.cuda.synchronize()
        us.append(clock(call))
    return sorted(us)[20:81:30]


def back_to_back(call):
    """Microseconds per call of 100 that nobody waits for."""
    return waited(lambda: [call() for _ in range(100)]) / 100


clocks = {}
if gpu:
    x, out = src[: 2**22], dst[: 2**22]
    call = lambda: fma_chain(x, 3, out)
    clocks["first call"] = [waited(call)] * 3
    clocks["call returns"] = repeated(queued, call)
    clocks["GPU is done"] = repeated(waited, call)
    clocks["events"] = repeated(events, call)
    clocks["do_bench"] = bench(call)
    clocks["CUDA graph"] = bench(call, triton.testing.do_bench_cudagraph)
for y, (name, us) in enumerate(clocks.items()):
    record("triton", "us", us, clock=name.replace(" ", "_"), N=x.numel())
    line = "{:12}: {:8.1f} us ({:.1f} to {:.1f})"
    print(line.format(name, us[1], us[0], us[2]), end=", ")
    print(f"{8 * x.numel() / us[1] / 1e3:6.0f} GB/s")
    plt.barh(name, us[1], color="#3B82C4")
    plt.plot(us[::2], [y, y], color="#D1495B")
if gpu:
    plt.gca().set(xlabel="us", xscale="log")
    plt.gca().invert_yaxis()
plt.show()

# %%
# Figure. One call by six clocks: median, and a line from the 20 % to the 80 %
# quantile. The axis is logarithmic.
#
# Like with like
# --------------

calls = {}
if gpu:
    x, out, one = src[:4096], dst[:4096], torch.ones(1, device=DEVICE)
    calls = {
        "kernel": lambda: fma_chain_kernel[(16,)](
            x, out, 4096, 1, 256, num_warps=2
        ),
        "wrapper, out given": lambda: fma_chain(x, 1, out),
        "wrapper, allocates": lambda: fma_chain(x, 1),
        "torch, out given": lambda: torch.add(one, x, alpha=0.5, out=out),
        "torch, allocates": lambda: torch.add(one, x, alpha=0.5),
    }
for name, call in calls.items():
    times = repeated(back_to_back, call), bench(call)
    print(f"{name:20} {times[0][1]:6.1f} us a call, do_bench {times[1][1]:5.1f}")
    record(name[:6].strip(), "us", times[0], scope=name)

# %%
# Roofline
# --------

points = {}
for k in [2**e for e in range(14)] if gpu else ():
    us = bench(lambda: fma_chain(src, k, dst))
    flop = 2 * k * n
    case = dict(kind="fma", dtype="float32", N=n, K=k)
    points[k] = [flop / t / 1e6 for t in us]
    roof = min(copy * k / 4e3, fma_peak or torch.inf)
    record("triton", "TFLOP/s", points[k], **case)
    record("ceiling", "TFLOP/s", [roof] * 3, **case)
    print(f"k {k:5}: {8 * n / us[1] / 1e3:5.0f} GB/s", end=" ")
    print(f"{points[k][1]:6.2f} TFLOP/s, {points[k][1] / roof:.2f} of the roof")
if gpu:
    x = [2**e for e in range(-2, 12)]
    y = [min(copy * f / 1e3, fma_peak or torch.inf) for f in x]
    plt.loglog(x, y, "--", color="#7f7f7f", label="copy rate, FMA peak")
    y = [min(copy * f / 1e3, tensor_roof) for f in x]
    plt.loglog(x, y, ":", color="#C9731E", label="with Tensor Cores")
    y = [point[1] for point in points.values()]
    plt.loglog([k / 4 for k in points], y, "o", color="#3B82C4", label="triton")
    plt.gca().set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    plt.legend()
plt.show()

# %%
# Figure. The roofline of this run.
#
# Bytes that are counted, bytes that move
# ---------------------------------------

CHILD = """
import torch
for n in 2**22, 2**28:
    x, out = torch.ones(n, device="cuda"), torch.empty(n, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    torch.add(x, 1, out=out)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
"""
METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"
ncu, said = shutil.which("ncu"), ""
if gpu and ncu:
    command = [ncu, "--clock-control", "none", "--metrics", METRICS, "--csv"]
    command += ["--print-units", "base", "--profile-from-start", "off"]
    command += [sys.executable, "-c", CHILD]
    child = subprocess.run(command, capture_output=True, text=True)
    said = child.stdout
lines = said.splitlines()
lines = [line for line in lines if line.startswith('"')]
for row in csv.DictReader(lines):
    print(row["ID"], row["Metric Name"], row["Metric Value"], row["Metric Unit"])
if not lines:
    print("Left out: Nsight Compute:", said[-300:] or "no ncu on the PATH")

# %%
# Ten operations
# --------------
#
# Three floors: the host, the bytes, the FLOP.

ops = []
if gpu:
    x, y = src[: 2**26], dst[: 2**26]
    m, v, q = x.view(8192, 8192), a[:1], a.view(1, 32, 16384, 128)[:, :16, :8192]
    size, square = 2**26, 8192**2
    ops = [
        ("add_4096", lambda: x[:4096] + y[:4096], 12 * 4096, 0),
        ("add", lambda: x + y, 12 * size, 0),
        ("gelu", lambda: F.gelu(x), 8 * size, 0),
        ("sum", lambda: x.sum(), 4 * size, 0),
        ("softmax", lambda: m.softmax(1), 8 * size, 0),
        ("transpose", lambda: m.t().contiguous(), 8 * size, 0),
        ("sort", lambda: m.sort(1), 16 * size, 0),
        ("matvec", lambda: v @ b, 2 * square, 2 * square),
        ("matmul", lambda: a @ b, 6 * square, 2 * 8192 * square),
        (
            "attention",
            lambda: F.scaled_dot_product_attention(q, q, q),
            8 * q.numel(),
            4 * 16 * 128 * square,
        ),
    ]
verdicts = {
    "launch": "yes: fewer launches",
    "memory": "yes: fewer bytes",
    "compute": "only what follows it",
    "none": "look inside first",
}
for name, call, moved, flop in ops:
    call()
    host = repeated(queued, call)[1]
    us = sorted(back_to_back(call) for _ in range(3))
    floors = host, moved / copy / 1e3, flop / tensor_roof / 1e6
    worst = max(floors)
    bound = list(verdicts)[floors.index(worst)] if worst > us[1] / 2 else "none"
    print(f"{name:10} {us[1]:9.1f} us", *(f"{f / us[1]:6.0%}" for f in floors), end=" ")
    print(f"{bound:8} {verdicts[bound]}")
    record("torch", "us", us, op=name, bound=bound)

# %%
# BLOCK x num_warps
# -----------------


def occupancy(gpu, registers, num_warps):
    """Warps that an SM can hold of a kernel, over those it can hold at all."""
    most = gpu.max_threads_per_multi_processor // 32
    programs = PER_SM.get(f"{gpu.major}.{gpu.minor}", (0, 16, 0))[1]
    of_a_warp = triton.cdiv(registers * 32, 256) * 256  # given out by 256
    quarter = gpu.regs_per_multiprocessor // 4 // of_a_warp  # warps
    programs = min(programs, most // num_warps, 4 * quarter // num_warps)
    return programs * num_warps / most


def driver_occupancy(kernel, num_warps):
    import ctypes
    count = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(kernel.function), 32 * num_warps,
        ctypes.c_size_t(kernel.metadata.shared))
    return count.value * num_warps / 64


grid = [(b, w) for b in (64, 256, 1024, 4096, 16384) for w in (1, 2, 4, 8, 16)]
for block, warps in grid if gpu else ():
    size = 2**26
    args = src, dst, size, 1, block
    run = lambda: fma_chain_kernel[(size // block,)](*args, num_warps=warps)
    kernel = run()
    us = bench(run)
    held = occupancy(gpu, kernel.n_regs, warps)
    text = f"{8 * size / us[1] / 1e3:.0f}\n{kernel.n_regs} r\n{held:.0%}"
    print(block, warps, text.replace("\n", " "), "spills", kernel.n_spills, "driver", driver_occupancy(kernel, warps))
    x, y = grid.index((64, warps)), len(grid) - grid.index((block, 1))
    box(plt.gca(), x, y / 5, 0.95, 0.95, text, "#3B82C4", min(0.6, 100 / us[1]/2))
if gpu:
    plt.gca().autoscale()
plt.show()

for block, warps, limit in [(4096, 4, None), (4096, 4, 64), (4096, 4, 40), (4096, 4, 32), (4096, 4, 24), (2048, 1, None), (2048, 1, 64), (2048, 1, 48), (2048, 1, 32)] if gpu else ():
    args = src, dst, 2**26, 1, block
    run = lambda: fma_chain_kernel[(2**26 // block,)](*args, num_warps=warps, maxnreg=limit)
    kernel = run()
    us = bench(run)
    print("maxnreg", block, warps, limit, kernel.n_regs, kernel.n_spills, f"{occupancy(gpu, kernel.n_regs, warps):.0%}", driver_occupancy(kernel, warps), f"{8 * 2**26 / us[1] / 1e3:.0f} GB/s")

# %%
# Symptom, bottleneck, knob
# -------------------------

table = []
if gpu:
    bench_graph = lambda call: bench(call, triton.testing.do_bench_cudagraph)
    x, out, size = src[:4096], dst[:4096], 2**26
    f = lambda: fma_chain(x, 1, out)
    table.append(("time ignores N", "launch", "CUDA graph", back_to_back(f), bench_graph(f)[1]))
    x, y, h = src[:size], dst[:size], src[:size].half()
    before, after = bench(lambda: fma_chain(x, 1, y)), bench(lambda: fma_chain(h, 1, torch.empty_like(h)))
    table.append(("GB/s at copy", "memory", "fp16", before[1], after[1]))
    m = src[:2**24].view(4096, 4096)
    before, after = bench(lambda: m @ m), bench(lambda: m.half() @ m.half())
    table.append(("TFLOP/s at FMA peak", "compute", "Tensor Cores", before[1], after[1]))
    before, after = bench(lambda: fma_chain(x, 1, y, 16384, 1)), bench(lambda: fma_chain(x, 1, y, 16384, 16))
    table.append(("spills", "registers", "more warps", before[1], after[1]))
    x, y = src[:2**20], dst[:2**20]
    before, after = bench(lambda: fma_chain(x, 1024, y, 16384, 16)), bench(lambda: fma_chain(x, 1024, y))
    table.append(("programs < SMs", "idle SMs", "smaller block", before[1], after[1]))
    out = torch.empty_like(h)
    before, after = bench(lambda: fma_chain(h[1:-15], 1, out[1:-15], 512)), bench(lambda: fma_chain(h[:-16], 1, out[:-16], 512))
    table.append(("narrow loads", "load instr", "align", before[1], after[1]))
    before, after = bench(lambda: fma_chain(h[:-3], 1, out[:-3], 512)), bench(lambda: fma_chain(h[:-16], 1, out[:-16], 512))
    table.append(("ragged", "load instr", "pad", before[1], after[1]))
    x, y = src[:size], dst[:size]
    eager = lambda x: F.gelu(x * 0.5 + 1)
    t = time.time()
    fused = torch.compile(eager, dynamic=False)
    fused(x)
    before, after = bench(lambda: eager(x)), bench(lambda: fused(x))
    table.append(("3 kernels in a row", "memory", "torch.compile", before[1], after[1]))
    print(time.time() - t)
    before, after = bench(lambda: fma_chain(fma_chain(x, 1, y), 1, y)), bench(lambda: fma_chain(x, 2, y))
    table.append(("2 kernels in a row", "memory", "fuse", before[1], after[1]))
for line in table:
    print("{:20} {:12} {:14} {:8.1f} -> {:8.1f} us, {:.2f}x".format(*line, line[3] / line[4]))
