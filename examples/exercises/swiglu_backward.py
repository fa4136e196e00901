"""Project 2. SwiGLU backward: one element-wise kernel in place of many.

The layer computed h = silu(gate) * up, with silu(g) = g * sigmoid(g). From dh,
the gradient of h, write the gradients of gate and of up.

x    (M, 2 * N): the first N columns are gate, the others are up
dh   (M, N)
dx   (M, 2 * N), to fill: the gradient of gate, then the gradient of up

All have one dtype: float32, float16, on a GPU also bfloat16. M and N are any
numbers, 0 too. Elements of a row are neighbours. The distance between rows is
any, and another for each tensor.

What counts: arithmetic in float32, one rounding at the end; huge values of
gate; NaN that stays in its own place; nothing written beside dx.

Roof: 5 * M * N elements at the rate of a copy. Goal: 0.9 of it.
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


def swiglu_backward(x, dh, dx):
    """Fill dx. Write a kernel above, and launch it here."""
    raise NotImplementedError("swiglu_backward is yours to write")


def reference(x, dh):
    """dx in float64, and the error that is allowed in each place."""
    (gate, up), dh = x.double().chunk(2, dim=1), dh.double()
    s, limits = gate.sigmoid(), torch.finfo(x.dtype)
    want = torch.cat([dh * up * s * (1 + gate * (1 - s)), dh * gate * s], 1)
    size = torch.cat([dh * up, dh * gate], 1).abs()
    return want, limits.eps / 2 * (want.abs() + limits.tiny) + size / 2**18


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
    sizes = [(0, 5), (3, 0), (1, 1), (3, 16), (7, 257), (65, 31), (5, 4099)]
    sizes += [(70_000, 3)] * GPU  # on axes 1 and 2 a grid ends at 65535
    for (M, N), dtype in [(size, dtype) for size in sizes for dtype in DTYPES]:
        x = window(M, 2 * N, dtype=dtype).normal_(std=4)
        dh = window(M, N, dtype=dtype, gap=8).normal_()
        dx = window(M, 2 * N, dtype=dtype, fill=77, gap=3)
        if M and N > 4:
            x[0, :5] = torch.tensor([100.0, -100, 6e4, -6e4, math.nan])
            dh[-1, -1] = math.nan
        swiglu_backward(x, dh, dx)
        judge(f"M={M}, N={N}, {dtype}", dx, *reference(x, dh))
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    M, N, half = 8192, 14336, torch.float16
    x = torch.randn(M, 2 * N, device=DEVICE, dtype=half)
    dh = torch.randn(M, N, device=DEVICE, dtype=half)
    dx = window(M, 2 * N, dtype=half, fill=77, gap=16)
    ours = rate(lambda: swiglu_backward(x, dh, dx), 5 * M * N * 2)
    judge("the large case", dx, *reference(x[-4:], dh[-4:]))
    a, b = torch.empty(2, 2**28, device=DEVICE)
    roof = rate(lambda: b.copy_(a), 2**31)
    print(f"{ours:.0f} GB/s; a copy: {roof:.0f}; {ours / roof:.2f}, goal 0.9")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
