r"""
Diagnosis: numerics, then speed
===============================

One kernel, four kinds of fault. You find them in the order in which they hide
each other: masks, a first call, a sum that loses digits, a tile that does not
fit. Each symptom gets a tool, each cause a short repair.

- Which data does one program own? One tile of ``c``, which it adds to.
- How does it move? Tiles of ``a`` and ``b`` come in along ``K``; at the end the
  tile of ``c`` is read and written.
- What limits the speed? Tensor Cores, as long as registers hold the tile.
"""

import inspect
import json
import linecache
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

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
torch.manual_seed(0)
F16, F32 = torch.float16, torch.float32
GPU = torch.cuda.get_device_properties(DEVICE) if DEVICE == "cuda" else None
GPU = GPU if GPU and GPU.major >= 8 else None  # else tl.dot has no Tensor Cores
FOLDER = tempfile.TemporaryDirectory()
results = []
for place in [*sys.path, "../tools"]:
    if os.path.exists(place := os.path.join(place, "triton_memcheck.py")):
        shutil.copy(place, FOLDER.name)
checker = os.listdir(FOLDER.name)
print("" if GPU else "Left out, no GPU of capability 8: speed and profilers")
print("" if checker else "Left out, not found: triton_memcheck.py")

# %%
# What it must cost
# -----------------
#
# ``c += a @ b`` adds a product of float16 matrices to float32 sums, as for the
# gradients of weights. That is ``2 * M * N * K`` FLOP, for
# ``2 * K * (M + N) + 8 * M * N`` bytes. With all sizes 4096, each byte pays for
# 683 FLOP. A GPU does fewer in that time: the Tensor Cores are the bound.


def accumulate_ref(a, b, c):
    """``c + a @ b`` in float64."""
    return c.double() + a.double() @ b.double()


# %%
# The kernel
# ----------
#
# Somebody wrote it, tried a square matrix, tuned it, and uses it. Read it
# first: three faults are in its text, two in how it is launched.


@triton.jit
def accumulate_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_m, mask_n = offs_m < N, offs_n < M
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), a_ptr.dtype.element_ty)
    step = tl.full((), BLOCK_K, tl.int64)  # times a stride, it may pass 2**31
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K + k
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
        a_ptrs += BLOCK_K
        b_ptrs += step * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(c_ptrs, tl.load(c_ptrs, mask=mask) + acc, mask=mask)


def launch(kernel, a, b, c, tile):
    """``c += a @ b``, rows contiguous; tile: three blocks, warps, stages."""
    (M, K), N, (BM, BN, BK, warps, stages) = a.shape, b.shape[1], tile
    args = a, b, c, M, N, K, a.stride(0), b.stride(0), c.stride(0), BM, BN, BK
    grid = triton.cdiv(N, BN), triton.cdiv(M, BM)
    return kernel[grid](*args, num_warps=warps, num_stages=stages)


# %%
# Three tools of our own: ``repaired(i)`` is the kernel after ``i`` changes of
# its text; ``made`` turns text into a kernel; ``child`` runs code in another
# process, because Triton settles at its import whether it interprets.

REPAIRS = [  # what is replaced, by what
    ("offs_m < N, offs_n < M", "offs_m < M, offs_n < N"),
    ("offs_k < K + k", "offs_k < K - k"),
    ("a_ptr.dtype.element_ty", "tl.float32"),
]


def source(count):
    text = inspect.getsource(accumulate_kernel.fn)
    for old, new in REPAIRS[:count]:
        text = text.replace(old, new)
    return text


def made(name, text):
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    space = dict(triton=triton, tl=tl, __name__=name)
    exec(compile(text, name, "exec"), space)  # Triton reads it in linecache
    return [*space.values()][-1]


def repaired(count):
    return made(f"<{count} repairs>", source(count))


def child(*code, interpret="0", under=()):
    """What a new Python prints that runs this code."""
    head = "import linecache, triton\nimport triton.language as tl\n\n"
    with open(os.path.join(FOLDER.name, "case.py"), "w") as file:
        print(head, *code, sep="\n", file=file)
    command = [*under, sys.executable, "-W", "ignore", "case.py"]
    options = dict(cwd=FOLDER.name, text=True, stderr=subprocess.STDOUT)
    options["env"] = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run(command, stdout=subprocess.PIPE, **options)
    return done.stdout.replace(FOLDER.name + os.sep, "").strip()


# %%
# First: sizes that tell
# ----------------------
#
# A wrong address makes every later number worthless, so addresses and masks
# come first here too. The symptom: none, with the sizes the author tried. The
# tools: sizes that are not square and no multiples of the tile, NaN around
# ``a`` and ``b``, sevens around ``c``. A sum of ``K`` products of normal
# numbers is about ``K**0.5`` large; errors may be 1/256 of that.


def window(rows, cols, dtype, around):
    """Random numbers in the midst of a buffer."""
    room = torch.full((rows + 16, cols + 16), around, device=DEVICE).to(dtype)
    return room[8 : rows + 8, 8 : cols + 8].normal_()


def check(kernel, M, N, K, around=torch.nan, tile=(16, 16, 16, 4, 1)):
    """How many are wrong in c, how many changed around it; relative error."""
    a, b = window(M, K, F16, around), window(K, N, F16, around)
    c = window(M, N, F32, 7)
    exact = accumulate_ref(a, b, c)
    launch(kernel, a, b, c, tile)
    right = (c - exact).abs() <= K**0.5 / 256  # False for NaN
    wrong, error = M * N - right.sum().item(), (c - exact).norm() / exact.norm()
    c.fill_(7)
    return (wrong, (c._base != 7).sum().item()), float(f"{error:.2e}")


print(f"{'':26}after 0, 1, 2 repairs: (wrong in c, changed around it)")
for M, N, K in (32, 32, 32), (24, 56, 32), (32, 32, 40), (24, 56, 40):
    for name, around in ("NaN", torch.nan), ("0", 0):
        said = [check(repaired(i), M, N, K, around)[0] for i in range(3)]
        print(f"{M} x {N}, K = {K}, {name:>3} around:", *said)

# %%
# A ``c`` that is not square shows one fault. A ``K`` that is no multiple of the
# tile shows another, unless what lies behind happens to be zero. Which lines
# are they? ``triton_memcheck``, beside this page's downloads, names them.

CALL = """
try:
    with memcheck():
        print(check(accumulate_kernel, 24, 56, 40))
except MemcheckError as error:
    print(*dict.fromkeys(p.place() for p in error.problems), sep="\\n")
"""
code = ["import torch\nfrom triton_memcheck import *\nDEVICE = 'cpu'"]
code += ["F16, F32 = torch.float16, torch.float32"]
code += map(inspect.getsource, (window, accumulate_ref, launch, check))
for count in range(3):
    code += [f"print('{count} repairs:')", source(count), CALL]
print(child(*code, interpret="1") if checker else "")
for repair in REPAIRS[:2]:
    print("- {}\n+ {}".format(*repair))

# %%
# The load and store of ``c`` leave the list with the first repair: masks had
# been swapped. Those of ``a`` and ``b`` leave it with the second, which masks
# the tail of ``K``. In the first pair of brackets: wrong in ``c``, changed
# around it.
#
# Each mask needs its own axis, and what is left of ``K`` shrinks in the loop.
#
# Numerics: wrong once
# --------------------
#
# The kernel is *autotuned*: the first call with new sizes tries three
# configurations. The symptom: a sum far too large, and nobody can repeat it.
# The tool: call it three times, with ones. Each launch adds ``K``, so ``c``
# counts launches.

BLOCKS = "BLOCK_M", "BLOCK_N", "BLOCK_K"
TILES = [(64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 64, 32, 4, 3)]


def tuned(kernel, **options):
    configs = [triton.Config(dict(zip(BLOCKS, t)), t[3], t[4]) for t in TILES]
    if DEVICE == "cpu":  # there is no timer: one call each, all alike
        options["do_bench"] = lambda call, quantiles: [call() or 0] * 3
    return triton.autotune(configs, key=["M", "N", "K"], **options)(kernel)


def kernels_in(call):
    """What torch.profiler sees on the GPU: count, name, microseconds."""
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    for e in profile.key_averages():
        if us := e.self_device_time_total:
            print(f"{e.count:8} x {e.key[:44]}: {us / e.count:.1f} us")


grid = lambda meta: (128 // meta["BLOCK_N"], 128 // meta["BLOCK_M"])
a, b = torch.ones(2, 128, 128, device=DEVICE, dtype=F16)
for restored in [], ["c_ptr"]:
    kernel, added = tuned(repaired(2), restore_value=restored), []
    c = torch.zeros(128, 128, device=DEVICE)
    call = lambda: kernel[grid](a, b, c, 128, 128, 128, 128, 128, 128)
    for turn in range(3):
        before = c.clone()
        kernels_in(call) if GPU and turn == 0 else call()
        added += ((c - before) / 128).unique().tolist()
    print(f"restore_value={restored}: three calls added {added} products")

# %%
# Every launch of the tuner added to ``c``. ``restore_value`` puts ``c`` back
# after each of them; two copies are then part of each time that is compared.
# ``torch.profiler`` sees the launches with no change of the code. (The other
# kernel is the timer's, which overwrites L2.)
#
# From a line to instructions
# ---------------------------
#
# You cannot point at the next faults in a result. What became of a line? Triton
# keeps the stages of a compilation in ``asm``: TTIR, what you wrote; TTGIR,
# with each tensor's *layout* over threads; PTX, with any number of registers;
# SASS, what runs. On a GPU it is ``kernel[grid](...).asm["ptx"]``. But the
# compiler needs no GPU, only a process that does not interpret, and a target.
# (``asm["sass"]`` ends after 4096 instructions; ``nvdisasm`` shows all.)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out_ptr + tl.program_id(0), tl.sum(x.to(tl.float32)))


COMPILE = """
import json, subprocess
from triton.backends.compiler import GPUTarget
for name, (text, types, constants, options) in JOBS.items():
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    kernel = made(f"<{name}>", text)
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    asm = triton.compile(source, GPUTarget("cuda", ARCH, 32), options).asm
    JOBS[name] = dict(ttir=asm["ttir"], ttgir=asm["ttgir"], ptx=asm["ptx"])
    try:
        with open("cubin", "wb") as file:
            file.write(asm["cubin"])
        call = f"'{triton.knobs.nvidia.nvdisasm.path}' -c cubin 2> warnings"
        JOBS[name]["sass"] = subprocess.check_output(call, shell=True).decode()
    except Exception as error:
        print(f"Left out, no SASS of {name}: {type(error).__name__}")
print("JSON" + json.dumps(JOBS))
"""
LARGE = getattr(GPU, "shared_memory_per_block_optin", 2**18) > 150_000
BK, STAGES = (64, 3) if LARGE else (32, 2)
SPEED = {  # provider: repairs, tile
    "triton:found": (2, (128, 256, BK, 4, STAGES)),
    "triton:exact": (3, (128, 256, BK, 4, STAGES)),
    "triton:small": (3, (128, 128, BK, 4, STAGES)),
    "triton": (3, (128, 256, BK, 8, STAGES)),
}


def reports(arch):
    """The stages of row_sum_kernel and of SPEED's kernels, for sm_<arch>."""
    row = inspect.getsource(row_sum_kernel.fn)
    jobs = {"row": (row, dict(x_ptr="*fp16", out_ptr="*fp32"), {"N": 1024}, {})}
    types = dict(a_ptr="*fp16", b_ptr="*fp16", c_ptr="*fp32")
    types |= dict.fromkeys(accumulate_kernel.arg_names[3:9], "i32")
    for name, (count, tile) in SPEED.items():
        options = dict(num_warps=tile[3], num_stages=tile[4])
        jobs[name] = source(count), types, dict(zip(BLOCKS, tile)), options
    code = inspect.getsource(made), f"ARCH, JOBS = {arch}, {jobs}", COMPILE
    said, _, found = child(*code).partition("JSON")
    print(said if found else f"Left out, asm: {said.splitlines()[-1:]}")
    return json.loads(found or "{}")


def read(name, looks):
    """How often each pattern is found in a stage, and the first one found."""
    for stage, pattern in (look.split(":", 1) for look in looks.split()):
        if text := built.get(name, {}).get(stage):
            found = re.findall(pattern, text)
            print(f"{stage:5} {len(found):2} x {[*found, pattern][0]}")


x, out = torch.randn(5, 1024).half().to(DEVICE), torch.ones(5, device=DEVICE)
row_sum_kernel[(5,)](x, out, 1024)
torch.testing.assert_close(out.double(), x.double().sum(1), rtol=0, atol=1e-3)
arch = 10 * GPU.major + GPU.minor if GPU and not torch.version.hip else 90
built = reports(arch)
print(f"row_sum_kernel, 1024 numbers, 4 warps, for sm_{arch}")
read("row", r"ttir:tt.load ttir:arith.extf ttir:tt.reduce ttgir:sizePerT.*?\]")
read("row", r"ptx:ld.global\S+ ptx:cvt\S+ ptx:shfl.sync\S+ ptx:bar.sync")
read("row", r"sass:LDG\S+ sass:HADD2.F32 sass:SHFL.BFLY sass:BAR.SYNC\S*")

# %%
# Read from above. The load is one operation in TTIR. TTGIR gives a thread 8
# neighbours, so PTX has one ``ld.global.v4.b32`` of 16 bytes: if you see eight
# of two bytes, look for a mask or an address that is not aligned. ``cvt`` is a
# conversion: those that you did not ask for point at a wrong dtype. A sum over
# 32 threads takes 5 ``shfl``, over 4 warps 2 more and ``bar.sync``, a barrier.
#
# Numerics: an error that grows
# -----------------------------
#
# All values passed: matrices were small, the tolerance made for float16. But
# the sum was to be in float32. The symptom: a little noise, everywhere. The
# tool: the error against float64, as ``K`` grows.

ks = [2**e for e in range(5, 17 if GPU else 11)]
for kind, count, color in ("float16", 2, "#D1495B"), ("float32", 3, "#3B82C4"):
    kernel = repaired(count)
    losses = [check(kernel, 128, 128, k, tile=TILES[0])[1] for k in ks]
    plt.loglog(ks, losses, "o-", color=color, label=kind)
    print(f"acc in {kind}, error by K:", dict(zip(ks[::2], losses[::2])))
    row = dict(provider="triton", metric="error", kind=kind, M=128, N=128)
    results += [row | dict(K=k, value=x) for k, x in zip(ks, losses)]
plt.gca().set(xlabel="K", ylabel="relative error")
plt.legend()
plt.show()

# %%
# Figure. Relative error against ``K``; ``acc`` in float16 (red) or 32 (blue).
#
# The sum grows, and each addition rounds it to 11 bits: four times the ``K``,
# twice the error. At 65536 it is :measured:`diagnosis triton metric=error
# K=65536 kind=float16`, in float32 :measured:`diagnosis triton metric=error
# K=65536 kind=float32`. (The latter grows like ``K``: as if Tensor Cores cut
# digits off, instead of rounding.) Where is it made? Look for the type of the
# sum in each stage.

TYPES = r"""ttgir:(?:dot|tmem_alloc).*->.*?<(\d\w+)
ptx:(?:wgmma.mma|mma.sync|tcgen05.mma)\S+ sass:\w*H\w*MMA\S*"""
for name in ("triton:found", "triton:exact"):
    print(f"{name}, type of the sum")
    read(name, TYPES)
print("- {}\n+ {}".format(*REPAIRS[2]))

# %%
# ``acc`` had the type of ``a``. Tensor Cores run ``wgmma``, before Hopper
# ``mma.sync``: its first type is that of the sum. (Blackwell's names none.)
#
# Speed: a tile that does not fit
# -------------------------------
#
# Now it is right. The symptom: it is slow, slower than before the repair. The
# author's tile, 128 x 256 for 4 warps, has 256 sums for each of 128 threads. In
# float32 each takes a register, and a thread has 255. The rest *spills* to
# *local memory*: a thread's part of the GPU's memory. PTX knows no limit, so
# search SASS: ``STL`` stores there, ``LDL`` loads. A loop lies between a label
# and the jump back to it, and runs ``K / BLOCK_K`` times in each warp.

SPILL, LOOP = r"\b(?:STL|LDL)\b", r"(?s)\n\.(L_\w+):(.*?)BRA[^;]*\1\)"
n, found = 4096, {}
case = dict(M=n, N=n, K=n, dtype="float16")
for name, (_, tile) in SPEED.items() if "sass" in built.get("row", ()) else ():
    sass = built[name]["sass"]
    loops = "".join(s for _, s in re.findall(LOOP, sass) if "MMA" in s)
    spills, inside = (len(re.findall(SPILL, text)) for text in (sass, loops))
    warps = tile[3] * n // tile[0] * n // tile[1]
    runs = warps * (spills - inside + inside * n // BK)
    found[name] = f"{spills} spills, {inside} in the loop"
    print(f"{name:13} {found[name]}; at 4096 they run {runs:,} times")
    for metric, value in dict(spills=spills, inside=inside, runs=runs).items():
        results.append(case | dict(provider=name, metric=metric, value=value))

# %%
# Two repairs: half the tile for as many warps, or twice the warps.

calls, times, kernels = {}, {}, {i: repaired(i) for i in (2, 3)}
if GPU:
    plt.figure(figsize=(7, 2.6), layout="constrained")
    a, b = torch.randn(2, n, n, device=DEVICE).half()
    c, half = torch.zeros(n, n, device=DEVICE), torch.empty_like(a)
    calls["ceiling"] = lambda: torch.mm(a, b, out=half)
    calls["torch"] = lambda: c.add_(torch.mm(a, b, out_dtype=F32))
    kernels_in(calls["torch"])
for name, (i, tile) in SPEED.items() if GPU else ():
    calls[name] = lambda i=i, tile=tile: launch(kernels[i], a, b, c, tile)
    counts = {k: getattr(calls[name](), k) for k in ("n_regs", "n_spills")}
    print(f"{name:13} {counts}", check(kernels[i], n, n, n, tile=tile))
for provider, call in list(calls.items()) * 3:
    call()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    ms = triton.testing.do_bench(graph.replay, 10, 40, return_mode="all")
    times[provider] = times.get(provider, []) + ms
for provider, ms in times.items():
    rates = [2e-9 * n**3 / sorted(ms)[len(ms) * i // 10] for i in (8, 5, 2)]
    row = dict(zip(("low", "value", "high"), rates), provider=provider)
    results.append(case | row | dict(metric="TFLOP/s"))
    print(f"{provider:13} {rates[1]:6.1f} TFLOP/s")
    color = "#3B82C4" if "triton" in provider else "#7f7f7f"
    plt.barh(provider, rates[1], color=color)
    plt.text(rates[1], provider, f"  {found.get(provider, '')}", va="center")
    plt.gca().set(xlabel="TFLOP/s", xmargin=0.4)
plt.show()

# %%
# Figure. Speed at 4096 cubed, and what SASS says. In grey, PyTorch, which adds
# in a second kernel, and the product by cuBLAS alone.
#
# With its masks repaired :measured:`diagnosis triton:found metric=TFLOP/s`,
# with sums in float32 :measured:`diagnosis triton:exact metric=TFLOP/s`: it
# spilled before, and now it spills more often. The small tile has
# :measured:`diagnosis triton:small metric=TFLOP/s`, 8 warps
# :measured:`diagnosis triton metric=TFLOP/s`. They spill too, but outside the
# loop, so *where* counts. ``n_spills`` only tells how many 4-byte words of
# local memory a thread has. How often do spills run? Nsight Compute counts, in
# a child.

script = f"""import torch
a, b = torch.randn(2, {n}, {n}, device="cuda").half()
c = torch.zeros({n}, {n}, device="cuda")
for tile in {[tile for i, tile in SPEED.values() if i == 3]}:
    launch(accumulate_kernel, a, b, c, tile)
    with torch.cuda.profiler.profile():
        launch(accumulate_kernel, a, b, c, tile)
"""
OPTIONS = "--profile-from-start off --clock-control none --print-units base "
OPTIONS += "--csv --metrics smsp__inst_executed.sum,"
OPTIONS += "smsp__inst_executed_op_local_ld.sum,smsp__inst_executed_op_local_st"
OPTIONS += ".sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
ncu, said = shutil.which("ncu") if GPU else None, "it needs a GPU and ncu"
if ncu:
    code = source(3), inspect.getsource(launch), script
    said = child(*code, under=[ncu, *OPTIONS.split()])
lines = re.findall('(?m)^".*__(?!.*n/a).*', said)
for line in lines:
    number, *_, metric, _, value = line.strip('"').split('","')
    name, metric = [*SPEED][int(number) + 1], metric.split(".")[0]
    print(f"{name:13} {metric}: {value}")
    value = float(value.replace(",", ""))
    results.append(case | dict(provider=name, metric=metric, value=value))
print("" if lines else f"Left out: Nsight Compute: {said[-200:]}")

# %%
# Loads and stores of local memory together are as many as SASS predicts: in
# ``exact`` a large part of all instructions. Tensor Cores wait, busy in
# :measured:`diagnosis triton:exact metric=sm__pipe_tensor_cycles_active` of 100
# cycles, with 8 warps in :measured:`diagnosis triton
# metric=sm__pipe_tensor_cycles_active`.
#
# The order
# ---------
#
# .. list-table::
#    :header-rows: 1
#
#    * - symptom
#      - tool
#      - likely cause, repair
#    * - neighbours changed, NaN, wrong unless square
#      - uneven sizes amid NaN; ``triton_memcheck``
#      - a mask of another axis, none for a tail: mask each axis by its size
#    * - the first call alone is wrong
#      - a second call; ``torch.profiler`` counts launches
#      - a tuner and an update in place: ``restore_value``
#    * - an error that grows with ``K``
#      - float64, for several ``K``; the type of the sum in TTGIR or PTX
#      - a narrow accumulator: float32
#    * - slow, with registers at their limit
#      - ``n_spills``; ``STL``, ``LDL`` in loops; Nsight Compute
#      - a tile too large for its warps: more warps, or a smaller tile
#    * - slow, with more kernels than expected
#      - ``torch.profiler``
#      - work that was not fused: fuse it
#
# .. admonition:: Takeaway
#
#    Trust no number before masks, no speed before numbers. Change one thing,
#    and let the tool that showed the symptom show that it is gone.
#
# Exercises
# ---------
#
# - Tune with ``reset_to_zero=["c_ptr"]``. Which ``c`` is it right for?
# - Call ``reports(80)``. Which kernels spill in the loop on an older GPU?
# - Every 1024 of ``k``, move ``acc`` to another float32 sum. Is that better?
#
# Reading
# -------
#
# - PTX: https://docs.nvidia.com/cuda/parallel-thread-execution/
# - SASS: https://docs.nvidia.com/cuda/cuda-binary-utilities/
