"""Project 6. A grouped product: the experts of a mixture of experts.

The rows of x, one a token, are sorted by expert. Each expert has a matrix, and
multiplies its own rows: out[begin:end] = x[begin:end] @ w[e], for every e.

x     (T, K): float16, on a GPU also bfloat16
w     (E, K, N) like x
ends  (E,) int32, on the device: expert e has the rows from ends[e - 1], 0 for
      the first, to ends[e]. It may have none. The last of ends is T.
out   (T, N) like x, to fill

T, N, K are any numbers, E is 1 ... 64. Elements of a row are neighbours, all
other distances are any.

What counts: one launch for all experts. The host does not know ends, and must
not ask (no .item(), no .tolist()): it launches enough programs for any split,
and each finds its expert and its tile. Sums in float32, one rounding. Rows of
another expert in the same tile are neither used nor written.

Roof: one product of cuBLAS with as many rows, T x K times K x N. Goal: 0.8.
"""

import math
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import triton
import triton.language as tl  # noqa: F401, for your kernel

GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DEVICE = "cuda" if GPU else "cpu"
NEW = GPU and torch.cuda.get_device_capability() >= (8, 0)
DTYPES = [torch.float16] + [torch.bfloat16] * NEW


def grouped_gemm(x, w, ends, out):
    """Fill out. Write a kernel above, and launch it here."""
    raise NotImplementedError("grouped_gemm is yours to write")


def reference(x, w, ends):
    """The products in float64, and the error that is allowed in each place."""
    slices = x.double().tensor_split(ends[:-1].cpu().long())
    pairs, limits = list(zip(slices, w.double())), torch.finfo(x.dtype)
    want = torch.cat([rows @ matrix for rows, matrix in pairs])
    size = torch.cat([rows.abs() @ matrix.abs() for rows, matrix in pairs])
    return want, limits.eps / 2 * (want.abs() + limits.tiny) + size / 2**20


def window(*shape, dtype, fill=math.nan, gap=5):
    """A tensor amid fill: before it, after it and between its rows."""
    rows, width, far = math.prod(shape[:-1]), shape[-1] + gap, 2**16
    flat = torch.empty(far + rows * width + far, dtype=dtype, device=DEVICE)
    view = flat.fill_(fill).as_strided((rows, shape[-1]), (width, 1), far)
    return view.reshape(shape)


def judge(case, out, want, allowed, fill=77):
    """Stop with a message unless out, which was all fill, ends with want."""
    got, rounded = out[-len(want) :].double(), want.to(out.dtype)
    same = (got == rounded) | (got.isnan() & want.isnan())
    wrong = ~(same | ((got - want).abs() <= allowed))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        said = "unwritten" if got[at] == fill else f"{got[at]:.6g}"
        right = f"{want[at]:.6g} +- {allowed[at]:.1g}"
        sys.exit(f"{case}: {wrong.sum()} wrong; at {at}: {said}, not {right}")
    if (out.fill_(fill)._base != fill).any():
        sys.exit(f"{case}: the values are right, but others are overwritten")


def check():
    sizes = [([0], 3, 5), ([1], 1, 1), ([5, 0, 70], 33, 20), ([192, 1], 65, 64)]
    sizes += [([0, 0, 200, 3, 0], 130, 100), ([2, 0, 1, 0] * 16, 5, 7)]
    for (rows, N, K), dtype in [(size, t) for size in sizes for t in DTYPES]:
        E, T = len(rows), sum(rows)
        ends = torch.tensor(rows).cumsum(0).int().to(DEVICE)
        x = window(T, K, dtype=dtype).normal_()
        w = window(E, K, N, dtype=dtype).normal_()
        if T > 1:
            x[-1, 0] = math.nan
        out = window(T, N, dtype=dtype, fill=77, gap=3)
        grouped_gemm(x, w, ends, out)
        judge(f"{rows} x {N} x {K}, {dtype}", out, *reference(x, w, ends))
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    T, N, K, half = 8192, 4096, 4096, torch.float16
    ends = torch.tensor([1000, 1700, 3200, 4100, 5300, 6500, 7100, T])
    ends = ends.int().to(DEVICE)
    x = torch.randn(T, K, device=DEVICE, dtype=half)
    w = torch.randn(8, K, N, device=DEVICE, dtype=half)
    out = window(T, N, dtype=half, fill=77, gap=0)
    flop = 2 * T * N * K  # what rate counts here, in place of bytes
    ours = rate(lambda: grouped_gemm(x, w, ends, out), flop) / 1000
    judge("the large case", out, *reference(x[-4:], w[-1:], ends[:1]))
    roof = rate(lambda: torch.mm(x, w[0], out=out), flop) / 1000
    print(f"{ours:.0f} TFLOP/s; cuBLAS {roof:.0f}; {ours / roof:.2f}, goal 0.8")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
