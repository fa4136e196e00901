"""Project 4. Rotary embedding: pairs of columns, turned by a token's position.

In each head of query and key, column i < R / 2 and column i + R / 2 are a pair:
(a, b) becomes (a * cos - b * sin, b * cos + a * sin), with cos and sin of the
token's position and of i. Columns from R on are copied.

x         (T, H, D): float32, float16, on a GPU also bfloat16
cos, sin  (P, R / 2) float32, contiguous: a row for each position
position  (T,) int64: any row of cos and sin, in any order
out       (T, H, D), to fill: a tensor like x, or x itself

R is even and at most D; T, H, D are any. Only columns are neighbours: x is a
slice of a larger tensor.

What counts: arithmetic in float32, one rounding; out may be x itself, so a pair
is read before it is written; a token's angles serve all its heads.

Roof: 2 * T * H * D elements at the rate of a copy. Goal: 0.85 of it.
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
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * NEW


def rotary(x, cos, sin, position, out):
    """Fill out. Write a kernel above, and launch it here."""
    raise NotImplementedError("rotary is yours to write")


def reference(x, cos, sin, position):
    """The result in float64, and the error that is allowed in each place."""
    cos, sin = (t.double()[position][:, None] for t in (cos, sin))
    half, limits = cos.shape[-1], torch.finfo(x.dtype)
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    want = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    size = torch.cat([a.abs() + b.abs()] * 2 + [0 * rest], -1)
    return want, limits.eps / 2 * (want.abs() + limits.tiny) + size / 2**22


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
    sizes = [(0, 2, 8, 8), (1, 1, 2, 2), (5, 3, 80, 64), (7, 5, 96, 96)]
    sizes += [(3, 40, 128, 128), (17, 2, 33, 6)] + [(70_000, 1, 4, 2)] * GPU
    for T, H, D, R, dtype in [(*size, t) for size in sizes for t in DTYPES]:
        angle = torch.rand(50, R // 2, device=DEVICE) * 99
        angles = angle.cos(), angle.sin(), torch.randint(50, (T,)).to(DEVICE)
        x = window(T, H + 2, D, dtype=dtype)[:, 1:-1].normal_()
        if T > 1:
            x[1, -1, 0] = math.nan
        right = reference(x, *angles)
        out = window(T, H + 1, D, dtype=dtype, fill=77, gap=3)[:, 1:]
        same = window(T, H + 3, D, dtype=dtype, fill=77)[:, :H].copy_(x)
        case = f"T={T}, H={H}, D={D}, R={R}, {dtype}"
        rotary(x, *angles, out)
        judge(case, out, *right)
        rotary(same, *angles, same)
        judge(f"{case}, out is x", same, *right)
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    T, H, D = 2**15, 40, 128
    x = torch.randn(T, H + 8, D, device=DEVICE, dtype=torch.float16)[:, :H]
    out = window(T, H, D, dtype=torch.float16, fill=77, gap=0)
    cos, sin = torch.randn(2, 4096, D // 2, device=DEVICE)
    at = torch.arange(T, device=DEVICE) % 4096
    ours = rate(lambda: rotary(x, cos, sin, at, out), 4 * T * H * D)
    judge("the large case", out, *reference(x[-4:], cos, sin, at[-4:]))
    a, b = torch.empty(2, 2**28, device=DEVICE)
    roof = rate(lambda: b.copy_(a), 2**31)
    print(f"{ours:.0f} GB/s; a copy: {roof:.0f}; {ours / roof:.2f}, goal 0.85")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
