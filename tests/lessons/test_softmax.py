"""softmax: every promise of its docstring, against float64, interpreted and on CUDA."""

import math
import mmap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
inf, nan = math.inf, math.nan


def view(values, start=0, gap=0, step=1, turned=False):
    """The values as a view into a buffer of NaN: rows ``gap`` elements apart, columns ``step``."""
    if turned:
        return view(values.t(), start, gap, step).t()
    rows, columns = values.shape
    width = columns * step + gap
    buffer = torch.full((start + rows * width + 24,), nan, dtype=values.dtype, device=values.device)
    window = buffer.as_strided(values.shape, (width, step), start)
    window.copy_(values)
    return window


def allowed(x):
    """An error for each element: of the exponent, of a few operations, of the last rounding."""
    limits = torch.finfo(x.dtype)
    work = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32)
    shift = x.double() - x.double().amax(1, keepdim=True)
    y = torch.softmax(x.double(), 1)
    relative = work.eps * (64 - shift.clamp(-200, 0)) + limits.eps / 2 * 1.01
    return y * relative + max(work.tiny, limits.tiny * limits.eps) * 1.01


def assert_right(got, x):
    """Where torch has NaN, so have we, and nowhere else; the rest is near float64."""
    expected = torch.softmax(x.double(), 1)
    assert got.shape == x.shape and got.dtype == x.dtype and got.device == x.device
    if x.numel() == 0:
        return
    assert torch.equal(got.isnan(), expected.isnan())
    far = (got.double() - expected).abs() > allowed(x)
    assert not far.any(), (x[far], got[far], expected[far])


def check(lesson, x, **of_out):
    """Into a poisoned view, and nowhere else; then into a new tensor; the input stays as it is."""
    before = x.clone()
    out = view(torch.zeros(x.shape, dtype=x.dtype, device=x.device), **of_out)
    room = out.as_strided((out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
    for poison in (nan, 7.0):
        room.fill_(poison)
        assert lesson.softmax(x, out=out) is out
        assert_right(out, x)
        out.fill_(poison)
        around = room.isnan() if math.isnan(poison) else room == poison
        assert around.all(), "something beside out was written"
    fresh = lesson.softmax(x)
    assert_right(fresh, x)
    assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(before))


def normals(shape, dtype, device, seed=0, scale=3):
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(dtype).to(device)


SIZES = [(0, 5), (3, 0), (0, 0), (1, 1), (5, 1), (7, 2), (3, 127), (3, 128), (4, 129)]
SIZES += [(9, 255), (17, 256), (2, 257), (3, 781), (5, 1008), (2, 1024), (3, 1025), (1, 4097)]
SIZES += [(2, 12288), (1, 32768), (2, 32771)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sizes(lesson, device, shape, dtype):
    check(lesson, view(normals(shape, dtype, device), 16), start=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [65_536, 65_552, 131_071, 2**18])
def test_long_rows(lesson, device, N, dtype):
    x = view(normals((1, N), dtype, device), 16)
    x[0, N // 2] = 9
    check(lesson, x, start=16)


ways = st.fixed_dictionaries(
    dict(
        start=st.sampled_from([0, 1, 3, 8, 16]),
        gap=st.sampled_from([0, 0, 1, 5, 16]),
        step=st.sampled_from([1, 1, 1, 2, 3]),
        turned=st.booleans(),
    )
)
plain = dict(start=0, gap=0, step=1, turned=False)


@settings(max_examples=40, deadline=None)
@given(
    M=st.integers(0, 20),
    N=st.integers(0, 300) | st.sampled_from([511, 512, 513, 781, 1000, 2048, 2056]),
    of_x=ways,
    of_out=ways,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@example(9, 781, plain, plain, torch.float16, 0)
@example(9, 781, plain, plain, torch.bfloat16, 0)
@example(9, 781, plain, plain, torch.float32, 0)
@example(9, 781, plain, plain | dict(gap=1), torch.float16, 0)
@example(9, 1000, plain, plain, torch.float16, 0)
@example(5, 7, plain, plain, torch.float16, 0)
@example(9, 784, plain | dict(gap=3), plain | dict(gap=11), torch.float16, 0)
def test_any_view(lesson, device, M, N, of_x, of_out, dtype, seed):
    check(lesson, view(normals((M, N), dtype, device, seed), **of_x), **of_out)


def both(lesson, x):
    """The results of both kernels, whatever the length of the rows."""
    for online in (False, True):
        out = torch.full_like(x, 7.0)
        lesson.launch(x, out, online)
        yield out


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_special_values(lesson, device, data, dtype):
    """Infinities, NaN, both zeros, subnormals and the largest numbers, as torch treats them."""
    limits = torch.finfo(dtype)
    special = [0.0, inf, nan, limits.max, limits.tiny, limits.tiny * limits.eps, 1.0]
    number = st.sampled_from(special + [-v for v in special]) | st.floats(-9, 9, width=16)
    width = data.draw(st.integers(1, 40))
    rows = data.draw(
        st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=4)
    )
    x = torch.tensor(rows, dtype=torch.float64).to(dtype).to(device)
    for out in both(lesson, x):
        assert_right(out, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_one_special_value_anywhere(lesson, device, dtype, value):
    """In each piece and each step, also the last; masked rows among others."""
    x = normals((8, 40_000), dtype, device)
    for row, column in enumerate([0, 1, 9_999, 16_384, 32_767, 32_768, 39_999]):
        x[row, column] = value
    x[7] = value
    for out in both(lesson, x):
        assert_right(out, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_values_cancel(lesson, device, dtype):
    """A maximum far from 0 costs no precision: the difference is taken first."""
    limits = torch.finfo(dtype)
    big = limits.max / 2 ** math.ceil(math.log2(limits.max * limits.eps / 8))
    x = (normals((3, 300), dtype, device).double().round() + big).to(dtype)
    for out in both(lesson, x):
        assert_right(out, x)


@pytest.mark.parametrize("rising", [True, False])
def test_online_rescales(lesson, device, rising):
    """The maximum grows in each step, or in none."""
    x = torch.linspace(-300, 300, 70_000, device=device)[None]
    x = x if rising else x.flip(1)
    out = torch.empty_like(x)
    lesson.launch(x, out, True)
    assert_right(out, x)


@pytest.mark.parametrize("M, N", [(9, 781), (2, 40_000)])
@pytest.mark.parametrize("turned", [False, True])
def test_in_place(lesson, device, M, N, turned):
    x = view(normals((M, N), torch.float32, device), turned=turned)
    before = x.clone()
    assert lesson.softmax(x, out=x) is x
    assert_right(x, before)
    for online in (False, True):
        x.copy_(before)
        lesson.launch(x, x, online)
        assert_right(x, before)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (9, 100), (600, 1), (2, 40_000)])
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
def test_each_element_is_stored_once(lesson, device, shape, monkeypatch):
    """In place, a second store would come from a thread that may have loaded results."""
    from triton.runtime.interpreter import interpreter_builder as builder

    store, stored = builder.create_masked_store, []

    def spy(ptrs, value, mask, *rest):
        stored.extend(ptrs.data[mask.data].tolist())
        return store(ptrs, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_store", spy)
    x = normals(shape, torch.float32, device)
    for online in (False, True):
        stored.clear()
        lesson.launch(x, x, online)
        assert sorted(stored) == [x.data_ptr() + 4 * i for i in range(x.numel())]


def test_broadcast_rows(lesson, device):
    x = normals((1, 300), torch.float32, device).expand(5, 300)
    check(lesson, x)
    check(lesson, normals((5, 1), torch.float32, device).expand(5, 300))


@pytest.mark.parametrize("strides", [(4, 2**30), (2**30, 2)])
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
def test_offsets_beyond_32_bits(lesson, device, strides):
    """In memory that is only promised: a page comes when it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE on Linux
    room = torch.frombuffer(mmap.mmap(-1, 2**33, flags=flags), dtype=torch.float16)
    values = normals((4, 4), torch.float16, device)
    wide, out = room.as_strided((4, 4), strides), torch.empty_like(values)
    for online in (False, True):
        wide.copy_(values)
        lesson.launch(wide, out, online)
        assert_right(out, values)
        lesson.launch(values, wide.fill_(nan), online)
        assert_right(wide, values)
    wide.copy_(values)
    assert_right(lesson.softmax(wide, out=wide), values)


def test_the_switch(lesson, device, monkeypatch):
    """Rows of at most LONGEST bytes take one kernel, longer ones the other."""
    chosen = []
    monkeypatch.setattr(lesson, "launch", lambda x, out, online: chosen.append(online))
    for dtype in DTYPES:
        most = lesson.LONGEST // dtype.itemsize
        for N in (most, most + 1):
            lesson.softmax(torch.zeros(1, N, dtype=dtype, device=device))
    assert chosen == [False, True] * len(DTYPES)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_plan(lesson, size):
    """Pieces cover a row, the last one in part; threads have no more than 128 bytes."""
    for N in [*range(1, 3000), *range(3000, lesson.LONGEST // size + 1, 997)]:
        for vector in (1, 16 // size):
            rows, pieces, piece, warps = lesson.plan(N, size, vector)
            assert (pieces - 1) * piece < N <= pieces * piece and 1 <= pieces <= 8
            assert all(n & (n - 1) == 0 for n in (rows, piece, warps)) and 1 <= warps <= 32
            assert rows * pieces * piece * size <= 4 * max(128, 2048 // warps) * 32 * warps


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(2, 3, device=device, requires_grad=True)
    b = torch.ones(2, 3, device=device)
    loss = (w * b).sum()
    lesson.softmax(b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    x = torch.ones(2, 4, device=device, requires_grad=True)
    with torch.no_grad():
        assert not lesson.softmax(x).requires_grad
    with torch.inference_mode():
        assert lesson.softmax(x).sum().item() == 2


def refusals(x):
    """Arguments, and what must be said, for a 17 x 59 float32 tensor."""
    leaf, flat = x.clone().requires_grad_(), x.reshape(-1)
    meta = x.to("meta")
    yield (x.tolist(),), TypeError, "x is a list, not a torch.Tensor"
    yield (None,), TypeError, "x is a NoneType"
    yield (x, [0.0]), TypeError, "out is a list"
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e5m2):
        yield (x.to(dtype),), TypeError, f"x has {dtype}; supported"
    yield (x, x.int()), TypeError, "out has torch.int32; supported"
    yield (x, x.half()), TypeError, "out has torch.float16, x has torch.float32"
    yield (flat,), ValueError, "x has shape (1003,), not two dimensions"
    yield (x[None],), ValueError, "x has shape (1, 17, 59), not two dimensions"
    yield (x, x[:16]), ValueError, "out has shape (16, 59), not (17, 59) like x"
    yield (x, x.t()), ValueError, "out has shape (59, 17)"
    yield (x[:0], x), ValueError, "out has shape (17, 59), not (0, 59) like x"
    yield (meta,), ValueError, "x is on meta; the kernel runs on cuda"
    yield (x, meta), ValueError, "out is on meta; the kernel runs on cuda"
    yield (x.to_sparse(),), ValueError, "x is sparse, nested or negated; pass a copy"
    yield (x.to_sparse_csr(),), ValueError, "x is sparse, nested or negated"
    yield (torch._neg_view(x),), ValueError, "x is sparse, nested or negated"
    yield (x, torch._neg_view(x)), ValueError, "out is sparse, nested or negated"
    nested = torch.nested.nested_tensor([x[0], x[1, :9]])
    yield (nested,), ValueError, "x is sparse, nested or negated"
    yield (leaf,), ValueError, "x requires a gradient; pass x.detach()"
    yield (x, leaf), ValueError, "out requires a gradient"
    for shared in (x[:1].expand(17, 59), x[:, :1].expand(17, 59), x[0, 0].expand(17, 59)):
        yield (x, shared), ValueError, "positions of out share an element"
    yield (x[:9, :9], flat.as_strided((9, 9), (2, 3), 500)), ValueError, "positions of out share"
    yield (x[1:], x[:-1]), ValueError, "out and x may overlap; pass a new out"
    yield (x[:, 1:], x[:, :-1]), ValueError, "out and x may overlap"
    yield (x[:, :17], x[:, :17].t()), ValueError, "out and x may overlap"
    yield (x[:1].expand(17, 59), x), ValueError, "out and x may overlap"


def test_refusals(lesson, device):
    x = normals((17, 59), torch.float32, device)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.softmax, arguments, error, message, x)


def test_an_out_with_odd_strides_is_fine(lesson, device):
    x = normals((3, 4), torch.float32, device)
    room = torch.full((40,), nan, device=device)
    for strides in [(4, 1), (1, 3), (9, 2), (2, 6), (5, 3)]:
        assert_right(lesson.softmax(x, out=room.as_strided((3, 4), strides)), x)
    one = normals((1, 4), torch.float32, device)
    assert_right(lesson.softmax(one, out=room.as_strided((1, 4), (0, 2))), one)


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_lengths_on_cuda(lesson, device, dtype):
    for N in [*range(1, 300), *range(300, 70_000, 1013), 2**17 - 1, 2**17 + 1, 2**20]:
        check(lesson, normals((5, N), dtype, device))


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("M, N", [(2**11 + 1, 2**20), (2**20 + 1, 2**11), (3, 2**30)])
def test_offsets_beyond_32_bits_on_cuda(lesson, device, M, N):
    if torch.cuda.mem_get_info()[0] < 6 * M * N:
        pytest.skip(f"{6 * M * N / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.randn(M, N, dtype=torch.float16, device=device)
    out = torch.full_like(x, nan)
    lesson.softmax(x, out=out)
    assert_right(out[-1:], x[-1:])
    assert_right(out[:1], x[:1])
    turned = x.view(N, M).t()
    lesson.softmax(turned[:, -300:], out=out[:, :300])
    assert_right(out[-1:, :300], turned[-1:, -300:])


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(3, 5, device=device)
    with pytest.raises(ValueError, match="x is on cpu; the kernel runs on cuda"):
        lesson.softmax(x.cpu())
    if torch.cuda.device_count() > 1:
        assert_right(lesson.softmax(x.to("cuda:1")), x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
