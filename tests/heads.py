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
