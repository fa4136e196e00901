"""gemm_fast: its wrapper against float64, both kernels with every tile, and its models."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matrices import (
    LAYOUTS,
    SENTINEL,
    SHAPES,
    assert_close,
    beyond_32_bits,
    normals,
    specials,
    view,
)
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

F16, BF16 = torch.float16, torch.bfloat16
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
OUT_LAYOUTS = ["contiguous", "transposed", "sliced", "both sliced", "offset"]


def assert_right(lesson, a, b, layout="contiguous"):
    """Into a window, and nowhere else; and into a new tensor."""
    M, N = a.shape[0], b.shape[1]
    out, room = view(M, N, layout, a.dtype, a.device, SENTINEL)
    assert lesson.matmul(a, b, out=out) is out
    assert_close(out, a, b)
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "written outside of the window"
    fresh = lesson.matmul(a, b)
    assert (fresh.shape, fresh.dtype, fresh.device) == ((M, N), a.dtype, a.device)
    assert_close(fresh, a, b)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K", [*SHAPES, (129, 264, 72)])
def test_sizes(lesson, device, M, N, K, dtype):
    a = normals(M, K, "contiguous", dtype, device, 1)
    b = normals(K, N, "contiguous", dtype, device, 2)
    assert_right(lesson, a, b)
    assert_right(lesson, a.contiguous(), b.contiguous())


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 80)] * 3),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2, st.sampled_from(OUT_LAYOUTS)),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 99),
)
@example((65, 33, 40), ("transposed", "row", "both sliced"), F16, 0)
@example((33, 65, 17), ("column", "transposed", "transposed"), BF16, 0)
def test_any_strides(lesson, device, sizes, layouts, dtype, seed):
    M, N, K = sizes
    a = normals(M, K, layouts[0], dtype, device, seed)
    b = normals(K, N, layouts[1], dtype, device, seed + 1)
    assert_right(lesson, a, b, layouts[2])


def tiles(lesson):
    found = {tile for tile, _ in lesson.STEPS.values()}
    return sorted(found.union(*lesson.TILES.values()))


@pytest.mark.parametrize("described", [False, True])
def test_each_tile(lesson, device, described):
    """With a ragged edge on all sides, and NaN behind it; a group that is not full."""
    tma, _, shared = lesson.traits(torch.empty(0, device=device).device)
    a, _ = view(3 * 64 + 5, 72, "aligned", F16, device)
    b, _ = view(72, 2 * 64 + 8, "aligned", F16, device)
    a.normal_(), b.normal_()
    for tile in tiles(lesson):
        for group in (1, 2):
            c, room = view(len(a), b.shape[1], "aligned", F16, device, SENTINEL)
            if lesson.need(tile) + 1024 <= shared and (tma or not described):
                lesson.launch(a, b, c, tile, described, group)
                assert_close(c, a, b)
                c.fill_(SENTINEL)
                assert bool((room == SENTINEL).all()), tile


def test_descriptors_where_they_suit(lesson, device):
    """Contiguous rows, begin and length multiples of 16 bytes, and something to add."""
    wide, _ = view(40, 24, "aligned", F16, device)
    assert lesson.suits(wide)
    odd = torch.zeros(40, 25, dtype=F16, device=device)
    for t in (wide.t(), wide[:, 1:], wide[:, :23], odd, odd[:, :24], wide[:, ::3]):
        assert not lesson.suits(t)
    assert not lesson.suits(wide[:1].expand(40, 24))
    assert not lesson.suits(wide[:, :0])
    for apart, fits in ((2**39 - 8, True), (2**39, False)):  # less than 2**40 bytes
        assert lesson.suits(wide.as_strided((1, 24), (apart, 1))) == fits
    tma = lesson.traits(wide.device)[0]
    square, c = torch.zeros(2, 24, 24, dtype=F16, device=device)
    assert lesson.pick(square, square, c)[1] == tma
    assert not lesson.pick(square, square, c.t())[1]
    assert not lesson.pick(square[:, :0], square[:0], c)[1]


@pytest.mark.parametrize(
    "M, N, K, tile",
    [(1024, 1024, 1024, (64, 128)), (4096, 4096, 4096, (128, 256))]
    + [(8192, 8192, 8192, (128, 256)), (16384, 8192, 1024, (128, 128)), (1, 1, 1, (64, 64))],
)
def test_the_tile_for_an_h200(lesson, device, monkeypatch, M, N, K, tile):
    monkeypatch.setattr(lesson, "traits", lambda device: (True, 132, 227 << 10))
    assert lesson.best.__wrapped__("descriptors", M, K, N, device)[:2] == tile


@pytest.mark.parametrize("shared", [99 << 10, 64 << 10])
def test_tiles_that_fit(lesson, device, monkeypatch, shared):
    monkeypatch.setattr(lesson, "traits", lambda device: (False, 84, shared))
    for kind in lesson.TILES:
        for size in (1, 1000, 10_000):
            tile = lesson.best.__wrapped__(kind, size, size, size, device)
            assert lesson.need(tile) + 1024 <= shared


@settings(max_examples=60, deadline=None)
@given(*[st.integers(1, 20)] * 4)
def test_each_tile_has_one_program(lesson, rows, cols, group, wave):
    found = [lesson.tile_of.fn(pid, rows, cols, group) for pid in range(rows * cols)]
    assert sorted(found) == [(row, col) for row in range(rows) for col in range(cols)]
    waves = lesson.strips(rows, cols, group, wave)
    assert len(waves) == -(-rows * cols // wave)
    for i, (ys, xs) in enumerate(waves):
        assert (ys, xs) == tuple(map(set, zip(*found[i * wave : (i + 1) * wave])))
    if group == 1:
        assert found == sorted(found)


def test_special_values(lesson, device):
    """Infinities and NaN reach their row or column, and no other result."""
    a, b = specials(72, F16, device)
    exact = a.double() @ b.double()
    for right in (b, b.t().contiguous().t()):  # by descriptors, by pointers
        got = lesson.matmul(a, right).double()
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)
    half = torch.full((8, 8), 300.0, dtype=F16, device=device)
    assert lesson.matmul(half, half).isinf().all()
    tiny = torch.full((8, 8), 2.0**-24, dtype=F16, device=device)  # subnormal
    assert (lesson.matmul(tiny, torch.ones_like(tiny)) == 2.0**-21).all()


def test_inputs_may_be_one_tensor(lesson, device):
    a = normals(40, 40, "contiguous", F16, device, 5)
    before = a.clone()
    assert_right(lesson, a, a)
    assert_right(lesson, a, a.t())
    assert torch.equal(a, before)


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(3, 3, dtype=F16, device=device, requires_grad=True)
    b = torch.ones(3, 3, dtype=F16, device=device)
    loss = (w * b).sum()
    lesson.matmul(b.clone(), b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    a = torch.ones(5, 5, dtype=F16, device=device, requires_grad=True)
    with torch.no_grad():
        assert not lesson.matmul(a, a).requires_grad
    with torch.inference_mode():
        assert lesson.matmul(a, a).sum().item() == 125


def refusals(x):
    """Arguments, and what must be said, for a 6 × 6 float16 tensor."""
    flat = torch.zeros(100, dtype=F16, device=x.device)
    yield (x.tolist(), x), TypeError, "a is a list, not a torch.Tensor"
    yield (x, 1.0), TypeError, "b is a float, not a torch.Tensor"
    yield (x, x, [0.0]), TypeError, "out is a list"
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"a has {dtype}; all need one dtype"
        yield (x, x.to(dtype)), TypeError, f"b has {dtype}; all need one dtype"
        yield (x, x, x.to(dtype)), TypeError, f"out has {dtype}; all need one dtype"
    yield (x, x.bfloat16()), TypeError, "b has torch.bfloat16; all need one dtype"
    yield (x, x[0]), ValueError, "b has torch.Size([6]), not two sizes"
    yield (x[None], x), ValueError, "a has torch.Size([1, 6, 6])"
    yield (x, x[:5]), ValueError, "a has 6 columns, b has 5 rows"
    yield (x, x[:, :5], x.clone()), ValueError, "out has torch.Size([6, 6]), not (6, 5)"
    yield (x, x.to("meta")), ValueError, "b is on meta; all need one cuda device"
    yield (x.to("meta"), x.to("meta")), ValueError, "a is on meta; all need one cuda"
    yield (x.to_sparse(), x), ValueError, "a is sparse or a negated view"
    yield (x, torch._neg_view(x)), ValueError, "b is sparse or a negated view"
    yield (x, x, torch._neg_view(x.clone())), ValueError, "out is sparse or a negated view"
    yield (x.clone().requires_grad_(), x), ValueError, "a requires a gradient; pass a.detach()"
    yield (x, x, x.clone().requires_grad_()), ValueError, "out requires a gradient"
    yield (x, x, x), ValueError, "out lies among the bytes of a"
    yield (x.clone(), x, x.t()), ValueError, "out lies among the bytes of b"
    yield (flat[:36].view(6, 6), x, flat[35:71].view(6, 6)), ValueError, "out lies among"
    yield (x, x, flat[:6].expand(6, 6)), ValueError, "out may overlap itself: strides (0, 1)"
    yield (x, x, flat[:1].expand(6, 6)), ValueError, "out may overlap itself: strides (0, 0)"
    yield (x, x, flat.as_strided((6, 6), (5, 1))), ValueError, "out may overlap itself"
    yield (x, x, flat.as_strided((6, 6), (1, 1))), ValueError, "out may overlap itself"
    line = flat[:1].expand(1, 6)
    yield (x[:1], x, line), ValueError, "out may overlap itself"
    long = x[:1, :1].expand(1, 2**31 - 1)
    yield (x[:, :1], long), ValueError, "b has torch.Size([1, 2147483647])"


def test_refusals(lesson, device):
    x = normals(6, 6, "contiguous", F16, device, 0).contiguous()
    for arguments, error, message in refusals(x):
        assert_refused(lesson.matmul, arguments, error, message, x)


def test_an_output_beside_its_inputs(lesson, device):
    """In one buffer, but apart; and of one row or column, whose stride never counts."""
    a, b, out = torch.ones(3, 8, 8, dtype=F16, device=device)
    assert torch.equal(lesson.matmul(a, b, out=out), torch.full_like(a, 8))
    room = torch.zeros(64, dtype=F16, device=device)
    line = room.as_strided((1, 8), (0, 1))
    assert torch.equal(lesson.matmul(a[:1], b, out=line), torch.full_like(line, 8))
    line = room.as_strided((8, 1), (3, 0))
    assert torch.equal(lesson.matmul(a, b[:, :1], out=line), torch.full_like(line, 8))
    assert room.count_nonzero() == 13  # 0 to 7, then 9, 12, 15, 18, 21


def test_vector_addition(lesson, device):
    x, y = torch.randn(2, 1003, device=device)
    out = torch.full((1019,), SENTINEL, device=device)
    lesson.add_kernel[(2,)](x, y, out, 1003, 512)
    assert torch.equal(out[:1003], x + y) and (out[1003:] == SENTINEL).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_large_sizes_on_cuda(lesson, device, dtype):
    """Each tile that is picked, with rows that suit a descriptor, and others."""
    for M, N, K in [(1024, 1024, 512), (2047, 2049, 520), (2304, 4096, 64), (4096, 4104, 1000)]:
        a = torch.randn(M, K, device=device).to(dtype)
        b = torch.randn(K, N, device=device).to(dtype)
        for right in (b, b.t().contiguous().t()):
            assert_right(lesson, a, right)


def test_offsets_beyond_32_bits(lesson, device):
    room = beyond_32_bits(device)
    b = normals(128, 8, "contiguous", F16, device, 1).contiguous()
    for strides in ((1, 2**25), (2**31, 1)):  # by pointers, by descriptors
        a = room.as_strided((2, 128), strides)
        a.copy_(torch.randn(2, 128, device=device))
        assert_right(lesson, a, b)
        out = room.as_strided((2, 8), (2**31 + 8, 1 if strides[1] == 1 else 7), 512)
        a = a.contiguous()  # out would lie among the bytes of the view
        lesson.matmul(a, b, out=out)
        assert_close(out, a, b)
