"""reductions: sums and maxima of any 2-D view, against float64, interpreted and on CUDA."""

import math
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

FLOATS = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["FLOATS"]  # of the lesson
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
OPS = "sum", "max"
OWN = 8  # elements of the surroundings on each side


@pytest.fixture(scope="module")
def lesson(lesson):
    lesson.LEAST[torch.bfloat16] = -math.inf  # interpreted, the lesson has none
    return lesson


def values(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bool:
        return (numbers > 0).to(device)
    scale = 1 if dtype in FLOATS else min(2**40, torch.iinfo(dtype).max // 5)
    numbers = numbers.abs() if dtype == torch.uint8 else numbers
    return (numbers * scale).to(dtype).to(device)


def window(numbers):
    """The numbers inside a buffer that would spoil any result."""
    dtype = numbers.dtype
    around = {torch.bool: True}.get(dtype, math.nan)
    if dtype not in FLOATS and dtype != torch.bool:
        around = torch.iinfo(dtype).max
    m, n = numbers.shape
    room = torch.full((m + 2, n + 3), around, dtype=dtype, device=numbers.device)
    room[1:-1, 1:-2] = numbers
    return room[1:-1, 1:-2]


def assert_close(op, x, dim, got):
    """Equal; for sums of floats one rounding of the result and a few of its accumulator."""
    if op == "max" or x.dtype not in FLOATS:
        ref = x.amax(dim) if op == "max" else x.sum(dim, dtype=torch.int64)
        torch.testing.assert_close(got, ref, rtol=0, atol=0, equal_nan=True)
        return
    ref = x.double().sum(dim)
    assert (got.dtype, got.shape) == (x.dtype, ref.shape)
    rounded = ref.to(x.dtype).double()
    eps = torch.finfo(x.dtype).eps
    size = torch.nan_to_num(x.double().abs(), 0, 0, 0).sum(dim)
    least = eps * ref.abs() + 4 * min(eps, 2**-23) * size + torch.finfo(x.dtype).tiny * eps
    close = (got.double() - rounded).abs() <= least
    assert (close | (got.double() == rounded) | (got.isnan() & rounded.isnan())).all()


def assert_reduces(lesson, op, x, dim):
    """Into a view with steps, twice with the same bits; nothing else is written."""
    function = partial(lesson.reduce, op)
    before = x.clone()
    fresh = function(x, dim)
    assert_close(op, x, dim, fresh)
    room = torch.full((2 * len(fresh) + 2 * OWN,), 1, dtype=fresh.dtype, device=x.device)
    out = room[OWN:-OWN:2]
    assert function(x, dim, out=out) is out
    assert torch.equal(torch.nan_to_num(out.double()), torch.nan_to_num(fresh.double()))
    out.fill_(1)
    assert torch.equal(room, torch.ones_like(room))
    same = (x == before) | (x != x)
    assert same.all()


SHAPES = [(1, 1), (1, 4099), (4099, 1), (17, 59), (3, 1003), (1003, 3), (2, 4095), (33, 257)]
SHAPES += [(16, 4096), (5, 4097), (4097, 5), (65, 64), (256, 16), (1, 20_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_shapes(lesson, device, op, shape):
    x = window(values(shape, torch.float32, device))
    for dim in (0, 1):
        assert_reduces(lesson, op, x, dim)


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_dtypes(lesson, device, op, dtype):
    for shape in [(19, 1003), (600, 35)]:
        x = window(values(shape, dtype, device))
        for dim in (-2, -1):
            assert_reduces(lesson, op, x, dim)


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "steps": lambda t: t[::2, ::3],
    "rows": lambda t: t[1:],
    "columns": lambda t: t[:, 1:],
    "row for all": lambda t: t[:1].expand(9, -1),
    "column for all": lambda t: t[:, :1].expand(-1, 9),
    "one for all": lambda t: t[:1, :1].expand(7, 11),
    "a row": lambda t: t[:1],
    "a column": lambda t: t[:, :1],
    "windows that overlap": lambda t: t.as_strided((t.size(0), 2), (t.stride(0), 0)),
}


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
    view=st.sampled_from(sorted(VIEWS)),
    dtype=st.sampled_from(FLOATS + INTS),
    op=st.sampled_from(OPS),
    dim=st.integers(-2, 1),
    seed=st.integers(0, 99),
)
@example((2, 300), "transposed", torch.float16, "sum", 0, 0)
@example((70, 3), "column for all", torch.float32, "sum", 1, 0)
def test_views(lesson, device, shape, view, dtype, op, dim, seed):
    x = VIEWS[view](window(values(shape, dtype, device, seed)))
    if x.size(dim):
        assert_reduces(lesson, op, x, dim)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(FLOATS), op=st.sampled_from(OPS))
def test_special_values(lesson, device, data, dtype, op):
    """Infinities, NaN, both zeros, subnormals and the largest number."""
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, limits.max, -limits.max]
    special += [limits.tiny, limits.tiny * limits.eps, 1.0, -1.0]
    rows, columns = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 40)))
    row = st.lists(st.sampled_from(special), min_size=columns, max_size=columns)
    drawn = data.draw(st.lists(row, min_size=rows, max_size=rows))
    x = torch.tensor(drawn, dtype=torch.float64).to(dtype).to(device)
    for dim in (0, 1):
        got = partial(lesson.reduce, op)(x, dim)
        if op == "max":
            assert_close(op, x, dim, got)
            continue
        ref = x.double().sum(dim)
        sure = ref.isnan() | ref.isinf() | (x.double().abs().sum(dim) < limits.max)
        if dtype == torch.float64:
            sure &= ~(x.abs() == limits.max).any(dim)  # in which order, decides
        eps = limits.eps * 4 * torch.nan_to_num(x.double().abs(), 0, 0, 0).sum(dim)
        close = (got.double() - ref).abs() <= eps + limits.tiny * limits.eps
        same = (got.double() == ref) | (got.isnan() & ref.isnan())
        wide = (x.abs().double() == limits.max).any(dim)
        assert (close | same | ~sure | wide).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(1, 20_000), (9000, 3)], ids=str)
def test_one_nan_or_infinity_anywhere(lesson, device, shape, bad):
    """It is kept by every stage, wherever it lies."""
    for at in ((0, 0), (-1, -1), (shape[0] // 2, shape[1] // 2)):
        x = values(shape, torch.float32, device)
        x[at] = bad
        for dim in (0, 1):
            assert torch.equal(lesson.reduce("sum", x, dim).isfinite(), x.sum(dim).isfinite())
            assert_close("max", x, dim, lesson.reduce("max", x, dim))


def test_a_row_of_one_special_value(lesson, device):
    for value in (-math.inf, math.nan, -0.0, 0.0):
        x = torch.full((3, 700), value, device=device)
        for dim in (0, 1):
            got = lesson.reduce("max", x, dim)
            assert_close("max", x, dim, got)
            assert math.isnan(value) or torch.equal(got.signbit(), x.amax(dim).signbit())


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_do_not_overflow(lesson, device, dtype):
    largest = True if dtype == torch.bool else torch.iinfo(dtype).max
    n = 3000 if dtype != torch.int64 else 1
    for x in (torch.full((2, n), largest, device=device, dtype=dtype),):
        for view, dim in ((x, 1), (x.t(), 0)):
            sums = lesson.reduce("sum", view, dim)
            assert sums.dtype == torch.int64 and sums.tolist() == [n * int(largest)] * 2
            top = lesson.reduce("max", view, dim)
            assert top.dtype == dtype and top.tolist() == [largest] * 2
    least = False if dtype == torch.bool else torch.iinfo(dtype).min
    x = torch.full((2, 3001), least, device=device, dtype=dtype)
    assert lesson.reduce("max", x, 1).tolist() == [least] * 2


def test_float16_accumulates_in_float32(lesson, device):
    """In float16, a sum of ones stops at 2048."""
    for dtype, n in ((torch.float16, 30_000), (torch.bfloat16, 4096)):
        x = torch.ones(1, n, dtype=dtype, device=device)
        assert lesson.reduce("sum", x, 1).item() == n
        assert lesson.reduce("sum", x.t(), 0).item() == n


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_nothing(lesson, device, shape, dtype):
    x = torch.empty(shape, dtype=dtype, device=device)
    for dim in (0, 1):
        sums = lesson.reduce("sum", x, dim)
        assert torch.equal(sums, x.sum(dim)) and sums.dtype == x.sum(dim).dtype
        if shape[dim]:
            assert lesson.reduce("max", x, dim).shape == x.amax(dim).shape
        else:
            with pytest.raises(IndexError):
                x.amax(dim)
            with pytest.raises(IndexError, match=f"size 0 along {dim}: there is no maximum"):
                lesson.reduce("max", x, dim)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_any_number_of_parts(lesson, device, programs):
    for dtype in (torch.float32, torch.float16, torch.int32, torch.float64):
        for shape, dim in (((2, 30_000), 1), ((3000, 5), 0)):
            x = values(shape, dtype, device)
            for op in OPS:
                like = lesson.reduce_ref(op, x, dim)
                out = torch.empty_like(like)
                lesson.launch(op, x, dim, out, programs=programs)
                assert_close(op, x, dim, out)


def test_offsets_beyond_31_bits(lesson, device):
    """Few rows, far apart: the products of index and stride need 64 bits."""
    base = torch.empty(2**31 + 2**28, dtype=torch.int8, device=device)
    far = base.as_strided((9, 3), (2**28, 1))
    far.copy_(values((9, 3), torch.int8, device))
    near = far.clone()
    for view, same in ((far, near), (far.t(), near.t())):
        for dim in (0, 1):
            assert torch.equal(lesson.reduce("sum", view, dim), same.sum(dim))
            assert torch.equal(lesson.reduce("max", view, dim), same.amax(dim))
    tall = base.as_strided((1026, 3), (2**21, 1))  # one step of 1024 rows passes 2**31
    tall.copy_(values((1026, 3), torch.int8, device))
    sums = torch.empty(3, dtype=torch.int64, device=device)
    lesson.launch("sum", tall, 0, sums, programs=1)
    assert torch.equal(sums, tall.sum(0))


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(3, device=device, requires_grad=True)
    b = torch.ones(3, device=device)
    loss = (w * b).sum()
    lesson.reduce("sum", torch.ones(3, 4, device=device), 1, out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    x = torch.ones(3, 5, device=device, requires_grad=True)
    with torch.no_grad():
        assert lesson.reduce("sum", x, 1).tolist() == [5, 5, 5]
    with torch.inference_mode():
        assert lesson.reduce("max", x, 0).tolist() == [1] * 5


def test_out_beside_x_in_one_buffer(lesson, device):
    buffer = values(4 * 50, torch.float32, device)
    x, out = buffer[:150].view(3, 50), buffer[150:153]
    assert_close("sum", x, 1, lesson.reduce("sum", x, 1, out=out))
    before, x = buffer[:3], buffer[3:153].view(3, 50)
    assert_close("max", x, 1, lesson.reduce("max", x, 1, out=before))


def refusals(x):
    """Arguments, and what must be said, for a 17 x 59 float32 tensor."""
    leaf, meta = x.clone().requires_grad_(), x.to("meta")
    flat, out = x.reshape(-1), x.new_empty(17)
    yield (x.tolist(), 0), TypeError, "x is a list, no torch.Tensor"
    yield (None, 0), TypeError, "x is a NoneType"
    yield (x, 1, [0.0]), TypeError, "out is a list"
    for dtype in (torch.complex64, torch.float8_e5m2, torch.uint16):
        yield (x.abs().to(dtype), 0), TypeError, f"x has {dtype}; supported"
    yield (x, 1, out.double()), TypeError, "out has torch.float64, not torch.float32"
    yield (x.int(), 1, out.int()), TypeError, "out has torch.int32, not torch.int64"
    yield (x, 1, out.to(torch.complex64)), TypeError, "out has torch.complex64; supported"
    yield (flat, 0), ValueError, "x has 1 axes, not 2"
    yield (x[None], 0), ValueError, "x has 3 axes, not 2"
    yield (x[0, 0], 0), ValueError, "x has 0 axes, not 2"
    for dim in (2, -3, None, 1.0, "1", True, (0,)):
        yield (x, dim), ValueError, f"x has 2 axes, not 2, or dim is {dim!r}"
    yield (x, 0, out), ValueError, "out: torch.Size([17]), (1,); wanted torch.Size([59])"
    yield (x, 1, out[:16]), ValueError, "out: torch.Size([16])"
    yield (x, 1, out[:, None]), ValueError, "out: torch.Size([17, 1])"
    yield (x, 1, out[:1].expand(17)), ValueError, "out: torch.Size([17]), (0,)"
    yield (x, 1, x[:, 0]), ValueError, "out lies in the memory that x spans"
    yield (flat[19:999].view(20, 49), 1, flat[:20]), ValueError, "out lies in the memory"
    yield (flat[:980].view(20, 49), 1, flat[979:999]), ValueError, "out lies in the memory"
    yield (x[:, 1:], 1, x[:, 0]), ValueError, "out lies in the memory that x spans"
    yield (meta, 0), ValueError, "x: meta, x: meta, not ("
    yield (x, 1, out.to("meta")), ValueError, f"out: meta, x: {x.device}"
    yield (x.to_sparse(), 0), ValueError, "x is sparse, negated or needs a gradient"
    yield (x.to_sparse_csr(), 0), ValueError, "x is sparse"
    yield (torch._neg_view(x), 0), ValueError, "x is sparse, negated or"
    yield (x, 1, torch._neg_view(out)), ValueError, "out is sparse, negated or"
    yield (leaf, 0), ValueError, "x is sparse, negated or needs a gradient"
    yield (
        (x, 1, out.clone().requires_grad_()),
        ValueError,
        "out is sparse, negated or needs a gradient",
    )


@pytest.mark.parametrize("op", ["min", None, "", ["sum"]])
def test_an_unknown_operation_is_refused(lesson, device, op):
    with pytest.raises(ValueError, match="^op is .*, not one of "):
        lesson.reduce(op, torch.ones(2, 2, device=device), 0)


@pytest.mark.parametrize("op", OPS)
def test_refusals(lesson, device, op):
    x = values((17, 59), torch.float32, device)
    function = partial(lesson.reduce, op)
    for arguments, error, message in refusals(x):
        if op == "max" and "torch.int32, not torch.int64" in message:
            continue  # there int32 is right
        assert_refused(function, arguments, error, message, x)


def test_the_kernels_beside(lesson, device):
    x = values((4, 8), torch.int32, device)
    sums, maxima, diff = x.new_empty(4), x.new_empty(8), torch.empty_like(x)
    lesson.axes_kernel[(1,)](x, sums, maxima, diff)
    assert torch.equal(sums, x.sum(1, dtype=torch.int32)) and torch.equal(maxima, x.amax(0))
    assert torch.equal(diff, x - x.amax(1, keepdim=True))
    y = values((3, 1003), torch.float32, device).view(-1)
    total = torch.zeros(1, device=device)
    lesson.atomic_sum_kernel[(6,)](y, total, y.numel(), 512)
    assert_close("sum", y[None], 1, total)
    read = torch.empty(3, device=device)
    lesson.read_kernel[(3,)](y, read, 512)
    assert torch.equal(read, y[: 3 * 512].view(3, 512).amax(1))


def test_is_right_can_say_no(lesson, device):
    x = values((9, 1003), torch.float32, device)
    for op in OPS:
        ref = lesson.reduce_ref(op, x, 1)
        assert lesson.is_right(op, x, 1, ref)
        for wrong in (ref * (1 + 1e-3), torch.full_like(ref, math.nan), ref + 0.01):
            assert not lesson.is_right(op, x, 1, wrong)


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
def test_the_same_bits_each_time_on_cuda(lesson, device):
    """Two stages have a fixed order; a large sum of floats would show another."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(1, 2**24, device=device).to(dtype)
        first = lesson.reduce("sum", x, 1)
        assert all(torch.equal(lesson.reduce("sum", x, 1), first) for _ in range(50))


@pytest.mark.gpu
@on_cuda
def test_large_on_cuda(lesson, device):
    """More than 2**31 elements, in few rows and in many."""
    n = 2**31 + 2**16
    if torch.cuda.mem_get_info()[0] < 12 * n:
        pytest.skip(f"{12 * n / 2**30:.0f} GiB of GPU memory are needed")
    flat = torch.ones(n, dtype=torch.int8, device=device)
    for shape in ((1, n), (n // 2**16, 2**16), (2**16, n // 2**16), (n, 1)):
        for dim in (0, 1):
            sums = lesson.reduce("sum", flat.view(shape), dim)
            assert (sums == shape[dim]).all()
            del sums
    half = flat.view(2, -1).to(torch.bfloat16)
    half[1, -1] = 7
    assert lesson.reduce("max", half, 1).tolist() == [1, 7]


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(17, 59, device=device)
    with pytest.raises(ValueError, match="x: cpu, x: cpu, not"):
        lesson.reduce("sum", x.cpu(), 0)
    with pytest.raises(ValueError, match="out: cpu, x: cuda:0, not"):
        lesson.reduce("sum", x, 0, out=torch.empty(59))
    if torch.cuda.device_count() > 1:
        assert lesson.reduce("sum", x.to("cuda:1"), 0).tolist() == [17] * 59
    assert torch.cuda.current_device() == 0
