"""vector_add: every promise of its docstring, against float64, interpreted and on CUDA."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
LIMITS = {dtype: torch.finfo(dtype) for dtype in DTYPES}
SIZES = [0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 509, 511, 512, 513]
SIZES += [997, 1003, 1008, 1023, 1024, 1025, 4093, 98_432]
OWN = 24  # elements of the surroundings on each side


def view(values, start=0):
    """The values as a view that begins ``start`` elements into a buffer of NaN."""
    n = values.numel()
    buffer = torch.full((n + start + OWN,), math.nan, dtype=values.dtype, device=values.device)
    buffer[start : start + n] = values.reshape(-1)
    return buffer[start : start + n].view(values.shape)


def bits(tensor):
    """For comparison bit by bit, as -0.0 == 0.0 and NaN != NaN. All NaN are one value."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), math.nan, tensor).view(integers)


def assert_adds(lesson, x, y, start=0):
    """Into a poisoned view, and nowhere else; the inputs stay as they are."""
    expected = bits((x.double() + y.double()).to(x.dtype))
    before = bits(x).clone(), bits(y).clone()
    n = x.numel()
    for poison in (math.nan, 1.0):
        room = torch.full((start + n + OWN,), poison, dtype=x.dtype, device=x.device)
        untouched = bits(room).clone()
        out = room[start : start + n].view(x.shape)
        assert lesson.vector_add(x, y, out=out) is out
        assert torch.equal(bits(out), expected)
        bits_now = bits(room)
        assert torch.equal(bits_now[:start], untouched[:start])
        assert torch.equal(bits_now[start + n :], untouched[start + n :])
    fresh = lesson.vector_add(x, y)
    assert (fresh.shape, fresh.dtype, fresh.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(bits(fresh), expected)
    assert torch.equal(bits(x), before[0]) and torch.equal(bits(y), before[1])


def normals(n, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sizes(lesson, device, n, dtype):
    x, y = (view(normals(n, dtype, device, seed)) for seed in (1, 2))
    assert_adds(lesson, x, y, start=16)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 3000),
    starts=st.tuples(*[st.integers(0, OWN)] * 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@example(n=1003, starts=(1, 0, 0), dtype=torch.float32, seed=0)
@example(n=1008, starts=(0, 0, 3), dtype=torch.float16, seed=0)
def test_views_that_start_anywhere(lesson, device, n, starts, dtype, seed):
    x, y = (view(normals(n, dtype, device, seed + i), starts[i]) for i in (0, 1))
    assert_adds(lesson, x, y, starts[2])


@settings(max_examples=80, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_special_values(lesson, device, data, dtype):
    """Infinities, NaN, both zeros, subnormals, overflow, ties: one rounding, like float64's."""
    limits = LIMITS[dtype]
    special = [0.0, math.inf, math.nan, limits.max, limits.tiny, limits.smallest_normal]
    special += [limits.tiny * limits.eps, 1.0, 1 + limits.eps, limits.eps / 2, limits.max / 2]
    width = 64 if dtype == torch.float64 else 32
    number = st.sampled_from(special + [-v for v in special]) | st.floats(width=width)
    pairs = data.draw(st.lists(st.tuples(number, number), min_size=1, max_size=40))
    x, y = torch.tensor(pairs, dtype=torch.float64).to(dtype).T.contiguous().to(device)
    assert_adds(lesson, x, y)


@pytest.mark.parametrize("shape", [(), (1, 1), (17, 59), (2, 3, 5, 7), (0, 4), (3, 0, 2)], ids=str)
def test_shapes(lesson, device, shape):
    x, y = (normals(math.prod(shape), torch.float32, device, s).view(shape) for s in (1, 2))
    assert_adds(lesson, x, y)


def test_empty_returns_out(lesson, device):
    x = torch.empty(0, device=device)
    out = torch.empty(0, device=device)
    assert lesson.vector_add(x, x, out) is out


@pytest.mark.parametrize("n", [1003, 4096])
def test_in_place(lesson, device, n):
    x, y = (normals(n, torch.float32, device, seed) for seed in (1, 2))
    for out, a, b in [(x.clone(), None, y), (y.clone(), x, None), (x.clone(), None, None)]:
        a, b = (out if t is None else t for t in (a, b))
        expected = a + b
        assert lesson.vector_add(a, b, out=out) is out
        assert torch.equal(out, expected)


def test_autograd_sees_the_write(lesson, device):
    """As with ``torch.add(…, out=b)``: a backward pass that needs the old b raises."""
    w = torch.ones(3, device=device, requires_grad=True)
    b = torch.ones(3, device=device)
    loss = (w * b).sum()
    lesson.vector_add(b.clone(), b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_neighbours_in_one_buffer(lesson, device):
    x, y, out = normals(3 * 1003, torch.float32, device).view(3, 1003)
    assert torch.equal(lesson.vector_add(x, y, out=out), x + y)


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    x = torch.ones(5, device=device, requires_grad=True)
    with torch.no_grad():
        assert not lesson.vector_add(x, x).requires_grad
        assert torch.equal(lesson.vector_add(x, x, out=x), torch.full_like(x, 2))
    with torch.inference_mode():
        assert lesson.vector_add(x, x).sum().item() == 20
    assert torch.equal(lesson.vector_add(x.detach(), x.detach()), x.detach() * 2)


def refusals(x):
    """Arguments, and what must be said, for a 17 × 59 float32 tensor."""
    leaf = x.clone().requires_grad_()
    column = x.t()
    meta = x.to("meta")
    flat = x.reshape(-1)
    yield (x.tolist(), x), TypeError, "x is a list, not a torch.Tensor"
    yield (x, 1.0), TypeError, "y is a float, not a torch.Tensor"
    yield (None, None), TypeError, "x is a NoneType"
    yield (x, x, [0.0]), TypeError, "out is a list"
    yield (x, x.cpu().numpy()), TypeError, "y is a ndarray"
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"x has {dtype}; supported"
    yield (x, x.int()), TypeError, "y has torch.int32; supported"
    yield (x, x.double()), TypeError, "y has torch.float64, x has torch.float32"
    yield (x, x, x.half()), TypeError, "out has torch.float16, x has torch.float32"
    yield (x, x[0]), ValueError, "y has torch.Size([59]), x has torch.Size([17, 59])"
    yield (x, x[:1]), ValueError, "y has torch.Size([1, 59])"
    yield (x, x[0, 0]), ValueError, "y has torch.Size([]), x has"
    yield (x, flat), ValueError, "y has torch.Size([1003])"
    yield (x, x, x[:16]), ValueError, "out has torch.Size([16, 59])"
    yield (x[:0], x[:0], x), ValueError, "out has torch.Size([17, 59])"
    yield (x, meta), ValueError, f"y is on meta, x is on {x.device}"
    yield (meta, meta), ValueError, "x is on meta; the kernel runs on cuda"
    yield (x, x, meta), ValueError, "out is on meta, x is on"
    yield (column, column), ValueError, "x is not contiguous; pass x.contiguous()"
    yield (x[:, :58], x[:, 1:]), ValueError, "x is not contiguous"
    yield (flat[:1000:2], flat[500:1000]), ValueError, "x is not contiguous"
    yield (x[:1].expand(17, 59), x), ValueError, "x is not contiguous"
    yield (x, x[:1].expand(17, 59)), ValueError, "y is not contiguous; pass y.contiguous()"
    yield (x, x, x[:, :1].expand(17, 59)), ValueError, "out is not contiguous"
    yield (x.to_sparse(), x.to_sparse()), ValueError, "x is sparse or a negated view"
    yield (torch._neg_view(x), x), ValueError, "x is sparse or a negated view; pass a copy"
    yield (x, x, torch._neg_view(x)), ValueError, "out is sparse or a negated view"
    yield (x.to_sparse_csr(), x), ValueError, "x is sparse or a negated view"
    yield (leaf, x), ValueError, "x requires a gradient; pass x.detach()"
    yield (x, leaf), ValueError, "y requires a gradient; pass y.detach()"
    yield (x, x, leaf), ValueError, "out requires a gradient"
    yield (torch.nn.Parameter(x), x), ValueError, "x requires a gradient"
    yield (flat[:500], flat[500:1000], flat[1:501]), ValueError, "out overlaps x in part"
    yield (flat[1:501], flat[500:1000], flat[:500]), ValueError, "out overlaps x in part"
    yield (flat[:500], flat[500:1000], flat[501:1001]), ValueError, "out overlaps y in part"
    yield (flat[:500], flat[500:1000], flat[499:999]), ValueError, "out overlaps x in part"


def test_refusals(lesson, device):
    x = normals(1003, torch.float32, device).view(17, 59)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.vector_add, arguments, error, message, x)


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(1003, device=device)
    for arguments, message in [
        ((x.cpu(), x.cpu()), "x is on cpu; the kernel runs on cuda"),
        ((x, x.cpu()), "y is on cpu, x is on cuda:0"),
        ((x, x, x.cpu()), "out is on cpu, x is on cuda:0"),
    ]:
        with pytest.raises(ValueError) as caught:
            lesson.vector_add(*arguments)
        assert str(caught.value) == message
    if torch.cuda.device_count() > 1:
        other = x.to("cuda:1")
        assert torch.equal(lesson.vector_add(other, other), other * 2)
        with pytest.raises(ValueError, match="y is on cuda:1, x is on cuda:0"):
            lesson.vector_add(x, other)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("n", [2**26 + 3, 2**31 - 1, 2**31 + 3])
def test_long_vectors_on_cuda(lesson, device, n):
    """Offsets beyond 32 bits are right, to the last element."""
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip(f"{10 * n / 2**30:.0f} GiB of GPU memory are needed")
    x, y = (torch.randn(n, dtype=torch.float16, device=device) for _ in range(2))
    out = torch.full_like(x, math.nan)
    lesson.vector_add(x, y, out=out)
    for o, a, b in zip(*(t.split(2**26) for t in (out, x, y))):
        assert torch.equal(o, (a.double() + b.double()).half())
