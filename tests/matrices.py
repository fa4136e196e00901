"""Views amid other numbers, random matrices, and how exact their product must be."""

import math

import pytest

torch = pytest.importorskip("torch")

SENTINEL = -77.0  # far from all products, and exact in each dtype
LAYOUTS = ["contiguous", "transposed", "sliced", "both sliced", "row", "column", "offset"]
SHAPES = [(0, 5, 3), (5, 0, 3), (5, 7, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
SHAPES += [(1, 257, 3), (257, 1, 3), (3, 5, 257), (17, 31, 13), (63, 64, 65)]
SHAPES += [(64, 64, 64), (65, 63, 64), (127, 129, 131), (128, 128, 16)]


def view(rows, cols, layout, dtype, device, fill=math.nan):
    """A view of that shape and layout with ``fill`` in and around it; and its buffer.

    "aligned" begins each row at a multiple of 16 bytes, "offset" hardly any.
    """
    if layout == "transposed":
        inner, room = view(cols, rows, "contiguous", dtype, device, fill)
        return inner.t(), room
    step_m, step_n = {"sliced": (1, 3), "both sliced": (2, 5)}.get(layout, (1, 1))
    edge = 17 if layout == "offset" else 16
    pitch = edge + cols * step_n + 16
    pitch += -pitch % 16 if layout == "aligned" else 0
    room = torch.full((edge + rows * step_m + 16, pitch), fill, device=device).to(dtype)
    inner = room[edge : edge + rows * step_m : step_m, edge : edge + cols * step_n : step_n]
    if layout == "row" and rows:
        inner = inner[:1].expand(rows, cols)
    if layout == "column" and cols:
        inner = inner[:, :1].expand(rows, cols)
    return inner, room


def normals(rows, cols, layout, dtype, device, seed):
    """A view that holds numbers of a normal distribution, amid NaN."""
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(device)
    inner, _ = view(rows, cols, layout, dtype, device)
    part = inner[:1] if layout == "row" else inner[:, :1] if layout == "column" else inner
    part.copy_(values[: len(part), : part.shape[1]])
    return inner


def beyond_32_bits(device):
    """2**32 numbers of float16, for views whose offsets pass 2**31; or the test is skipped.

    A CPU need not have the memory: only the pages that are touched exist.
    """
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("12 GB of GPU memory are needed")
    try:
        room = torch.empty(2**32 + 999, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("8 GiB of addresses are needed")
    return room.fill_(math.nan) if device == "cuda" else room


def specials(n, dtype, device):
    """Two matrices of ones, and in them infinities and NaN."""
    a, b = torch.ones(2, n, n, dtype=dtype, device=device)
    a[3, n - 1], b[0, 66], a[65, 5] = math.nan, math.inf, -math.inf
    return a, b


def assert_close(c, a, b, loss=0):
    """``c`` is ``a @ b``, with the error of a float32 sum, of ``loss``, and of one rounding."""
    exact = a.double() @ b.double()
    sums = a.double().abs() @ b.double().abs()
    limits = torch.finfo(c.dtype)
    bound = sums * (a.shape[1] * 2**-23 + loss) + limits.tiny * limits.eps
    assert bool(((c.double() - exact).abs() <= bound + exact.abs() * limits.eps / 2).all())
