"""Views of (batch, heads, length, D) amid other numbers, and normal numbers in them."""

import math

import pytest

torch = pytest.importorskip("torch")

LAYOUTS = ["contiguous", "length first", "sliced", "offset", "padded", "expanded"]


def view(shape, layout, dtype, device, fill=math.nan):
    """A view of that shape, with ``fill`` in and around it; and its buffer."""
    B, H, L, D = shape
    if layout == "length first":
        inner, room = view((B, L, H, D), "padded", dtype, device, fill)
        return inner.transpose(1, 2), room
    step = 2 if layout == "sliced" else 1
    edge = 7 if layout == "offset" else 8
    sizes = [B + 2, H + 1, L + 3, edge + D * step + 8]
    room = torch.full(sizes, fill, device=device).to(dtype)
    inner = room[1 : B + 1, :H, 1 : L + 1, edge : edge + D * step : step]
    if layout == "contiguous":
        inner = torch.full(shape, fill, device=device).to(dtype)
    if layout == "expanded" and B and H:
        inner = inner[:1, :1].expand(shape)
    return inner, room


def normals(shape, layout, dtype, device, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    inner, _ = view(shape, layout, dtype, device)
    if layout == "expanded" and inner.numel():
        inner[0, 0].copy_(values[0, 0])
    else:
        inner.copy_(values)
    return inner


def check_held(hold, device):
    """What a descriptor cannot hold is copied, and only that."""
    room = torch.arange(2000, device=device).to(torch.float16)
    for strides, offset, fits in (
        ((640, 320, 16, 1), 0, True),
        ((8, 24, 16, 1), 8, True),  # rows overlap
        ((640, 320, 16, 1), 4, False),  # 8 bytes: not aligned
        ((640, 320, 20, 1), 0, False),
        ((640, 324, 16, 1), 0, False),
        ((644, 320, 16, 1), 0, False),
        ((0, 320, 16, 1), 0, False),
        ((640, 320, 16, 2), 0, False),
    ):
        t = room.as_strided((2, 2, 20, 16), strides, offset)
        held = hold(t)
        assert (held.data_ptr() == t.data_ptr()) == fits and torch.equal(held, t), strides
        assert all(n % 8 == 0 and n for n in held.stride()[:3]) and held.stride(3) == 1
    for stride, fits in (2**39 - 8, True), (2**39, False):
        t = room.as_strided((1, 1, 20, 16), (stride, 320, 16, 1))
        assert (hold(t).stride(0) == stride) == fits
