r"""
Debugging: addresses, then masks, then values
=============================================

A wrong number says little about its cause. Six small broken kernels show an
order that finds it, and the tools for each step, most of them without a GPU.

- Which addresses may a program use? Those of its tensors, but no place that
  another program writes.
- What do masked positions hold? A value that does not change the result.
- Which values come out? Those of a reference, on numbers few enough to read.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available() and not os.getenv("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"  # read by import triton

import triton
import triton.language as tl

GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DEVICE = "cuda" if GPU else "cpu"
at = [os.path.join(p, "triton_memcheck.py") for p in [*sys.path, "../tools"]]
checker = [place for place in at if os.path.exists(place)]
tool = shutil.which("compute-sanitizer") if GPU else None
print("" if tool else f"Left out: {'' if GPU else 'GPU, '}compute-sanitizer")
print("" if checker else "Left out, not found: reports of triton_memcheck.py")

# %%
# Two processes
# -------------
#
# How can you look into a kernel? In the *interpreter* each line is Python on
# NumPy arrays: breakpoints work, and every address can be checked. But whether
# a process interprets is settled when it imports Triton. So a second one gets
# scripts, a kernel and what launches it, and returns what they print. Compiled,
# each script has a process of its own, for an error on a GPU often ends it.
#
# ``triton_memcheck.py``, beside this page's downloads, checks addresses. Put it
# beside any script of yours, and write ``with memcheck(): kernel[grid](...)``.
# The next cell only starts processes, skip it at first: ``run`` sends a script,
# ``show`` runs a case, prints what the checker says, and repairs the kernel.

HEAD = "import torch, triton\nimport triton.language as tl\n\nDEVICE = '{}'"
PLAIN = "print({}())"
CHECKED = "from triton_memcheck import *\nwith memcheck(): x = {}()\nprint(x)"
SECOND = """
import runpy, sys, torch, triton
for name in iter(sys.stdin.readline, ""):
    try:
        runpy.run_path(name.strip())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    print("\\n-- end --", flush=True)
"""
folder = tempfile.TemporaryDirectory()
for place in checker[:1]:
    shutil.copy(place, folder.name)
python = [sys.executable, "-W", "ignore", "-u"]
pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
pipes |= dict(stdin=subprocess.PIPE, cwd=folder.name)
env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONBREAKPOINT": ""}
second = subprocess.Popen([*python, "-c", SECOND], env=env, **pipes)


def run(case, *changes, gpu=False, call=PLAIN, feed=(), under=(), **variables):
    """Run a case, with text of its kernel replaced; return what it prints."""
    kernel = inspect.getsource(globals()[f"{case.__name__}_kernel"].fn)
    for old, new in changes:
        kernel = kernel.replace(old, new)
    text = [HEAD.format("cuda" if gpu else "cpu"), kernel]
    text += [inspect.getsource(case), call.format(case.__name__) + "\n"]
    name = case.__name__ + "_changed" * bool(changes) + ".py"
    with open(os.path.join(folder.name, name), "w") as file:
        file.write("\n\n".join(text))
    if gpu:
        own = os.environ | {"TRITON_INTERPRET": "0"} | variables
        said = subprocess.run([*under, *python, name], env=own, **pipes).stdout
    else:
        second.stdin.write("\n".join([name, *feed, ""]))
        second.stdin.flush()
        lines = iter(second.stdout.readline, "")
        said = "".join(iter(lambda: next(lines), "-- end --\n"))
    for command in feed:
        said = said.replace("(Pdb) ", f"(pdb) {command}\n", 1)
    return said.replace(folder.name + os.sep, "").strip()


def show(case, *repair, safe=True):
    """Run a case here, then interpreted and checked, then with a repair."""
    if safe:
        print(f"{DEVICE}: {case()}")
    if checker:
        print("checked:", run(case, call=CHECKED))
        for old, new in repair:
            print(f"- {old}\n+ {new}")
        print("repaired:", run(case, *repair, call=CHECKED))


# %%
# Addresses: a missing mask
# -------------------------
#
# A kernel doubles 1003 numbers, 256 in a program. The result is right. The
# symptom: 21 numbers behind it, somebody else's, have changed.


@triton.jit
def missing_mask_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, 2 * x)


def missing_mask():
    x, out = torch.ones(2, 1024, device=DEVICE)
    missing_mask_kernel[(4,)](x[:1003], out[:1003], 1003, BLOCK=256)
    return f"doubled {(out == 2).sum()}, as they were {(out == 1).sum()}"


MASK = [("x_ptr + offs", "x_ptr + offs, mask=offs < n")]
MASK += [("2 * x", "2 * x, mask=offs < n")]
show(missing_mask, *MASK)

# %%
# The report names line, argument, program and offsets: 21 positions of program
# 3, in the load and in the store. The checker masks them off and goes on.
#
# Addresses: a shape used as a stride
# -----------------------------------
#
# A window of 6 columns is copied from a buffer with rows of 8. The symptom: the
# first row is right, the others are shifted.


@triton.jit
def shape_as_stride_kernel(x_ptr, out_ptr, N, stride_xm, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N)
    tl.store(out_ptr + row * N + cols, x, mask=cols < N)


def shape_as_stride():
    x = torch.arange(32, device=DEVICE).view(4, 8)[:, :6]
    out = torch.full((4, 6), -1, device=DEVICE)
    shape_as_stride_kernel[(4,)](x, out, 6, x.stride(0), BLOCK=8)
    return out.cpu()


show(shape_as_stride, ("x_ptr + row * N", "x_ptr + row * stride_xm"))

# %%
# A contiguous tensor hides this error. The checker knows the cells of a view.
# The numbers here are their own offsets, so the result shows what was read.

rows, axes = shape_as_stride().tolist(), plt.subplots(figsize=(7, 2.6))[1]
reader = {at: f"pid {pid}" for pid, row in enumerate(rows) for at in row}
for at in range(32):
    y, x = divmod(at, 8)
    ec, hatch = ("#D1495B", "/") if x > 5 else ("gray", None)
    axes.add_patch(plt.Rectangle((x, y), 1, 1, fc="none", ec=ec, hatch=hatch))
    axes.text(x + 0.5, y + 0.7, f"{reader.get(at, '-')}\n{at}", ha="center")
axes.set(xlim=(0, 8), ylim=(4, 0), xticks=[], yticks=[])
plt.show()

# %%
# Figure. The buffer, 4 rows of 8 cells. In each cell, the program that read it
# and its offset. The hatched columns are not in the window. Program 1 should
# read offsets 8 to 13 and read 6 to 11. Cells marked ``-`` were not read.
#
# Addresses: a product beyond 32 bits
# -----------------------------------
#
# Each program copies the first number of its row. Rows are ``2**30`` elements
# apart. Both factors fit into 32 bits, so Triton multiplies in 32 bits, and
# ``2 * 2**30`` wraps.


@triton.jit
def int32_overflow_kernel(x_ptr, out_ptr, stride_xm):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * stride_xm)
    tl.store(out_ptr + row, x)


def int32_overflow():
    n = 2**31 + 1 if DEVICE == "cuda" else 1  # 2 GiB, or far too few
    x = torch.ones(n, dtype=torch.int8, device=DEVICE)
    out = torch.zeros(3, dtype=torch.int8, device=DEVICE)
    int32_overflow_kernel[(3,)](x, out, 2**30)
    return out.tolist()


WIDE = ("program_id(0)", "program_id(0).to(tl.int64)")
show(int32_overflow, WIDE, safe=False)

# %%
# Interpreted, ``x`` has one element: rows 1 and 2 are out of bounds before and
# after. What counts is the offset of row 2, negative at first. No 2 GiB needed.
#
# Addresses: two programs, one place
# ----------------------------------
#
# Each program adds its sum to one total. On a GPU several read the same old
# total, and sums are lost. Interpreted, they take turns: no value is wrong.


@triton.jit
def one_place_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + offs))
    tl.store(out_ptr, tl.load(out_ptr) + part)


def one_place():
    out = torch.zeros(1, device=DEVICE)
    one_place_kernel[(64,)](torch.ones(64 * 256, device=DEVICE), out, 256)
    return f"{out.item():.0f} of {64 * 256}"


ATOMIC = "store(out_ptr, tl.load(out_ptr) + part)", "atomic_add(out_ptr, part)"
show(one_place, ATOMIC)
print("unchecked, interpreted:", run(one_place))

# %%
# Addresses on the GPU
# --------------------
#
# ``tl.device_assert`` is a check that you write into the kernel. It needs
# ``TRITON_DEBUG=1``, ends the process, and is ignored by the interpreter. The
# same variable makes Triton check integer operations. Here ``x`` is 2 GiB long.
#
# ``compute-sanitizer``, of the CUDA toolkit, needs no change. It knows what was
# allocated, not what was sliced. And PyTorch hands out parts of large pieces,
# unless ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` is set.

ALONE = "x, out = (torch.ones(1003, device='cuda') for _ in range(2))\n"
ALONE += "missing_mask_kernel[(4,)](x, out, 1003, BLOCK=256)\nprint(out.sum())"
check = "x = tl.load", "tl.device_assert(offs < n, 'beyond n')\n    x = tl.load"
print("device_assert, interpreted:", run(missing_mask, check))
cases = [("1", missing_mask, check), ("0", int32_overflow)]
cases += [("1", int32_overflow), ("1", int32_overflow, WIDE)]
for debug, case, *changes in [*cases, ("0", one_place, ATOMIC)] * GPU:
    said = run(case, *changes, gpu=True, TRITON_DEBUG=debug)
    told = re.findall(".*Assertion.*|CUDA error.*|.*OutOfMemory.*", said)
    title = f"{case.__name__}{' changed' * len(changes)}, TRITON_DEBUG={debug}"
    first = [*told, said][0].replace(" Assertion", "\nAssertion")
    print(f"\n{title}", first, sep="\n")
OFF = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
cases = [("slices", PLAIN, OFF), ("cached", ALONE, {}), ("alone", ALONE, OFF)]
for title, call, off in cases * bool(tool):
    said = run(missing_mask, gpu=True, call=call, under=[tool], **off)
    told = re.findall(".*(?:Invalid| at |SUMMARY).*", said) or [said]
    print(f"\n{title}", *dict.fromkeys([*told[:2], told[-1]]), sep="\n")

# %%
# Masks: the wrong ``other``
# --------------------------
#
# The symptom: the largest of -1, -2, -3, -4, -5 is 0. The checker is silent,
# as all addresses are right. So what did masked positions hold? A
# ``breakpoint()`` in the kernel stops the interpreter there.


@triton.jit
def wrong_other_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr, tl.max(x, axis=0))


def wrong_other():
    x = -torch.arange(1.0, 6.0, device=DEVICE)
    out = torch.zeros(1, device=DEVICE)
    wrong_other_kernel[(1,)](x, out, 5, BLOCK=8)
    return out.item()


stop = ("tl.store", "breakpoint()\n    tl.store")
print(run(wrong_other, stop, feed=["p offs < n", "p x", "continue"]))
show(wrong_other, ("other=0.0", "other=float('-inf')"))

# %%
# Three zeros that are in no input took part. ``other`` has to be the neutral
# element of what follows: minus infinity for a maximum.
#
# Values: the wrong axis
# ----------------------
#
# The symptom: sums of rows are wrong, except for a symmetric tile. Look at
# values, few and all different. ``tl.device_print`` prints them in both modes:
# these are sums of columns. ``tl.static_assert`` checks a shape: there must be
# ``M`` sums. With a tile that is not square it fails at once, in both modes.


@triton.jit
def wrong_axis_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    sums = tl.sum(x, axis=0)
    tl.store(out_ptr + rows, sums)


def wrong_axis(M=4, N=4):
    x = torch.arange(M * N, device=DEVICE).view(M, N)
    out = torch.zeros_like(x[:, 0])
    wrong_axis_kernel[(1,)](x, out, M, N)
    return f"{out.tolist()}, expected {x.sum(1).tolist()}"


show(wrong_axis, ("axis=0", "axis=1"))
look = ("tl.store", "tl.device_print('sums', sums)\n    tl.store")
ask = "tl.store", "tl.static_assert(sums.shape[0] == M, 'M sums')\n    tl.store"
for gpu in [False] + [True] * GPU:
    said = run(wrong_axis, look, gpu=gpu)
    print("device_print:", *sorted(set(said.splitlines())), sep="\n")
    said = run(wrong_axis, ask, gpu=gpu, call="print({}(4, 8))")
    print("static_assert:", said.splitlines()[-1])
second.stdin.close()

# %%
# To *see* which cells each program touches, as a picture that moves, take
# triton-viz, https://github.com/Deep-Learning-Profiling-Tools/triton-viz
#
# .. admonition:: Takeaway
#
#    Addresses, then masks, then values. The interpreter finds most errors
#    without a GPU. But it runs one program after another, so a right value
#    there does not show that programs keep out of each other's way.
#
# Exercises
# ---------
#
# - Which of the six are right for contiguous tensors that fill their blocks?
# - Let ``one_place`` use ``out_ptr + tl.program_id(0) // 2``. What is told now?
#
# Reading
# -------
#
# - compute-sanitizer: https://docs.nvidia.com/compute-sanitizer/
