"""Project 7. Attention of one new token, over keys and values kept in pages.

A server keeps keys and values in pages of S tokens, wherever there is room. A
table says which pages a sequence has, in order. Its new token attends to all of
them: softmax(q . k * scale) weighs the values. G query heads share a key head.

q       (B, H, D): float32, float16, on a GPU also bfloat16
k, v    (P, S, H / G, D) like q: pages
table   (B, L) int32: the pages of each sequence; behind its last one, anything
length  (B,) int32: how many tokens are kept, 0 ... L * S
out     (B, H, D) like q, to fill: 0 where the length is 0
D and S are powers of two, D 16 ... 128; G 1 ... 16. D, length
and the rows of table have stride 1; all other strides are any.

What counts: nothing behind a sequence is used, neither entries of table nor
places of its last page (here NaN). Scores may be large. Float32 inside. A key
is read once for its G heads. Programs share a long sequence, and merge.
Roof: the keys and values of all tokens at the rate of a copy. Goal: 0.8 of it.
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


def paged_attention(q, k, v, table, length, scale, out):
    """Fill out. Write kernels above, and launch them here."""
    raise NotImplementedError("paged_attention is yours to write")


def reference(q, k, v, table, length, scale):
    """The result in float64, and the error that is allowed in each place."""
    want, size = torch.zeros(2, *q.shape, dtype=torch.float64, device=DEVICE)
    for b, n in enumerate(length.tolist()):
        pages = table[b, : -(-n // k.shape[1])].long()
        keys, values = (t[pages].flatten(0, 1)[:n].double() for t in (k, v))
        heads = q[b].double().unflatten(0, (k.shape[2], -1)) * scale
        p = torch.einsum("kgd,tkd->kgt", heads, keys).softmax(-1)
        want[b] = torch.einsum("kgt,tkd->kgd", p, values).flatten(0, 1)
        size[b] = torch.einsum("kgt,tkd->kgd", p, values.abs()).flatten(0, 1)
    return want, max(2 * torch.finfo(q.dtype).eps, 2**-14) * size


def tensors(lengths, H, G, D, S, dtype, more=1):
    """Arguments of a call. What must not be used is NaN, or page -1."""
    B, L = len(lengths), max(lengths) // S + 1
    length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = window(B, H + 1, D, dtype=dtype)[:, 1:].normal_()
    q[:, 1::2] *= 30
    q[-1, 0, 0] = math.nan
    room = lambda i: window(B * L, S + i, H // G + i, D, dtype=dtype, gap=3 * i)
    k, v = (room(i)[:, :S, : H // G] for i in (more, 2 * more))
    table = window(B, L, dtype=torch.int32, fill=-1)
    table[:] = torch.randperm(B * L).view(B, L)
    for b, n in enumerate(lengths):
        for page, left in zip(table[b].tolist(), range(n, 0, -S)):
            k[page, :left].normal_(), v[page, :left].normal_()
        table[b, -(-n // S) :] = -1
    out = window(B, H + 2, D, dtype=dtype, fill=77, gap=3)[:, 1:-1]
    return q, k, v, table, length, D**-0.5, out


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
    sizes = [([0, 1, 16, 17, 70], 6, 3, 64, 16), ([2100, 0, 5], 2, 1, 32, 8)]
    sizes += [([33], 16, 16, 16, 32), ([1, 129], 5, 5, 128, 4)]
    for (n, H, G, D, S), dtype in [(size, t) for size in sizes for t in DTYPES]:
        *inputs, out = tensors(n, H, G, D, S, dtype)
        paged_attention(*inputs, out)
        judge(f"{n}, H={H}, G={G}, D={D}, {dtype}", out, *reference(*inputs))
    print("All values are right.")
    if not GPU:
        return print("Left out, no GPU: speed, bfloat16")
    n = [4000 + 130 * b for b in range(32)]
    *inputs, out = tensors(n, 64, 8, 128, 16, torch.float16, more=0)
    ours = rate(lambda: paged_attention(*inputs, out), 4096 * sum(n))
    judge("the large case", out, *reference(*inputs))
    a, b = torch.empty(2, 2**28, device=DEVICE)
    roof = rate(lambda: b.copy_(a), 2**31)
    print(f"{ours:.0f} GB/s; a copy: {roof:.0f}; {ours / roof:.2f}, goal 0.8")


def rate(call, moved):
    """GB/s of a call that moves so many bytes. L2 is emptied before each."""
    return moved / triton.testing.do_bench(call, return_mode="median") / 1e6


if __name__ == "__main__":
    check()
