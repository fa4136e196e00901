r"""
Programs: one kernel, many instances
====================================

A kernel is written once and runs many times at once. Each run is a *program
instance*. Here every instance leaves its mark, so that you can see what it
owns, when it came and what it was given.

- Which data does one program own? The positions that it works out from its
  number, ``pid``.
- How does it move? Through a pointer. Nothing else of a tensor arrives.
- What limits the speed? Nothing here. The GPU decides how many run at a time.

Without a GPU, Triton's interpreter runs the programs one after another.
"""

import os
import tempfile

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl
from triton.language.extra import cuda

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
ON_CUDA = DEVICE == "cuda" and torch.version.hip is None
results = []
print("" if ON_CUDA else "Left out, no NVIDIA GPU: programs at once, threads")

# %%
# One program
# -----------
#
# CUDA asks: what does one *thread* do? Its threads are the unit of thought:
# single instruction, multiple threads, or SIMT. Triton asks: what does one
# *program* do with its block? That is single program, multiple data, or SPMD.
#
# .. list-table::
#    :header-rows: 1
#
#    * -
#      - CUDA: SIMT
#      - Triton: SPMD, by blocks
#    * - you write code for
#      - one thread
#      - one program
#    * - it knows its place by
#      - ``blockIdx`` and ``threadIdx``
#      - ``tl.program_id``; a thread has no name
#    * - it computes with
#      - single values
#      - blocks of values, and single ones
#    * - threads are divided by
#      - you
#      - the compiler: you only say how many warps
#    * - they wait for each other
#      - where you say so
#      - where the compiler sees a need
#
# What does a program own? Here each one writes its number ``pid`` into all
# positions that it owns: ``BLOCK_SIZE`` of them, from ``pid * BLOCK_SIZE`` on,
# as far as there is data.


@triton.jit
def owner_kernel(out_ptr, n, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + offs, pid, mask=offs < n)


# %%
# The grid
# --------
#
# How many programs are needed? Enough for all ``n`` positions: ``n`` divided by
# the block size, *rounded up*. ``triton.cdiv`` does that. The grid may also be
# a function: Triton calls it with ``meta``, the arguments of the launch by
# name. So the block size is written once, and an autotuner may choose it.


def owners(out, block_size, grid=None):
    """Write to out[i] which program owns position i.

    out: contiguous vector of int32. grid: as many programs as needed if None.
    Raises TypeError for anything else, ValueError for another layout or place.
    """
    if not isinstance(out, torch.Tensor) or out.dtype != torch.int32:
        raise TypeError("out is not a tensor of torch.int32")
    if out.layout != torch.strided or out.ndim != 1 or not out.is_contiguous():
        raise ValueError("out is not a contiguous vector")
    if out.device.type not in (["cuda", "cpu"] if INTERPRET else ["cuda"]):
        raise ValueError(f"out is on {out.device}; pass out.cuda()")
    n = out.numel()
    if grid is None:
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK_SIZE"]),)
    if n > 0:  # else there is nothing to launch
        with torch.cuda.device_of(out):
            owner_kernel[grid](out, n, BLOCK_SIZE=block_size)
    return out


def owners_ref(n, block_size):
    return torch.arange(n, dtype=torch.int32) // block_size


n = 37
strips = {
    "blocks of 8, rounded up": (8, None),
    "blocks of 16, rounded up": (16, None),
    "blocks of 8, rounded down": (8, (n // 8,)),
}
_, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
for row, (label, (block, grid)) in enumerate(strips.items()):
    out = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    for i, pid in enumerate(owners(out, block, grid).tolist()):
        color = "#3B82C4" if pid >= 0 else "#D1495B"
        alpha = 0.3 + 0.3 * (pid % 2)
        axes.barh(row, 1, 0.8, left=i, color=color, alpha=alpha, linewidth=0)
        axes.text(i + 0.5, row, pid, ha="center", va="center", fontsize=7)
    print(f"{label}: {out.max() + 1} programs, {(out < 0).sum()} not owned")
axes.grid(False)
axes.set(xlim=(0, n), ylim=(2.6, -0.6), xlabel="position")
axes.set_yticks(range(3), strips)
plt.show()

# %%
# Figure. What the programs wrote into 37 positions: the number of the program.
# Blocks of 8 take 5 programs, blocks of 16 take 3. Rounded down to 4 programs,
# the last 5 positions still hold -1: no program owned them.
#
# The last program of the first two strips owns fewer positions. The mask
# ``offs < n`` stopped it at the end. Check that nothing was written beyond, for
# lengths around a multiple of the block.

for n in (0, 1, 127, 128, 129, 1009, 98_432):
    room = torch.full((n + 256,), -1, dtype=torch.int32, device=DEVICE)
    owners(room[:n], 128)
    right = torch.equal(room[:n].cpu(), owners_ref(n, 128))
    if not right or not bool((room[n:] == -1).all()):
        raise RuntimeError(f"wrong owners of {n} positions")
    print(f"{n:6} positions, {triton.cdiv(n, 128):3} programs: right")

# %%
# What arrives
# ------------
#
# On the host a tensor knows its shape, strides, dtype and device. What is left
# of it in a kernel? ``tl.static_print`` tells, while the kernel is compiled.


@triton.jit
def receive_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, SHOW: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    if SHOW:
        tl.static_print("x_ptr:", x_ptr.type, "of shape", x_ptr.shape)
        tl.static_print("x, loaded:", x.type, "of shape", x.shape)
    tl.store(out_ptr + offs, x, mask=offs < n)


x = torch.arange(12.0, device=DEVICE).view(3, 4)
out = torch.full((6,), torch.nan, device=DEVICE)
with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
    triton.knobs.cache.dir = folder  # empty, so that it is compiled, and prints
    receive_kernel[(1,)](x, out, 6, BLOCK=8, SHOW=True)
views = {"x[:2, :3]": x[:2, :3], "x.t()[:3, :2]": x.t()[:3, :2]}
views["x[1:, 1:]"] = x[1:, 1:]
for name, t in views.items():
    receive_kernel[(1,)](t, out.fill_(torch.nan), 6, BLOCK=8, SHOW=False)
    print(f"\n{name}: shape {tuple(t.shape)}, strides {t.stride()}")
    print(f"  host   {t.flatten().int().tolist()}")
    print(f"  kernel {out.int().tolist()}")

# %%
# ``x_ptr`` is one address of a float. The block ``x`` was made in the kernel,
# with a shape fixed at compile time. Of a view, only the address of its first
# element arrives. The kernel reads on from there, and meets numbers that are
# not in the view. Who wants strides has to pass them.
#
# Two sides
# ---------
#
# .. list-table::
#    :header-rows: 1
#
#    * -
#      - host code
#      - kernel
#    * - runs
#      - on the CPU, once a call
#      - on the GPU, once a program
#    * - is
#      - Python
#      - a part of Python, compiled at the first call
#    * - may call
#      - everything, and launch kernels
#      - ``tl`` functions and functions with ``@triton.jit``
#    * - sees a tensor as
#      - shape, strides, dtype, device
#      - a pointer
#    * - decides
#      - grid, block size, what to refuse
#      - offsets, masks, arithmetic
#
# What happens to a call on the wrong side?

for call, values in ((tl.arange, (0, 8)), (owner_kernel, (out, 6, 8))):
    try:
        call(*values)
    except Exception as error:
        print(f"{call.__name__}: {error}".split(" (")[0])

# %%
# In which order?
# ---------------
#
# Do programs run in the order of their numbers? Let each draw a ticket when it
# begins and another when it ends. ``tl.atomic_add`` returns the old value and
# adds 1, and no two programs get the same. On the GPU, a program also notes its
# multiprocessor (SM) and waits 20 microseconds before it ends, so that there is
# time to meet others.


@triton.jit
def ticket_kernel(next_ptr, begin_ptr, end_ptr, sm_ptr, NANO: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(begin_ptr + pid, tl.atomic_add(next_ptr, 1))
    if NANO > 0:
        tl.store(sm_ptr + pid, cuda.smid())
        start = cuda.globaltimer()
        now = start
        while now - start < NANO:
            now = cuda.globaltimer()
    tl.store(end_ptr + pid, tl.atomic_add(next_ptr, 1))


def tickets(programs, device, nano):
    """Tickets of programs at begin and end, and their SMs (-1: not asked)."""
    begin, end, sm = torch.full((3, programs), -1, device=device).int()
    next_ticket = torch.zeros(1, dtype=torch.int32, device=device)
    ticket_kernel[(programs,)](next_ticket, begin, end, sm, nano)
    return begin.cpu(), end.cpu(), sm.cpu()


fit, nano = 1, 0  # the interpreter runs one program at a time
if ON_CUDA:
    gpu = torch.cuda.get_device_properties(0)
    threads = gpu.max_threads_per_multi_processor
    fit, nano = gpu.multi_processor_count * threads // 128, 20_000
programs = max(12, 5 * fit // 2)
for _ in range(2):  # the first call compiles
    begin, end, sm = tickets(programs, DEVICE, nano)
steps = torch.zeros(2 * programs, dtype=torch.int32)
steps[begin], steps[end] = 1, -1
if steps.count_nonzero() < 2 * programs:
    raise RuntimeError("two programs drew the same ticket")
counts = {"programs": programs, "SMs": len(sm.unique())}
counts["alive"] = steps.cumsum(0).max().item()
counts["late"] = (begin > end.min()).sum().item()
print(f"the first to come: {begin.argsort()[:10].tolist()}")
print(f"{programs} programs, {counts['alive']} alive at most, room for {fit}")
print(f"first ticket of an end: {end.min()}; begun later: {counts['late']}")
for metric, value in counts.items() if ON_CUDA else ():
    row = dict(provider="triton", metric=metric, num_warps=4)
    results.append(row | dict(value=value, low=value, high=value))

some = torch.arange(0, programs, max(1, programs // 240))
_, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.vlines(some, begin[some], end[some], "#3B82C4", linewidth=0.7)
axes.plot(some, begin[some], ".", color="#3B82C4", markersize=3, label="begin")
axes.plot(some, end[some], "+", color="#2A9070", markersize=4, label="end")
axes.set(xlabel="pid", ylabel="ticket")
axes.legend()
plt.show()

# %%
# Figure. Tickets that programs drew at their begin and their end, joined by a
# line. On a GPU a first wave begins before any program ends. Each later program
# begins when another has ended. In the interpreter they come one by one.
#
# Of :measured:`programs triton metric=programs` programs, at most
# :measured:`programs triton metric=alive` were alive at a time: all that fit on
# :measured:`programs triton metric=SMs` SMs. Two rules follow. No order is
# promised, so a program must not need what another computes. And none may wait
# for another: if the first wave waited for the last program, all would hang.
#
# Who holds which element?
# ------------------------
#
# ``num_warps=4`` gives a program 4 warps of 32 threads, whatever its block. How
# do 128 threads hold 1024 elements? Triton gives no name to a thread, but
# inline assembly may ask for it: every element reports who computes it.


@triton.jit
def thread_kernel(out_ptr, BLOCK_SIZE: tl.constexpr):
    offs = tl.arange(0, BLOCK_SIZE)
    thread = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [offs], tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr + offs, thread)


_, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for warps in (1, 4, 8) if ON_CUDA else ():
    out = torch.full((1024,), -1, dtype=torch.int32, device=DEVICE)
    thread_kernel[(1,)](out, 1024, num_warps=warps)
    threads, each = out.unique(return_counts=True)
    each = each.unique().tolist()
    print(f"num_warps={warps}: {len(threads)} threads, with {each} elements")
    if warps == 4:
        axes.plot(out.cpu(), color="#3B82C4", drawstyle="steps-mid")
        for warp in range(4):
            axes.axhline(32 * warp, color="#7f7f7f", linestyle=":")
            axes.text(1030, 32 * warp + 10, f"warp {warp}")
axes.set(xlabel="element", ylabel="thread", ylim=(0, 128), xlim=(0, 1024))
plt.show()

# %%
# Figure. Which of the 128 threads computed each of 1024 elements, with
# ``num_warps=4``. The number climbs every few elements, and starts again when
# all threads have had their turn.
#
# A program is not a thread, and a position is not one either. You choose the
# block and the number of warps; the compiler divides the one among the other.
#
# .. admonition:: Takeaway
#
#    A program is the code of the kernel with a number of its own. From it the
#    program works out what it owns, in no promised order and without waiting.
#
# Exercises
# ---------
#
# - Let program ``pid`` own every fourth position instead. Draw the strip.
# - Pass ``t.stride()`` to ``receive_kernel`` and make all three views right.
# - Launch with ``num_warps=8``. How many programs are alive at most now?
#
# Reading
# -------
#
# - SPMD: https://en.wikipedia.org/wiki/SPMD
# - CUDA guide: https://docs.nvidia.com/cuda/cuda-c-programming-guide/
