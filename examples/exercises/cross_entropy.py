"""Project 3. Cross entropy: a reduction over rows too long for one tile.

Each row holds the logits of one token, one for each word of a vocabulary:
loss = log(sum(exp(row))) - row[target].

logits   (M, V): float32, float16, on a GPU also bfloat16
targets  (M,) int64: a column of the row, or -100: this row is ignored
loss     (M,) float32, to fill: 0 where the row is ignored

V is any number >= 1: real vocabularies have more than 128000. Elements of a row
are neighbours, the distance between rows is any.

What counts: each logit is read from memory once. Rows may be far from 0, and
may hold -inf, for words that are forbidden, but at least one finite number. A
forbidden target has the loss inf. A NaN makes the loss of its row NaN, unless
the row is ignored. Arithmetic in float32.

Roof: M * V elements at the rate of a copy. Goal: 0.9 of it.
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


def cross_entropy(logits, targets, loss):
    """Fill loss. Write a kernel above, and launch it here."""
    raise NotImplementedError("cross_entropy is yours to write")


def reference(logits, targets):
    """The loss in float64, and the error that is allowed in each place."""
    rows, used = logits.double(), targets != -100
    total = rows.logsumexp(1)
    hit = rows.gather(1, targets.where(used, 0)[:, None])[:, 0]
    want, size = total - hit, 1 + total.abs() + hit.abs()
    return want.where(used, 0), size.nan_to_num(posinf=0) / 2**20


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
    sizes = [(0, 5), (1, 1), (3, 16), (7, 1023), (5, 1024), (5, 70001)]
    for (M, V), dtype in [(size, dtype) for size in sizes for dtype in DTYPES]:
        logits = window(M, V, dtype=dtype).normal_(std=3)
        logits += torch.linspace(-300, 300, M, device=DEVICE)[:, None]
        logits -= torch.linspace(-18, 18, V, device=DEVICE).abs()
        targets = torch.randint(V, (M,), device=DEVICE)
        if V > 16:
            logits[0, : V // 2] = logits[0, V // 2 + 1 :] = -math.inf
            logits[1, :-1] = -math.inf
            targets[:3] = torch.tensor([V // 2 - 1, V - 1, -100])
            logits[2, 3] = logits[3, V - 2] = math.nan
        loss = window(M, dtype=torch.float32, fill=77)
        cross_entropy(logits, targets, loss)
        judge(f"M={M}, V={V}, {dtype}", loss, *reference(logits, targets))
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    M, V = 4096, 128256
    logits = torch.randn(M, V, device=DEVICE, dtype=torch.float16)
    targets = torch.randint(V, (M,), device=DEVICE)
    loss = window(M, dtype=torch.float32, fill=77)
    ours = rate(lambda: cross_entropy(logits, targets, loss), 2 * M * V)
    judge("the large case", loss, *reference(logits[-4:], targets[-4:]))
    a, b = torch.empty(2, 2**28, device=DEVICE)
    roof = rate(lambda: b.copy_(a), 2**31)
    print(f"{ours:.0f} GB/s; a copy: {roof:.0f}; {ours / roof:.2f}, goal 0.9")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
