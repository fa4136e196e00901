"""Project 5. A product with int8 weights, for a handful of tokens.

A model that writes one token at a time reads all its weights for it. As int8
they are half the bytes: out = (x @ w.T) * scale, dequantised on the way.

x      (B, K) float16, on a GPU also bfloat16
w      (N, K) int8
scale  (N,) float32
out    (B, N) like x, to fill

B is 1 ... 16; N and K are any numbers >= 1. Elements of a row are neighbours,
the distance between rows is any.

What counts: w is read once for all of B, and no float copy of it is stored.
Sums in float32: in float16 they would overflow. One rounding at the end. A NaN
in a row of x makes that row of out NaN, and no other.

Roof: N * K bytes at the rate of a copy, for B = 1 and for B = 16. Goal: 0.65 of
it, as each weight costs a few instructions, too.
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


def int8_decode(x, w, scale, out):
    """Fill out. Write a kernel above, and launch it here."""
    raise NotImplementedError("int8_decode is yours to write")


def reference(x, w, scale):
    """The product in float64, and the error that is allowed in each place."""
    limits, x, w = torch.finfo(x.dtype), x.double(), w.double()
    want, size = x @ w.T * scale, x.abs() @ w.abs().T * scale
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
    sizes = [(1, 1, 1), (1, 5, 64), (3, 17, 100), (16, 65, 257), (5, 33, 1031)]
    for (B, N, K), dtype in [(size, t) for size in sizes for t in DTYPES]:
        x = window(B, K, dtype=dtype).normal_(std=100)
        w = window(N, K, dtype=torch.int8, fill=101, gap=7).random_(-128, 128)
        scale = window(N, dtype=torch.float32).uniform_(1e-4, 1e-3)
        if B > 1:
            x[1, 2] = math.nan
        out = window(B, N, dtype=dtype, fill=77, gap=3)
        int8_decode(x, w, scale, out)
        judge(f"B={B}, N={N}, K={K}, {dtype}", out, *reference(x, w, scale))
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    N, K, half = 28672, 8192, torch.float16
    w = torch.randint(-128, 128, (N, K), device=DEVICE, dtype=torch.int8)
    scale = torch.rand(N, device=DEVICE) / 1000
    a, b = torch.empty(2, 2**28, device=DEVICE)
    for B in (1, 16):
        x = torch.randn(B, K, device=DEVICE, dtype=half)
        out = window(B, N, dtype=half, fill=77, gap=16)
        ours = rate(lambda: int8_decode(x, w, scale, out), N * K)
        right = reference(x, w[-64:], scale[-64:])
        judge("the large case", out.T, *(t.T for t in right))
        roof = rate(lambda: b.copy_(a), 2**31)
        print(f"B={B}: {ours:.0f} GB/s; {ours / roof:.2f} of a copy, goal 0.65")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
