r"""
Copy: a first kernel on a healthy machine
=========================================

A kernel that only moves bytes is the smallest one that can go wrong. Here you
run one, learn to tell a broken machine from a wrong kernel, and see the three
things that a kernel can wait for.

- Which data does one program own? 2048 neighbouring bytes.
- How does it move? From global memory into registers, and back.
- What limits the speed? The launch if the tensor is small, else the memory.

Without a GPU, Triton's interpreter runs the kernel: slow, but all is checked.
"""

import contextlib
import ctypes
import inspect
import math
import os
import shutil
import subprocess
import sys
import tempfile
import timeit

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = torch.cuda.get_device_properties(0) if DEVICE == "cuda" else None
results = []
print("" if gpu else "Left out, no GPU: two faults, compilation, times")

# %%
# Is it the machine?
# ------------------
#
# A kernel fails. Is it wrong, or is the machine? Ask before any launch.
# On NVIDIA, ``look`` collects facts, ``diagnose`` judges in order of repair.


def look(**tensors):
    """Facts about this machine, and about tensors meant for a kernel."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    driver, gpu = ctypes.c_int(), torch.cuda.is_available()
    with contextlib.suppress(OSError):  # there may be no such library
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    return {
        "build": int(float(torch.version.cuda or 0)),
        "driver": driver.value // 1000,  # 13000 stands for CUDA 13.0
        "capability": torch.cuda.get_device_capability() if gpu else (0, 0),
        "cc": shutil.which(cc or "") or "none",
        "current": f"cuda:{torch.cuda.current_device()}" if gpu else "none",
        "tensors": {name: str(t.device) for name, t in tensors.items()},
    }


def diagnose(facts):
    """(what, as found, is it right, repair) for each check, in order."""
    build, driver, age, cc, current, tensors = facts.values()
    yield "PyTorch", f"for CUDA {build}", build > 0, "install its CUDA wheel"
    yield "driver", f"for CUDA {driver}", driver > 0, "install the driver"
    yield "driver age", f"CUDA {driver}", driver >= build, "update the driver"
    yield "a GPU", age > (0, 0), age > (0, 0), "see CUDA_VISIBLE_DEVICES"
    yield "GPU age", age, age >= (8, 0), "Triton supports 8.0 and later"
    yield "C compiler", os.path.basename(cc), cc != "none", "install gcc"
    for name, device in tensors.items():
        repair = f"launch in torch.cuda.device_of({name})"
        repair = f"pass {name}.cuda()" if device == "cpu" else repair
        yield name, f"on {device}", device == current, repair


for what, found, right, repair in diagnose(look(x=torch.ones(1).to(DEVICE))):
    print(f"{what:10} {found!s:14}", "ok" if right else f"FAULT: {repair}")

# %%
# Read it from the top: a fault may cause those below. The interpreter needs
# none of it. If all is ok and a simple kernel is right, your kernel is wrong.
#
# The kernel
# ----------
#
# This one is simple. Many *programs* run it, each with a number, ``pid``.
# Program 0 owns the first block of positions, program 1 the next. The last may
# reach past the end of the data: a *mask* switches those positions off.


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x, mask=offs < n)


# %%
# A copy need not know what the bits mean, so every dtype will do. It moves
# integers of 8 bytes if both addresses and the length are multiples of 8, else
# of 4, 2 or 1. Four warps are 128 threads, with 16 bytes for each.

BLOCK_BYTES, WARPS = 2048, 4


def copy(x, out=None):
    """Return a tensor with the bits of ``x``: any shape, any dtype.

    out: where to write, like x. Raises TypeError, ValueError with the reason.
    """
    out = torch.empty_like(x) if out is None else out
    for name, t in (("x", x), ("out", out)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}, not a tensor")
        if (t.shape, t.dtype, t.device) != (x.shape, x.dtype, x.device):
            raise ValueError(f"{name} differs from x in shape, dtype or device")
        if t.device.type != "cuda" and not (INTERPRET and t.is_cpu):
            raise ValueError(f"{name} is on {t.device}; pass {name}.cuda()")
        plain = t.layout == torch.strided and t.is_contiguous()
        if not plain or t.is_conj() or t.is_neg():
            plain = f"{name}.clone(memory_format=torch.contiguous_format)"
            raise ValueError(f"{name} is not contiguous; pass {plain}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient")
    size = x.numel() * x.element_size()
    if 0 < abs(out.data_ptr() - x.data_ptr()) < size:
        raise ValueError("out overlaps x in part; pass a new out")
    if size == 0:
        return out  # there is nothing to launch
    word = math.gcd(x.data_ptr(), out.data_ptr(), size, 8)
    n, block, integer = size // word, BLOCK_BYTES // word, f"int{8 * word}"
    words = [triton.reinterpret(t, getattr(tl, integer)) for t in (x, out)]
    with torch.cuda.device_of(x):  # launch where the data is
        copy_kernel[(triton.cdiv(n, block),)](*words, n, block, num_warps=WARPS)
    return out


def copy_ref(x):
    return x.clone()


# %%
# Is it right? Random bytes go into the middle of a buffer full of ``0xff``.
# Every bit must arrive, and none may be written around them.

for n in [0, 1, 127, 128, 129, 1003, 98_432] + [2**26 + 3] * bool(gpu):
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        size, start = n * dtype.itemsize, 3 * dtype.itemsize
        x = torch.randint(0, 256, (size,), device=DEVICE, dtype=torch.uint8)
        room = torch.full((size + 99,), 0xFF, device=DEVICE, dtype=torch.uint8)
        expected = copy_ref(room)
        expected[start : start + size] = x
        copy(x.view(dtype), out=room[start : start + size].view(dtype))
        if not torch.equal(room, expected):
            raise RuntimeError(f"copy is wrong for {n} elements of {dtype}")
    print(f"{n:10,} elements of 1, 2 and 16 bytes: every bit is right")

# %%
# So machine and kernel are right. What would a fault have said by itself? Child
# processes provoke three, and ask for the repair.

CHILD = "import contextlib, ctypes, os, shutil, sys, torch, triton\n"
CHILD += "import triton.language as tl\n"
CHILD += "\n".join(map(inspect.getsource, (copy_kernel.fn, look, diagnose)))
CHILD += """
x = torch.ones(4, device=sys.argv[1])
print(*(row[3] for row in diagnose(look(x=x)) if not row[2]), sep="; ")
copy_kernel[(1,)](x, x, 4, BLOCK_SIZE=4)
"""
own = dict(os.environ, TRITON_INTERPRET="0")
own.pop("CC", None)
with tempfile.TemporaryDirectory() as folder:
    faults = {"GPU hidden": ("cpu", {"CUDA_VISIBLE_DEVICES": ""})}
    nowhere = {"PATH": "", "TRITON_CACHE_DIR": folder}
    if gpu:
        faults |= {"no gcc": ("cuda", nowhere), "CPU tensor": ("cpu", {})}
    path = os.path.join(folder, "child.py")
    print(CHILD, file=open(path, "w"), flush=True)
    for name, (device, change) in faults.items():
        run = [sys.executable, path, device]
        run = subprocess.run(run, env=own | change, capture_output=True)
        print(f"{name}:", *run.stderr.decode().strip().splitlines()[-1:])
        print("    repair:", run.stdout.decode(), end="")

# %%
# Three things to wait for
# ------------------------
#
# What does a kernel cost that does nothing? The first call compiles it. The
# result stays in memory, and in a folder on disk (an empty one, here). After
# that it depends on who looks. The clock on the wall sees all, ``do_bench``
# hides work of the CPU, a CUDA graph has it done in advance. The helper
# ``clock`` is explained in :lesson:`measuring`.


@triton.jit
def empty_kernel():
    pass


def clock(calls):
    """us per call by the wall clock: median, 20 % and 80 % of nine rounds."""
    run = lambda: ([call() for call in calls], torch.cuda.synchronize())
    times = torch.tensor(timeit.repeat(run, number=1, repeat=10)[1:])
    levels = torch.tensor([0.5, 0.2, 0.8])
    return (times.quantile(levels) * 1e6 / len(calls)).tolist()


def record(values, **row):
    results.append(row | dict(zip(("value", "low", "high"), values)))


launch = 10.0  # us, an example
if gpu:
    empty, graph, us = lambda: empty_kernel[(1,)](), torch.cuda.CUDAGraph(), {}
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for how in ("first", "second"):
            us[how] = [timeit.timeit(empty, number=1) * 1e6] * 3
    us["wall"] = clock([empty] * 1000)
    with torch.cuda.graph(graph):
        [empty() for _ in range(100)]  # so 1 ms is 10 us for each
    for how, call, u in ("do_bench", empty, 1e3), ("graph", graph.replay, 10):
        ms = triton.testing.do_bench(call, quantiles=[0.5, 0.2, 0.8])
        us[how] = [t * u for t in ms]
    for how in us:
        record(us[how], provider=f"triton:{how}", metric="us", kernel="empty")
        print(f"empty kernel, {how:8}: {us[how][0]:9.2f} us")
    launch = us["wall"][0]

# %%
# A copy adds bytes: ``2 * n * size``, as ``n`` elements are read and written.
# Other kernels add arithmetic. All three overlap, and the longest decides:
# ``max(launch, bytes / bandwidth, FLOP / FLOP rate)``.
#
# The kernel is *launch-bound*, *memory-bound* or *compute-bound*. To see all of
# them, the next one does ``K`` multiply-adds, 2 FLOP each, on every element.


@triton.jit
def fma_kernel(x_ptr, out_ptr, n, a, K: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offs, mask=offs < n)
    for _ in tl.range(0, K, loop_unroll_factor=16):
        x = a * x + (1 - a)
    tl.store(out_ptr + offs, x, mask=offs < n)


def fma(x, out, k, a=1 - 2**-12):
    fma_kernel[(triton.cdiv(len(x), 1024),)](x, out, len(x), a, k, 1024)


x = torch.linspace(-3, 3, 1003, device=DEVICE)
for k in (1, 16, 100, 1024):
    fma(x, out := x * torch.nan, k)
    exact = 1 + (x.double() - 1) * (1 - 2**-12) ** k
    torch.testing.assert_close(out.double(), exact, atol=5e-7 * k, rtol=0)
    print(f"{k:4} multiply-adds: error {(out - exact).abs().max():.1e}")

# %%
# Predict, then measure by the wall clock. Each call takes the next slice of two
# large tensors: a large slice is not in the L2 cache yet. The ceiling copies
# them whole. The FLOP rate is nominal: a multiply-add per FP32 unit and cycle.

sizes, counts = [2**e for e in range(28, 6, -2)], [4**e for e in range(6)]
roof, rate = [1000.0], 10  # GB/s and TFLOP/s, an example
if gpu:
    torch.cuda.empty_cache()  # the check has left blocks
    sizes = [n for n in sizes if 12 * n < torch.cuda.mem_get_info()[0]]
    src, dst = torch.randn(2, sizes[0], device=DEVICE)
    us = clock([lambda: dst.copy_(src)] * 20)
    print(f"sizes that fit: from {sizes[-1]} to {sizes[0]:,}")
    roof = [8e-3 * sizes[0] / us[i] for i in (0, 2, 1)]
    few = (7, 0) <= (gpu.major, gpu.minor) <= (8, 0)
    units = gpu.multi_processor_count * (64 if few else 128)
    rate = 2 * units * getattr(gpu, "clock_rate", 10**6) / 1e9
large = min(sizes[0], 2**26)
bound = lambda n, k: max(launch, 8e-3 * n / roof[0], 2e-6 * n * k / rate)
times = {"predicted": [bound(n, 0) for n in sizes]}
later = {"predicted": [bound(large, k) for k in counts], "triton": []}
peers = {"torch": lambda x, y: y.copy_(x), "triton": copy}
bare = lambda x, y, n: copy_kernel[(n // 256,)](x, y, n, 256, num_warps=2)
peers["triton:1KiB"] = lambda x, y: bare(x, y, len(x))

for n in sizes if gpu else ():
    pairs = [*zip(src[: 32 * n].split(n), dst[: 32 * n].split(n))]
    case = dict(N=n, bytes=8 * n, dtype="float32")
    record(roof, provider="ceiling", metric="GB/s", **case)
    for name, f in peers.items():
        calls = [lambda x=x, y=y: f(x, y) for x, y in pairs]
        us = clock(calls * 16)
        speed = [8e-3 * n / us[i] for i in (0, 2, 1)]
        record(us, provider=name, metric="us", **case)
        record(speed, provider=name, metric="GB/s", **case)
        times.setdefault(name, []).append(us[0])
        print(f"{n:11,} {name:11} {us[0]:6.1f} us {speed[0]:7.1f} GB/s")
for k in counts if gpu else ():
    us = clock([lambda: fma(src[:large], dst[:large], k)] * 20)
    record(us, provider="triton:fma", metric="us", N=large, K=k)
    later["triton"].append(us[0])
    print(f"K={k}: {us[0]:.1f} us, predicted {bound(large, k):.1f} us")

looks = {"predicted": ("--", "#7f7f7f", 3), "torch": ("o-", "#7f7f7f", 2)}
looks |= {"triton": ("s-", "#3B82C4", 2), "triton:1KiB": ("^-", "#2A9070", 2)}
_, axes = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained")
speeds = {c: [8e-3 * n / t for n, t in zip(sizes, times[c])] for c in times}
panels = (sizes, times, "us"), (sizes, speeds, "GB/s"), (counts, later, "us")
for panel, (xs, curves, unit) in zip(axes, panels):
    for name, ys in curves.items():
        mark, color, z = looks[name]
        panel.loglog(xs[: len(ys)], ys, mark, c=color, zorder=z, label=name)
    panel.set(xlabel="K" if xs is counts else "N", ylabel=unit)
axes[0].legend(fontsize=7)
plt.show()

# %%
# Figure. One call, measured and predicted (dashed). Left and middle, a copy of
# ``N`` floats: launch-bound, then memory-bound. Right, ``K`` multiply-adds on
# each of many floats: memory-bound, then compute-bound.
#
# A copy of ``2**10`` floats took :measured:`copy triton metric=us N=2**10`, one
# of ``2**20`` took :measured:`copy triton metric=us N=2**20`. The first without
# the wrapper, :measured:`copy triton:1KiB metric=us N=2**10`: checks cost time.
# PyTorch launches from C++: :measured:`copy torch metric=us N=2**10`.
# From ``2**26`` floats on, the worst ratio to the ceiling is
# :measured:`copy min(triton/ceiling) metric=GB/s N>=2**26`. With 1 KiB in a
# program, and so twice as many to start, it is
# :measured:`copy min(triton:1KiB/ceiling) metric=GB/s N>=2**26`.
#
# .. admonition:: Takeaway
#
#    Machine first, kernel second. Then ask which of three it waits for: launch,
#    memory or arithmetic. Only the longest is worth shortening.
#
# Exercises
# ---------
#
# - Run the script twice without the empty folder. What does a first call cost?
# - Predict the ``K`` at which the right curve bends, then measure around it.
#
# Reading
# -------
#
# - Roofline, the paper (2009): https://doi.org/10.1145/1498765.1498785
