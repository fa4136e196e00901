r"""
Loads and masks: reach into memory, stop at the edge
====================================================

Blocks come in powers of two. Data does not. Here you compute addresses, switch
off what lies past the end, and see what that costs.

- Which data does one program own? A block of offsets, some past the end.
- How does it move? Through pointers, one for each position, under a mask.
- What limits the speed? Bandwidth, if one load may fetch enough bytes.
"""

import os
import re
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
gpu = DEVICE == "cuda"
results, excerpts = [], {}
if not gpu:
    print("Left out, no GPU: variants, generated code, speed")

# %%
# From lanes to addresses
# -----------------------
#
# ``tl.arange(0, 8)`` is a block of 8 numbers, one for each position, or *lane*.
# It is not ``threadIdx``: one thread may hold many lanes. Add the start of the
# program, and lanes become *offsets*. Add those to a pointer, and they become
# pointers. This kernel writes all of it down.


@triton.jit
def address_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, BLOCK_SIZE)
    offs = tl.program_id(0) * BLOCK_SIZE + lane
    row = out_ptr + 4 * offs
    tl.store(row, lane)
    tl.store(row + 1, offs)
    tl.store(row + 2, (x_ptr + offs).to(tl.int64))  # an address, in bytes
    tl.store(row + 3, offs < n)


for dtype in (torch.float16, torch.float32):
    x = torch.zeros(13, dtype=dtype, device=DEVICE)
    seen = torch.empty(16, 4, dtype=torch.int64, device=DEVICE)
    address_kernel[(2,)](x, seen, 13, 8)
    seen[:, 2] -= x.data_ptr()
    print(dtype, "byte:", seen[:, 2].tolist())
_, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
for i, values in enumerate(seen.tolist()):
    color, hatch = ("#3B82C4", "") if values[3] else ("#D1495B", "//")
    at = i + i // 8 / 2
    axes.bar(at, 5, 0.9, -0.5, alpha=0.35, color=color, hatch=hatch)
    for row, value in enumerate([i // 8, *values]):
        axes.text(at, row, value, ha="center", va="center")
names = ["pid", "lane", "offset", "byte", "mask"]
axes.set(xticks=[], yticks=range(5), yticklabels=names, ylim=(4.5, -0.5))
plt.show()

# %%
# Figure. What two programs of 8 lanes computed for 13 float32 elements. Byte is
# the distance from ``x_ptr``. Offsets 13, 14 and 15 have mask 0 (hatched).
#
# An offset counts elements. The pointer knows its dtype, so ``x_ptr + 1`` is 2
# bytes away in float16 and 4 in float32. Do not multiply by the size yourself.
#
# Past the end
# ------------
#
# What is there? Often memory that exists and belongs to someone else. Here 99
# lies behind the 13 elements of ``x``, and 7 behind those of ``out``.


@triton.jit
def window_kernel(x_ptr, out_ptr, n_load, n_store):
    offs = tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < n_load)
    tl.store(out_ptr + offs, x, mask=offs < n_store)


x = torch.tensor([1.0] * 13 + [99.0] * 3, device=DEVICE)
for n_load, n_store in [(16, 16), (13, 16), (13, 13)]:
    room = torch.full((16,), 7.0, device=DEVICE)
    window_kernel[(1,)](x, room, n_load, n_store)
    print(f"load {n_load}, store {n_store}: out[13:16] = {room[13:].tolist()}")

# %%
# The first line read one neighbour and overwrote the other. Nobody complained.
# The second stored its masked lanes: zeros. Do not count on that. Without
# ``other`` the language leaves a masked lane undefined; this build has zero. In
# the last line both masks hold, and the 7s survive.
#
# Would ``tl.where`` after the load do? Here ``2**45`` stands for "no index".
# The kernel gets its own process, as a fault ends it (on a CPU, by status -11).

CHILD = """import torch, triton, triton.language as tl
@triton.jit
def gather_kernel(x_ptr, i_ptr, out_ptr, n):
    i = tl.load(i_ptr + tl.arange(0, 4))
    x = {}
    tl.store(out_ptr + tl.arange(0, 4), x)
x, out = torch.arange(16.0, device="{}").view(2, 8)
i = torch.tensor([0, 5, 2**45, 3], device=x.device)
gather_kernel[(1,)](x, i, out, 8)
print(out[:4].tolist())"""
guarded = "tl.load(x_ptr + i, mask=i < n, other=0)"
for line in ("tl.where(i < n, tl.load(x_ptr + i), 0)", guarded):
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        print(CHILD.format(line, DEVICE), file=file, flush=True)
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        child = subprocess.run([sys.executable, "-P", file.name], **pipe)
    said = re.findall(r"^(?:\[|\S+Error).*", child.stdout, re.M)
    print(f"{line}\n    exit status {child.returncode}", *said[:1])

# %%
# ``tl.where`` chooses among values already fetched. The guard belongs before.
#
# What a masked lane holds
# ------------------------
#
# The lane takes part in the next operation and must not change its result. So
# ``other`` is the *neutral element* of that operation. Which one fits a sum, a
# maximum, a softmax, whose outputs add up to 1? Try 1003 values from -7 to -1.


@triton.jit
def summary_kernel(x_ptr, out_ptr, n, other, BLOCK_SIZE: tl.constexpr):
    offs = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offs, mask=offs < n, other=other)
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.max(x))
    tl.store(out_ptr + 2, tl.sum(tl.where(offs < n, tl.softmax(x), 0)))


x, right = torch.linspace(-7, -1, 1003, device=DEVICE), []
ref = torch.tensor([x.double().sum(), x.max(), 1])
for other in (0.0, -4.0, float("-inf")):
    got = torch.full((3,), torch.nan, device=DEVICE)
    summary_kernel[(1,)](x, got, 1003, other, 1024)
    right += torch.isclose(got.double().cpu(), ref, rtol=1e-5).tolist()
    cells = zip(("sum", "max", "softmax"), got.tolist(), right[-3:])
    text = (f"{k} {v:8.2f} {'ok' if r else 'WRONG':7}" for k, v, r in cells)
    print(f"other {other:4}: ", *text)
if right != [True, False, False, False, True, False, False, True, True]:
    raise RuntimeError(f"float64 says {ref.tolist()}")

# %%
# 0 for a sum, -inf for a maximum and for softmax. A wrong one gives no message,
# or is right by luck (-4). ``tl.where`` refills lanes for the next operation.
#
# Why shapes are constants
# ------------------------
#
# Why not ask for just ``n`` lanes, at run time or as the constant 1003?


@triton.jit
def runtime_range_kernel(out_ptr, n):
    tl.store(out_ptr + tl.arange(0, n), 1)


@triton.jit
def odd_range_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), 1)


for kernel in (runtime_range_kernel, odd_range_kernel):
    try:
        kernel[(1,)](torch.empty(1003, device=DEVICE), 1003)
    except Exception as error:
        print(f"{type(error).__name__}: {error}\n")

# %%
# The compiler deals lanes out to threads and registers, so it must know their
# number: a shape is a ``tl.constexpr``. A power of two divides evenly among the
# threads. The data stays free: cover it with blocks and mask the rest.
#
# What does a constant cost? A variant in Triton's cache for each value. Which
# launches of the next kernel, which doubles a vector, add one?


@triton.jit
def twice_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)  # 32 bits wrap at 2**31 elements
    offs = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + x, mask=mask)


x, out = torch.ones(2, 1024, device=DEVICE)
cases = [(x, n, 256, 4) for n in (16, 32, 0, 17, 1003, 1, 2**31)]
cases += [(x[1:], 16, 256, 4), (x, 16, 512, 4), (x, 16, 512, 8)]
for view, n, block, warps in cases if gpu else ():
    source = twice_kernel[(1,)](view, out, n, block, num_warps=warps).src
    cache = twice_kernel.device_caches[torch.cuda.current_device()][0]
    case = f"x%16={view.data_ptr() % 16} n={n:<10} BLOCK_SIZE={block}"
    kind = source.signature["n"] + (":16" if source.attrs.get((2,)) else "")
    print(f"{case} num_warps={warps}  variants {len(cache)}  n is {kind}")

# %%
# Each constant makes a variant. So does each kind of ``n`` (a multiple of 16,
# no multiple, 1, beyond 32 bits), and of a pointer (aligned to 16 bytes, not).
#
# What the mask costs
# -------------------
#
# Doubling moves ``2 * n * size`` bytes for ``n`` additions, so the copy rate is
# its bound. A thread should load 16 bytes at once. It can if the compiler knows
# that they are all live or all masked. When ``n`` is a multiple of 16 it does.
# For 1003, mask only the last block, or promise equal masks in groups of 16.


@triton.jit
def twice_full_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    if (pid + 1) * BLOCK_SIZE <= n:
        x = tl.load(x_ptr + offs)
        tl.store(out_ptr + offs, x + x)
    else:
        x = tl.load(x_ptr + offs, mask=offs < n)
        tl.store(out_ptr + offs, x + x, mask=offs < n)


@triton.jit
def twice_promised_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = tl.max_constancy(offs < n, 16)
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + x, mask=mask)


for n in (1008, 1003) if gpu else ():
    for kernel in (twice_kernel, twice_full_kernel, twice_promised_kernel):
        x, room = torch.full((2, 1024), 7.0, device=DEVICE).half()
        ptx = kernel[(2,)](x, room, n, 512, num_warps=2).asm.get("ptx", "")
        loads = sorted(set(re.findall(r"ld\.global[.\w]*", ptx)))
        over = (room[n:] != 7).sum().item()
        print(f"{n} {kernel.fn.__name__:21} wrote {over} beyond n, by {loads}")

# %%
# A promise is not checked. For 1003 it was false, and the kernel wrote past the
# end. The branch keeps the wide load and stays right. Is it as fast? A program
# takes 2 KiB here, 16 bytes for each of 128 threads. It writes into a room full
# of NaN, so a forgotten element shows, and so does one too many.

COLORS = {"triton": "#3B82C4", "triton:full": "#2A9070"}
COLORS |= {"torch.compile": "#A56CC1"}
big = 2**27 if gpu and torch.cuda.mem_get_info()[0] > 6e9 else 2**24
src, dst = torch.ones(2, 2 * big if gpu else 0, device=DEVICE)
sizes = [1, 511, 512, 513, 1003, 1008, 1023, 1024, 1025] + [big, big - 5] * gpu
_, axes = plt.subplots(figsize=(7, 5), layout="constrained")
for n, dtype in [(n, d) for d in (torch.float32, torch.float16) for n in sizes]:
    x = torch.randn(n, dtype=dtype, device=DEVICE)
    room = torch.empty(n + 32, dtype=dtype, device=DEVICE)
    out, block = room[16:-16], 2048 // x.itemsize
    grid = (triton.cdiv(n, block),)
    case = dict(N=n, bytes=2 * n * x.itemsize, dtype=str(dtype)[6:])
    calls = {"torch": lambda: torch.mul(x, 2, out=out)}
    if n >= big - 5:
        torch.compiler.reset()  # compile for this size alone
        compiled = torch.compile(torch.mul, dynamic=False)
        calls["torch.compile"] = lambda: compiled(x, 2, out=out)
        calls["ceiling"] = lambda: dst.copy_(src)
    calls["triton"] = lambda: twice_kernel[grid](x, out, n, block)
    calls["triton:full"] = lambda: twice_full_kernel[grid](x, out, n, block)
    for provider, call in calls.items():
        room.fill_(torch.nan)
        try:
            call()
        except Exception as error:
            if provider != "torch.compile":  # which needs a C compiler
                raise
            print(f"Left out: {provider}: {error}")
            continue
        right = torch.equal(out, x + x) and room.isnan().sum() == 32
        if not right and provider != "ceiling":
            raise RuntimeError(f"{provider} is wrong for {n} of {dtype}")
        if n >= big - 5:
            moved = 16 * big if provider == "ceiling" else case["bytes"]
            ms = triton.testing.do_bench(call, quantiles=[0.8, 0.5, 0.2])
            low, value, high = (moved / t / 1e6 for t in ms)
            row = dict(provider=provider, low=low, value=value, high=high)
            results.append(case | row | dict(metric="GB/s"))
            label = f"{case['dtype']} n%16={n % 16} {provider}"
            print(f"{value:5.0f} GB/s  {label}")
            look = dict(color=COLORS.get(provider, "#7f7f7f"))
            axes.barh(label, value, hatch="//" * ("ceil" in provider), **look)
axes.set(xlabel="GB/s", ylim=(19.5, -0.5))
print(f"Right in each bit, and nothing else written: {sizes}")
plt.show()

# %%
# Figure. Bandwidth of doubling a vector, its length a multiple of 16 or not:
# PyTorch, compiled, a copy (hatched), the masked kernel and the branching one.
#
# In float16, a length that is no multiple of 16 leaves ``twice_kernel``
# :measured:`loads_and_masks triton/torch metric=GB/s N<2**27 dtype=float16`
# of PyTorch's speed: a thread makes eight small loads, not one wide one. The
# kernel of ``torch.compile`` has :measured:`loads_and_masks
# torch.compile/torch metric=GB/s N<2**27 dtype=float16`. With the branch it is
# :measured:`loads_and_masks triton:full/torch metric=GB/s N<2**27
# dtype=float16`. In float32, even loads of 4 bytes kept up with PyTorch.
#
# What does the GPU run? Five translations later, find the addition.

LINE = r"^(?:#blocked|  tt\.func|    [%t]|  %\d+ = (?!ext|bit)|  tail|\t[@a-z]"
LINE += r"|[-\d]{2}(?::.){4}\t(?!NOP|BRA)).*"  # the lines to show
DROP = r" loc\((?:\(.*?\)|[^()])*\)|, !dbg.*| #\d+|^[-\d]{2}(?::.){4}|\t"
excerpts["python"] = "".join(twice_kernel.raw_src) if gpu else ""
for level in ("ttir", "ttgir", "llir", "ptx", "sass") if gpu else ():
    kernel = twice_kernel[(8,)](src, dst, 1008, 128, num_warps=1)
    try:
        code = kernel.asm[level]
    except Exception as error:  # SASS takes the disassembler of CUDA
        code = f"\tadd left out: {error}"
    lines = [re.sub(DROP, "", s) for s in re.findall(LINE, code, re.M)][-25:]
    excerpts[level] = "\n".join(lines)
    print(f"{level:6}", re.findall(r"\S*add[f. ].*", excerpts[level], re.I)[-1])

# %%
# .. admonition:: Takeaway
#
#    Guard loads and stores. Choose ``other`` for the operation that follows.
#    Let the compiler see which loads are whole.
#
# Exercises
# ---------
#
# - Multiply ``n`` numbers with ``tl.reduce``. Which ``other`` is neutral?
# - Pass ``n`` inside a tensor. Which load do you get? Try ``n // 16 * 16``.
#
# Reading
# -------
#
# - Memory: https://triton-lang.org/main/python-api/triton.language.html
