r"""
Debugging: addresses, then masks, then values
=============================================

A wrong number says little about its cause. Six small broken kernels show an
order that finds it: which addresses were used, then which positions were
masked off, and only then which values were computed.

- Which addresses may a program use? Those of its tensor, and to write, only
  places that no other program uses.
- What do masked positions hold? A value that does not change the result.
- Which values come out? Those of a reference, on numbers small enough to read.

Without a GPU, the tools that need none are executed: most of this page.
"""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by import triton

import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
sys.path.append("../tools")  # where the course keeps the checker
checker = importlib.util.find_spec("triton_memcheck")
if DEVICE == "cpu":
    print("Left out, no GPU: what the compiled kernels do, compute-sanitizer")
if not checker:
    print("Left out, triton_memcheck.py is not beside this file: its reports")

# %%
# Two processes
# -------------
#
# How can a kernel be looked into? In Triton's *interpreter*, each line is
# Python on NumPy arrays: breakpoints work, and every address can be checked.
# But a process interprets or compiles, as ``TRITON_INTERPRET`` says when it
# imports Triton.
#
# So a second process interprets. It gets a script, a kernel and the function
# that launches it, and answers with what it printed. A third kind runs such a
# script compiled: some errors end the whole process on a GPU, and this page
# goes on.
#
# ``triton_memcheck.py``, beside this page's downloads, checks addresses in the
# interpreter. Put it beside any script of yours and write
# ``with memcheck(): kernel[grid](...)``.

HEAD = "import torch, triton\nimport triton.language as tl\n\nDEVICE = '{}'\n\n"
PLAIN = "\n\nprint({}())\n"
CHECKED = "\n\nfrom triton_memcheck import memcheck\nwith memcheck():\n"
CHECKED += "    print({}())\n"
END = "-- end --"
SECOND = f"""
import runpy, sys, torch, triton
for name in iter(sys.stdin.readline, ""):
    try:
        runpy.run_path(name.strip())
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
    print("\\n{END}", flush=True)
"""
folder = tempfile.TemporaryDirectory()
paths = [os.path.dirname(os.path.abspath(checker.origin))] if checker else []
paths += filter(None, [os.environ.get("PYTHONPATH")])


def start(*command, **variables):
    """A child process in the folder of the scripts."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(paths)} | variables
    pipes = dict(stdin=-1, stdout=-1, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, cwd=folder.name, env=env, text=1, **pipes)


def script(case, changes=(), name="", device="cpu", end=PLAIN):
    """Write a script: the kernel, with parts replaced, and its case."""
    text = inspect.getsource(globals()[f"{case.__name__}_kernel"].fn)
    for old, new in changes:
        if old not in text:
            raise ValueError(f"not in the kernel: {old}")
        text = text.replace(old, new)
    text = HEAD.format(device) + text + "\n\n" + inspect.getsource(case)
    name = f"{name or case.__name__}.py"
    with open(os.path.join(folder.name, name), "w") as file:
        file.write(text + end.format(case.__name__))
    return name


python = sys.executable, "-W", "ignore", "-u"
second = start(*python, "-c", SECOND, TRITON_INTERPRET="1")


def interpret(name, *commands):
    """Run a script in the second process; return what it prints."""
    second.stdin.write("\n".join([name, *commands, ""]))
    second.stdin.flush()
    said = []
    for line in second.stdout:
        if line.startswith(END):
            break
        said.append(line)
    return "".join(said).replace(folder.name + os.sep, "").strip()


def compiled(name, *command, **variables):
    """Start a script on the GPU, in a process of its own."""
    return start(*command, *python, name, **variables)


def answer(process):
    """The lines a process has printed, at its end."""
    said = process.communicate()[0].replace(folder.name + os.sep, "")
    return [line for line in said.splitlines() if line.strip()]


def show(case, *repair, here=True):
    """Say what happens here, what the checker finds, and what a repair does."""
    if here:
        print(f"here ({'GPU' if DEVICE == 'cuda' else 'interpreter'}): {case()}")
    if checker:
        print(interpret(script(case, end=CHECKED)), end="\n\n")
    for old, new in repair:
        print(*(f"- {line.strip()}" for line in old.split("\n")), sep="\n")
        print(*(f"+ {line.strip()}" for line in new.split("\n")), sep="\n")
    end = CHECKED if checker else PLAIN
    name = f"{case.__name__}_repaired"
    print("repaired:", interpret(script(case, repair, name, end=end)))


# %%
# Addresses: a missing mask
# -------------------------
#
# This kernel doubles 1003 numbers, 256 in each program. The symptom? None in
# the result. The tensors are slices of a larger buffer of ones, as most memory
# is part of something larger. What lies behind the slice changes: somebody
# else's numbers.


@triton.jit
def missing_mask_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, 2 * x)


def missing_mask():
    room = torch.ones(2, 1024, device=DEVICE)
    x, out = room[:, :1003]
    missing_mask_kernel[(4,)](x, out, 1003, BLOCK=256)
    changed = (room[1, 1003:] != 1).sum().item()
    return f"right: {torch.equal(out, 2 * x)}, changed behind: {changed}"


MASK = [
    ("x_ptr + offs", "x_ptr + offs, mask=offs < n"),
    ("2 * x", "2 * x, mask=offs < n"),
]
show(missing_mask, *MASK)

# %%
# The checker names line, program, argument and offsets: the 21 positions of
# program 3 from 1003 up, in the load and in the store. It went on without them,
# so it can report both.
#
# Addresses: a shape used as a stride
# -----------------------------------
#
# A window of 4 rows and 6 columns, cut from a buffer with rows of 8, is copied.
# The symptom: the first row is right, all others are shifted.


@triton.jit
def shape_as_stride_kernel(x_ptr, out_ptr, N, stride_xm, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N)
    tl.store(out_ptr + row * N + cols, x, mask=cols < N)


def shape_as_stride():
    x = torch.arange(32, device=DEVICE).view(4, 8)[:, :6]
    out = torch.full((4, 6), -1, device=DEVICE)
    shape_as_stride_kernel[(4,)](x, out, 6, x.stride(0), BLOCK=8)
    return out.tolist()


STRIDE = [("x_ptr + row * N", "x_ptr + row * stride_xm")]
show(shape_as_stride, *STRIDE)

# %%
# The window knows its stride, the kernel gets an address. ``row * N`` is right
# for a contiguous tensor only. The numbers here are their own offsets, so the
# wrong result shows which cells were read.

_, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
reader = {offset: row for row, o in enumerate(shape_as_stride()) for offset in o}
for offset in range(32):
    row, col = divmod(offset, 8)
    look = dict(facecolor="#D1495B66" if col > 5 else "none", edgecolor="gray")
    look["hatch"] = "//" if col > 5 else ""
    axes.add_patch(plt.Rectangle((col, row), 1, 1, **look))
    program = f"pid {reader[offset]}" if offset in reader else "-"
    axes.text(col + 0.5, row + 0.4, program, ha="center", va="center")
    axes.text(col + 0.5, row + 0.8, offset, ha="center", va="center", size=7)
axes.set(xlim=(0, 8), ylim=(4, 0), xticks=[], yticks=[])
axes.set_xlabel("8 columns of the buffer, 6 of the window")
plt.show()

# %%
# Figure. The buffer of 4 rows and 8 columns, with each cell's offset below and
# the program that read it above. Columns 6 and 7, hatched, are not in the
# window. Program 1 should read offsets 8 to 13 and read 6 to 11. Nobody read
# the last six cells of the buffer's last row.
#
# Addresses: a product beyond 32 bits
# -----------------------------------
#
# Each program copies the first number of its row. Rows are ``2**30`` elements
# apart, and row 2 begins at ``2**31``. Both factors fit into 32 bits, so Triton
# multiplies in 32 bits. The product wraps.


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


WIDE = [("program_id(0)", "program_id(0).to(tl.int64)")]
show(int32_overflow, *WIDE, here=False)  # it would end a GPU process

# %%
# In the interpreter ``x`` has one element, so rows 1 and 2 are out of bounds
# either way. What counts are the offsets: row 2 asks for ``-2147483648``, after
# the repair for ``2147483648``. No 2 GiB are needed to see it.
#
# On a GPU ``x`` is as large as it should be. And with ``TRITON_DEBUG=1`` Triton
# adds a check to each integer operation.

memory = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
if memory > 3 * 2**30:
    broken = script(int32_overflow, device="cuda")
    mended = script(int32_overflow, WIDE, "int32_repaired", device="cuda")
    runs = [compiled(broken), compiled(broken, TRITON_DEBUG="1")]
    runs += [compiled(mended, TRITON_DEBUG="1")]
    for title, run in zip(("plain", "TRITON_DEBUG=1", "repaired"), runs):
        lines = answer(run)
        found = [x for x in lines if "Assertion" in x or "CUDA error" in x]
        print(f"{title}: {(found or lines)[0]}")
elif DEVICE == "cuda":
    print("Left out: 3 GiB of free GPU memory are needed")

# %%
# Addresses: two programs, one place
# ----------------------------------
#
# Every program adds its sum to one total. The symptom depends on luck. In the
# interpreter programs run one after another, and the total is right: checking
# values there cannot find this one. On a GPU they run at once, read the same
# old total, and most sums are lost.


@triton.jit
def one_place_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + offs))
    tl.store(out_ptr, tl.load(out_ptr) + part)


def one_place():
    x = torch.ones(64 * 256, device=DEVICE)
    out = torch.zeros(1, device=DEVICE)
    one_place_kernel[(64,)](x, out, BLOCK=256)
    return f"{out.item():.0f} of {x.numel()}"


ATOMIC = [("tl.store(out_ptr, tl.load(out_ptr) + ", "tl.atomic_add(out_ptr, ")]
show(one_place, *ATOMIC)

# %%
# Addresses on the GPU itself
# ---------------------------
#
# Two tools watch the compiled kernel. ``tl.device_assert`` is a check that you
# write into it. It needs ``TRITON_DEBUG=1``, and the interpreter ignores it. It
# ends the process, so it runs in a child.
#
# ``compute-sanitizer`` from the CUDA toolkit needs no change of the kernel. It
# knows what was allocated, not what you sliced from it. And PyTorch allocates
# large pieces and hands out parts: a small overrun stays inside. With
# ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` each tensor is an allocation of its own.

EXACT = "\n\nx, out = (torch.ones(1003, device='cuda') for _ in range(2))\n"
EXACT += "missing_mask_kernel[(4,)](x, out, 1003, BLOCK=256)\n"
EXACT += "torch.cuda.synchronize()  # of {}\n"
ASSERT = "tl.device_assert(offs < n, 'offset beyond n')\n    x = tl.load"
sanitizer = shutil.which("compute-sanitizer")
name = script(missing_mask, [("x = tl.load", ASSERT)], "asserted")
print("device_assert, interpreter:", interpret(name))
if DEVICE == "cuda":
    name = script(missing_mask, [("x = tl.load", ASSERT)], "asserted", "cuda")
    lines = answer(compiled(name, TRITON_DEBUG="1"))
    lines = [line for line in lines if "Assertion" in line]
    print(f"device_assert, GPU: {len(lines)} positions, like\n    {lines[0]}")
if DEVICE == "cuda" and sanitizer:
    name = script(missing_mask, (), "exact", "cuda", EXACT)
    off = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    for title, env in {"cached": {}, "not cached": off}.items():
        lines = answer(compiled(name, sanitizer, **env))
        at = [i for i, line in enumerate(lines) if "Invalid" in line][:1]
        print(f"\ncompute-sanitizer, {title}", *lines[-1:], sep="\n")
        print(*(line for i in at for line in lines[i : i + 3]), sep="\n")
elif DEVICE == "cuda":
    print("Left out: compute-sanitizer is not on PATH")

# %%
# Masks: the wrong ``other``
# --------------------------
#
# The largest of -1, -2, -3, -4, -5 comes out as 0. All addresses are right, so
# the checker is silent, and the next question is: what did masked positions
# hold? ``breakpoint()`` stops inside the kernel.


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


stop = [("tl.store", "breakpoint()\n    tl.store")]
commands = ["p offs < n", "p x", "continue"]
said = interpret(script(wrong_other, stop, "stopped"), *commands)
for command in commands:
    said = said.replace("(Pdb) ", f"(pdb) {command}\n", 1)
print(said, end="\n\n")
show(wrong_other, ("other=0.0", "other=float('-inf')"))

# %%
# Three zeros that no input holds took part in the maximum. ``other`` must be
# the neutral element of what comes next: minus infinity for a maximum.
#
# Values: the wrong axis
# ----------------------
#
# Last, values. Rows of a square tile are to be summed. A square hides which
# axis is which, and a symmetric one hides it even from a comparison. So take
# few different numbers and print what is in between with ``tl.device_print``.


@triton.jit
def wrong_axis_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    sums = tl.sum(x, axis=0)
    tl.store(out_ptr + rows, sums)


def wrong_axis(M=4, N=4):
    x = torch.arange(M * N, device=DEVICE).view(M, N)
    out = torch.zeros(M, dtype=x.dtype, device=DEVICE)
    wrong_axis_kernel[(1,)](x, out, M, N)
    return f"{out.tolist()}, expected {x.sum(1).tolist()}"


noisy = [("tl.store", "tl.device_print('sums', sums)\n    tl.store")]
print(interpret(script(wrong_axis, noisy, "printed")))
if DEVICE == "cuda":
    lines = answer(compiled(script(wrong_axis, noisy, "printed", "cuda")))
    print("GPU:", *sorted(set(lines))[:5], sep="\n")
show(wrong_axis, ("axis=0", "axis=1"))

# %%
# A tile that is not square would have told at once. ``tl.static_assert`` states
# what must hold about shapes. It is checked when the kernel is compiled, costs
# nothing when it runs, and the interpreter checks it too.

STATED = "tl.static_assert(sums.shape[0] == M, 'one sum for each row')\n    "
stated = [("tl.store", STATED + "tl.store")]
END_4_BY_8 = "\n\nprint({}(4, 8))\n"
print(interpret(script(wrong_axis, stated, "stated", end=END_4_BY_8)))
if DEVICE == "cuda":
    name = script(wrong_axis, stated, "stated", "cuda", END_4_BY_8)
    print("GPU:", answer(compiled(name))[-1])
second.stdin.close()
second.wait()
