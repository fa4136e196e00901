"""gemm: every promise of its docstring, against float64, interpreted and on CUDA."""

import math

import lesson_code
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

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WITH_BFLOAT16 = ["WIDE", "DTYPES"]  # of the lesson
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LOSS = {"ieee": 0, "tf32x3": 2**-18, "tf32": 2**-9}  # of the sum of absolute products


def assert_right(lesson, a, b, out_dtype=F32, out_layout="contiguous", loss=0, **options):
    """Into a window, and nowhere else; and into a new tensor."""
    M, N = a.shape[0], b.shape[1]
    out, room = view(M, N, out_layout, out_dtype, a.device, SENTINEL)
    assert lesson.gemm(a, b, out=out, **options) is out
    assert_close(out, a, b, loss)
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "written outside of the window"
    fresh = lesson.gemm(a, b, out_dtype=out_dtype, **options)
    assert (fresh.shape, fresh.dtype, fresh.device) == ((M, N), out_dtype, a.device)
    assert_close(fresh, a, b, loss)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_sizes(lesson, device, M, N, K, dtype):
    a = normals(M, K, "contiguous", dtype, device, 1)
    b = normals(K, N, "contiguous", dtype, device, 2)
    assert_right(lesson, a, b, dtype)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 80)] * 3),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2, st.sampled_from(LAYOUTS[:4])),
    dtype=st.sampled_from([F32, F16]),
    out_dtype=st.sampled_from([F32, F16, BF16]),
    seed=st.integers(0, 99),
)
@example((65, 33, 40), ("transposed", "row", "both sliced"), F16, F32, 0)
@example((33, 65, 17), ("column", "transposed", "transposed"), F32, BF16, 0)
def test_any_strides(lesson, device, sizes, layouts, dtype, out_dtype, seed):
    M, N, K = sizes
    a = normals(M, K, layouts[0], dtype, device, seed)
    b = normals(K, N, layouts[1], dtype, device, seed + 1)
    assert_right(lesson, a, b, out_dtype, layouts[2])


@pytest.mark.parametrize("precision", LOSS)
def test_precisions(lesson, device, precision):
    a = normals(33, 129, "contiguous", F32, device, 1)
    b = normals(129, 40, "transposed", F32, device, 2)
    assert_right(lesson, a, b, loss=LOSS[precision], input_precision=precision)


def test_default_dtypes(lesson, device):
    for dtype in (F32, F16, BF16):
        a = torch.ones(3, 3, dtype=dtype, device=device)
        assert lesson.gemm(a, a).dtype == dtype


def test_special_values(lesson, device):
    """Infinities and NaN reach their row or column, and no other result."""
    a, b = specials(70, F32, device)
    got = lesson.gemm(a, b)
    exact = a.double() @ b.double()
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=0, equal_nan=True)
    half = torch.full((2, 2), 300.0, dtype=F16, device=device)
    assert lesson.gemm(half, half).isinf().all()
    assert torch.equal(lesson.gemm(half, half, out_dtype=F32), torch.full_like(a[:2, :2], 180000))
    tiny = torch.full((1, 1), 2.0**-24, dtype=F16, device=device)  # subnormal
    assert lesson.gemm(tiny, tiny, out_dtype=F32).item() == 2.0**-48


def test_inputs_may_be_one_tensor(lesson, device):
    a = normals(40, 40, "contiguous", F32, device, 5)
    before = a.clone()
    assert_right(lesson, a, a)
    assert_right(lesson, a, a.t())
    assert torch.equal(a, before)


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(3, 3, device=device, requires_grad=True)
    b = torch.ones(3, 3, device=device)
    loss = (w * b).sum()
    lesson.gemm(b.clone(), b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    a = torch.ones(5, 5, device=device, requires_grad=True)
    with torch.no_grad():
        assert not lesson.gemm(a, a).requires_grad
    with torch.inference_mode():
        assert lesson.gemm(a, a).sum().item() == 125


def refusals(x):
    """Arguments, and what must be said, for a 6 × 6 float32 tensor."""
    flat = torch.zeros(100, device=x.device)
    yield (x.tolist(), x), TypeError, "a is a list, not a torch.Tensor"
    yield (x, 1.0), TypeError, "b is a float, not a torch.Tensor"
    yield (x, x, [0.0]), TypeError, "out is a list"
    for dtype in (torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"a has {dtype}; supported"
        yield (x, x.to(dtype)), TypeError, f"b has {dtype}; supported"
        yield (x, x, x.to(dtype)), TypeError, f"out has {dtype}; supported"
        yield (x, x, None, dtype), TypeError, f"out has {dtype}; supported"
    yield (x, x.half()), TypeError, "b has torch.float16; supported here: [torch.float32]"
    yield (x, x[0]), ValueError, "b has torch.Size([6]), not two sizes"
    yield (x[None], x), ValueError, "a has torch.Size([1, 6, 6])"
    yield (x, x[:5]), ValueError, "a has 6 columns, b has 5 rows"
    yield (x, x[:, :5], x.clone()), ValueError, "out is torch.Size([6, 6])"
    yield (x, x, x.clone(), F16), ValueError, "out is torch.Size([6, 6]), torch.float32: not as"
    yield (x, x.to("meta")), ValueError, f"b is on meta, a is on {x.device}"
    yield (x.to("meta"), x.to("meta")), ValueError, "a is on meta; the kernel runs on cuda"
    yield (x.to_sparse(), x), ValueError, "a is sparse or a negated view"
    yield (x, torch._neg_view(x)), ValueError, "b is sparse or a negated view"
    yield (x, x, torch._neg_view(x.clone())), ValueError, "out is sparse or a negated view"
    yield (x.clone().requires_grad_(), x), ValueError, "a requires a gradient; pass a.detach()"
    yield (x, x, x.clone().requires_grad_()), ValueError, "out requires a gradient"
    yield (x, x, x), ValueError, "out lies among the bytes of a"
    yield (x.clone(), x, x.t()), ValueError, "out lies among the bytes of b"
    yield (flat[:36].view(6, 6), x, flat[35:71].view(6, 6)), ValueError, "out lies among"
    yield (x, x, flat[:6].expand(6, 6)), ValueError, "out may overlap itself: strides (0, 1)"
    yield (x, x, flat.as_strided((6, 6), (5, 1))), ValueError, "out may overlap itself"
    yield (x, x, None, None, "tf16"), ValueError, "input_precision: 'tf16' is unknown"
    yield (x, x, None, None, "ieee", 100), ValueError, "promote is 100, not 32, 128 or None"
    long = x[:1, :1].expand(1, 2**31 - 1)
    yield (x[:, :1], long), ValueError, "b has torch.Size([1, 2147483647])"


def test_refusals(lesson, device):
    x = normals(6, 6, "contiguous", F32, device, 0).contiguous()
    for arguments, error, message in refusals(x):
        assert_refused(lesson.gemm, arguments, error, message, x)


def test_an_output_beside_its_inputs(lesson, device):
    """In one buffer, but apart; and of one row or column, whose stride never counts."""
    a, b, out = torch.ones(3, 8, 8, device=device)
    assert torch.equal(lesson.gemm(a, b, out=out), torch.full_like(a, 8))
    room = torch.zeros(64, device=device)
    line = room.as_strided((1, 8), (0, 1))
    assert torch.equal(lesson.gemm(a[:1], b, out=line), torch.full_like(line, 8))
    line = room.as_strided((8, 1), (3, 0))
    assert torch.equal(lesson.gemm(a, b[:, :1], out=line), torch.full_like(line, 8))
    assert room.count_nonzero() == 13  # 0 to 7, then 9, 12, 15, 18, 21


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_what_the_interpreter_would_get_wrong(device, dtype):
    fresh = lesson_code.load.__wrapped__("gemm")
    x = torch.ones(4, 4, device=device).to(dtype)
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        assert (fresh.gemm(x, x) == 4).all()
    else:
        with pytest.raises(TypeError, match=f"a has {dtype}; supported here: .*float16"):
            fresh.gemm(x, x)
    if device == "cpu":
        assert fresh.WIDE == fresh.DTYPES == [F32, F16]


STATES = {  # cells: right, wrong, NaN, missing, around; NaN where masked rows are read
    "as above": [1344, 0, 0, 0, 0],
    "M, N swapped": [576, 0, 0, 768, 192],
    "M, K swapped": [0, 1344, 0, 0, 448],
    "no K mask": [0, 0, 1344, 0, 0],
    "K: only B": [0, 0, 1344, 0, 0],
    "% M": [1344, 0, 0, 0, 448],
}


@pytest.mark.parametrize("title", STATES)
def test_masks_in_the_wrong_place(lesson, device, title):
    """What the page's figure shows."""
    torch.manual_seed(1)  # of other numbers, a wrong one may happen to be right
    a, b = lesson.window(24, 40, F32), lesson.window(40, 56, F32)
    c = lesson.window(24, 56, F32, fill=7).fill_(7)
    kernel = lesson.changed(lesson.EDITS[title])
    lesson.launch(kernel, a, b, c, (16, 16, 16, 4, 2))
    assert lesson.verdict(c, a, b)[0] == STATES[title]


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("promote", [None, 32, 128])
def test_eight_bits_on_cuda(lesson, device, dtype, promote):
    if dtype not in lesson.DTYPES:
        pytest.skip("this GPU has no such dtype")
    for M, N, K in [(5, 7, 0), (1, 1, 1), (65, 127, 129), (2048, 2048, 512)]:
        a = normals(M, K, "contiguous", dtype, device, 1)
        b = normals(K, N, "transposed", dtype, device, 2)
        assert_right(lesson, a, b, loss=2**-9, promote=promote)
    values = a.float()
    values[0, 0] = math.nan
    a = values.to(dtype)
    assert lesson.gemm(a, b)[0].isnan().all()


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_large_tiles_on_cuda(lesson, device, dtype):
    for K in (64, 500, 512):
        a = torch.randn(2048, K, device=device).to(dtype)
        b = torch.randn(K, 2304, device=device).to(dtype)
        for precision in LOSS if dtype == F32 else ["ieee"]:
            for right in (b, b.t().contiguous().t()):
                loss = LOSS[precision]
                assert_right(lesson, a, right, loss=loss, input_precision=precision)


def test_offsets_beyond_32_bits(lesson, device):
    room = beyond_32_bits(device)
    a = room.as_strided((3, 128), (1, 2**25))  # a step passes 2**31 elements
    a.copy_(torch.randn(3, 128, device=device))
    b = normals(128, 5, "contiguous", F16, device, 1)
    assert_right(lesson, a, b)
    assert_right(lesson, b.t(), a.t())
    out = room.as_strided((3, 5), (2**30, 7), 500)
    a = a.contiguous()  # out would lie among the bytes of the view
    lesson.gemm(a, b, out=out)
    assert_close(out, a, b)
