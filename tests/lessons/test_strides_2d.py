"""strides_2d: copy, transpose and bias-add of every view, bit by bit, interpreted and on CUDA."""

import math

import lesson_code
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
interpreter = pytest.importorskip("triton.runtime.interpreter")

FLOATS = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["FLOATS"]  # of the lesson
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OTHERS += [torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint64]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OPS = ["copy_2d", "transpose", "bias_add"]
SENTINEL = 0x5A  # of each byte around an output
SIZES = st.integers(0, 20) | st.sampled_from([1, 31, 32, 33, 63, 64, 65, 97])


def bits(tensor):
    """As integers, for comparison bit by bit. After arithmetic, all NaN are one value."""
    return tensor.view(WORDS[tensor.itemsize])


def one_nan(tensor):
    return torch.where(tensor.isnan(), math.nan, tensor)


def numbers(shape, dtype, device, seed=0):
    """Random bits for a copy would hold any NaN; these are normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(dtype).to(device)


class Window:
    """A matrix of any strides inside a buffer of its own, which is poisoned around it."""

    def __init__(self, shape, strides, start, dtype, device):
        extent = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
        size = start + max(extent, 1) + 7
        raw = torch.full((size * dtype.itemsize,), SENTINEL, dtype=torch.uint8, device=device)
        self.buffer = raw.view(dtype)
        self.view = self.buffer.as_strided(shape, strides, start)

    def untouched(self):
        """Whether all around the matrix is as it was; the matrix is overwritten."""
        bits(self.view).fill_(SENTINEL)
        clean = bits(self.buffer).clone().view(torch.uint8)
        mine = torch.zeros_like(bits(self.buffer))
        mine.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(1)
        around = clean.view(-1, self.view.itemsize)[mine == 0]
        return bool((around == SENTINEL).all())


@st.composite
def matrices(draw, itself=False, sizes=None):
    """Shape, strides, start. With ``itself``, positions may share elements."""
    sizes = SIZES if sizes is None else sizes
    M, N = draw(sizes), draw(sizes)
    kind = draw(st.sampled_from(["rows", "columns", "steps"] + ["repeat", "slide"] * itself))
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    if kind == "columns":
        strides = (inner, inner * max(M, 1) + outer)
    elif kind == "repeat":
        strides = draw(st.sampled_from([(0, inner), (inner, 0), (0, 0)]))
    elif kind == "slide":
        strides = (draw(st.integers(0, 3)), inner)
    else:
        inner = inner if kind == "steps" else 1
        strides = (inner * max(N, 1) + outer, inner)
    return (M, N), strides, draw(st.integers(0, 9))


def expected(op, x, bias):
    if op == "bias_add":
        return (x.double() + bias.double()).to(x.dtype)
    return x if op == "copy_2d" else x.t()


def call(lesson, op, x, bias, out=None):
    arguments = (x, bias) if op == "bias_add" else (x,)
    return getattr(lesson, op)(*arguments, out=out)


def assert_right(lesson, op, x, bias, window):
    """Into the window and nowhere else, and the same into a fresh tensor."""
    want, before = expected(op, x, bias), bits(x).clone()
    look = one_nan if op == "bias_add" else lambda t: t
    out = window.view
    assert call(lesson, op, x, bias, out) is out
    assert torch.equal(bits(look(out)), bits(look(want)))
    assert window.untouched()
    fresh = call(lesson, op, x, bias)
    assert (fresh.shape, fresh.dtype, fresh.device) == (want.shape, x.dtype, x.device)
    assert fresh.is_contiguous()
    assert torch.equal(bits(look(fresh)), bits(look(want)))
    assert torch.equal(bits(x), before)


def filled(layout, dtype, device, seed):
    """An input of that layout with numbers in it, NaN around it."""
    shape, strides, start = layout
    extent = sum(max(n - 1, 0) * s for n, s in zip(shape, strides)) + 1
    buffer = torch.full((start + extent + 9,), math.nan, dtype=dtype, device=device)
    buffer[start : start + extent] = numbers(extent, dtype, device, seed)
    return buffer.as_strided(shape, strides, start)


@settings(max_examples=90, deadline=None)
@given(
    op=st.sampled_from(OPS),
    source=matrices(itself=True),
    target=matrices(),
    step=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
)
@example("transpose", ((64, 64), (64, 1), 0), ((64, 64), (64, 1), 0), 1, torch.float16)
@example("transpose", ((64, 97), (194, 2), 1), ((97, 64), (64, 1), 0), 1, torch.float32)
@example("bias_add", ((33, 1), (1, 7), 0), ((33, 1), (5, 1), 0), 0, torch.float32)
@example("bias_add", ((1, 65), (3, 2), 0), ((1, 65), (1, 1), 0), 2, torch.float32)
def test_every_view(lesson, device, op, source, target, step, dtype):
    x = filled(source, dtype, device, 1)
    M, N = shape = expected(op, x, numbers(x.shape[1], dtype, device)).shape
    _, strides, start = target
    inner = min(strides)
    strides = (inner * max(N, 1) + 2, inner) if strides[0] > strides[1] else None
    strides = strides or (inner, inner * max(M, 1) + 1)
    bias = filled(((x.shape[1], 1), (step, 1), 2), dtype, device, 2)[:, 0]
    assert_right(lesson, op, x, bias, Window(shape, strides, start, dtype, device))


SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 4099), (4099, 1), (2, 2053), (2053, 3)]
SHAPES += [(63, 65), (64, 64), (65, 63), (33, 257), (128, 256)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(lesson, device, shape, dtype):
    """Sizes around those of tiles, of a contiguous and of a transposed matrix."""
    bias = numbers(shape[1], dtype, device, 3)
    for x in numbers(shape, dtype, device), numbers(shape[::-1], dtype, device).t():
        for op in OPS:
            want = expected(op, x, bias)
            window = Window(want.shape, (max(want.shape[1], 1), 1), 4, dtype, device)
            assert_right(lesson, op, x, bias, window)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_copies_move_bits(lesson, device, dtype):
    """Each NaN, both zeros, any bool or integer: nothing is converted."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (70 * 66 * dtype.itemsize,), generator=generator)
    raw = raw % 2 if dtype == torch.bool else raw
    x = raw.to(torch.uint8).to(device).view(dtype).view(70, 66)
    for view in x, x.t(), x[::2, 3:], x[:, :1].expand(70, 5):
        assert torch.equal(bits(lesson.copy_2d(view)), bits(view))
        assert torch.equal(bits(lesson.transpose(view)), bits(view).t())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(FLOATS))
def test_special_values_of_a_sum(lesson, device, data, dtype):
    """Infinities, NaN, both zeros, subnormals, overflow, ties: one rounding, like float64's."""
    limits = torch.finfo(dtype)
    special = [0.0, math.inf, math.nan, limits.max, limits.tiny, limits.smallest_normal]
    special += [limits.tiny * limits.eps, 1.0, 1 + limits.eps, limits.eps / 2, limits.max / 2]
    number = st.sampled_from(special + [-v for v in special]) | st.floats(width=32)
    pairs = data.draw(st.lists(st.tuples(number, number), min_size=1, max_size=40))
    x, bias = torch.tensor(pairs, dtype=torch.float64).to(dtype).T.contiguous().to(device)
    for view in x[None], x[:, None].expand(-1, len(pairs)), x[None].expand(3, -1):
        want, got = expected("bias_add", view, bias), lesson.bias_add(view, bias)
        assert torch.equal(bits(one_nan(got)), bits(one_nan(want)))


def test_far_apart(lesson, device):
    """A tile, and a whole view, whose offsets pass 2**31; untouched pages cost nothing."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 7e9:
        pytest.skip("7 GB of GPU memory are needed")
    far = torch.empty(2**31 + 2**12, dtype=torch.int8, device=device)
    for strides in (2**30, 1), (1, 2**30), (2**30, 3):
        shape = (3, 70) if strides[0] > 1 else (70, 3)
        x = far.as_strided(shape, strides, 5)
        values = torch.arange(210, device=device).to(torch.int8).view(shape)
        assert torch.equal(lesson.copy_2d(values, out=x), values)
        assert torch.equal(x, values)
        assert torch.equal(lesson.copy_2d(x), values)
        assert torch.equal(lesson.transpose(x), values.t())
    del far, x
    if device == "cpu":  # 2 GiB of address space, two pages of memory
        far = torch.empty(2**31 + 2**12, dtype=torch.float16)
        x = far.as_strided((2, 70), (2**31, 1))
        x.copy_(numbers((2, 70), torch.float16, device))
        bias = numbers(70, torch.float16, device, 1)
        assert torch.equal(lesson.bias_add(x, bias), expected("bias_add", x, bias))


def test_the_end_of_a_row_just_below_2_31(lesson, device, monkeypatch):
    """Its number of tiles takes care too. Only the last program runs."""
    if device == "cuda":
        pytest.skip("test_large_matrices_on_cuda has the whole row")
    N, BLOCK_N = 2**31 - 1, 2048
    last = N // BLOCK_N
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *_: setattr(builder, "grid_idx", (last, 0, 0))
    )
    x, out = torch.ones(1, dtype=torch.int8), torch.empty(N, dtype=torch.int8)
    out[(last - 1) * BLOCK_N :] = 0
    strides = 0, 0, 0, 0, 0, 1
    lesson.tile_kernel[(1,)](x, None, out, 1, N, *strides, BLOCK_M=1, BLOCK_N=BLOCK_N)
    assert out[last * BLOCK_N :].all() and not out[(last - 1) * BLOCK_N : last * BLOCK_N].any()


def test_empty_returns_out(lesson, device):
    x, out = torch.empty(0, 5, device=device), torch.empty(0, 5, device=device)
    assert lesson.copy_2d(x, out) is out
    assert lesson.bias_add(x, torch.empty(5, device=device), out) is out
    assert lesson.transpose(x).shape == (5, 0)


def test_in_place(lesson, device):
    for x in numbers((70, 66), torch.float32, device), numbers((66, 70), torch.float16, device).t():
        want, bias = expected("bias_add", x, x[3].clone()), x[3].clone()
        assert lesson.bias_add(x, bias, out=x) is x
        assert torch.equal(x, want)
        assert lesson.copy_2d(x, out=x) is x and torch.equal(x, want)
        assert lesson.transpose(x, out=x.t()) is not x and torch.equal(x, want)
    x = numbers((700, 700), torch.float32, device)  # several programs
    want = x.t().clone()
    assert torch.equal(lesson.transpose(x, out=x), want)
    other = numbers((700, 700), torch.float32, device, 1)
    want = expected("bias_add", other, x[0])
    assert torch.equal(lesson.bias_add(other, x[0], out=x), want)


@pytest.mark.parametrize("starts", [(0, 4095), (4095, 0)])
def test_one_element_is_shared(lesson, device, starts):
    """The last of an input and the first of out, or the other way; several programs."""
    buffer = numbers(8191, torch.float32, device)
    x, out = (buffer[start : start + 4096].view(64, 64) for start in starts)
    want = x.clone()
    assert torch.equal(lesson.copy_2d(x, out=out), want)


@settings(max_examples=120, deadline=None)
@given(op=st.sampled_from(OPS), data=st.data())
def test_out_among_the_inputs(lesson, device, op, data):
    """All views of one buffer, in whatever relation: as if each input were a copy."""
    buffer = numbers(405, torch.float32, device)
    small = st.integers(1, 6)
    x = buffer.as_strided(*data.draw(matrices(itself=True, sizes=small)))
    bias = buffer.as_strided(x.shape[1:], (data.draw(st.integers(0, 9)),), 11)
    want = expected(op, x, bias).clone()
    M, N = want.shape
    start, inner, outer = (data.draw(st.integers(0, 9)) for _ in range(3))
    strides = (inner + 1, (inner + 1) * M + outer)
    strides = strides[:: data.draw(st.sampled_from([1, -1]))]
    strides = strides if strides[0] < strides[1] else ((inner + 1) * N + outer, inner + 1)
    out, before = buffer.as_strided((M, N), strides, start), buffer.clone()
    call(lesson, op, x, bias, out)
    assert torch.equal(out, want)
    before.as_strided((M, N), strides, start).copy_(want)
    assert torch.equal(buffer, before), "something else was written"


@settings(max_examples=150, deadline=None)
@given(layout=matrices(itself=True, sizes=st.integers(1, 6)))
def test_an_out_that_shares_elements_is_refused(lesson, device, layout):
    """Exactly those: an element may be written once."""
    (M, N), strides, start = layout
    out, x = torch.zeros(405, device=device).as_strided(*layout), torch.ones(M, N, device=device)
    places = {i * strides[0] + j * strides[1] for i in range(M) for j in range(N)}
    if len(places) == M * N:
        assert torch.equal(lesson.copy_2d(x, out=out), x)
    else:
        with pytest.raises(ValueError, match="positions of out share an element; pass a new out"):
            lesson.copy_2d(x, out=out)


@pytest.mark.parametrize("op", OPS)
def test_autograd_sees_the_write(lesson, device, op):
    w = torch.ones(3, 3, device=device, requires_grad=True)
    b = torch.ones(3, 3, device=device)
    loss = (w * b).sum()
    call(lesson, op, torch.ones(3, 3, device=device), torch.ones(3, device=device), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_fine_where_none_is_recorded(lesson, device, op):
    x = torch.ones(5, 5, device=device, requires_grad=True)
    bias = torch.ones(5, device=device, requires_grad=True)
    want = expected(op, x.detach(), bias.detach())
    with torch.no_grad():
        got = call(lesson, op, x, bias)
        assert not got.requires_grad and torch.equal(got, want)
    with torch.inference_mode():
        assert torch.equal(call(lesson, op, x, bias), want)


def refusals(x, bias):
    """Operation, arguments, and what must be said, for a 17 × 59 float32 matrix."""
    leaf, meta, flat = x.clone().requires_grad_(), x.to("meta"), x.reshape(-1)
    for op in "copy_2d", "transpose":
        yield op, (x.tolist(),), TypeError, "x is a list, not a torch.Tensor"
        yield op, (None,), TypeError, "x is a NoneType"
        yield op, (x, [0.0]), TypeError, "out is a list"
        yield (
            op,
            (x.to(torch.complex128),),
            TypeError,
            "x has torch.complex128, not the one of x, <= 8 bytes",
        )
        yield op, (flat,), ValueError, "x has torch.Size([1003]), not two sizes"
        yield op, (x[0, 0],), ValueError, "x has torch.Size([]), not two sizes"
        yield op, (x[None],), ValueError, "x has torch.Size([1, 17, 59]), not two sizes"
        yield op, (x.to_sparse(),), ValueError, "x is sparse, nested or lazy; pass a copy"
        yield op, (x.to_sparse_csr(),), ValueError, "x is sparse, nested or lazy"
        nested = torch.nested.nested_tensor([x[0], x[1]])
        yield op, (nested,), ValueError, "x is sparse, nested or lazy"
        yield op, (torch._neg_view(x),), ValueError, "x is sparse, nested or lazy"
        yield op, (torch.complex(x, x).conj(),), ValueError, "x is sparse, nested or lazy"
        yield op, (meta,), ValueError, "x is on meta; needed: one cuda"
        yield op, (leaf,), ValueError, "x requires a gradient; pass x.detach()"
        yield op, (torch.nn.Parameter(x),), ValueError, "x requires a gradient"
    y = x.new_full((17, 59), 7.0)
    yield "copy_2d", (x, y.half()), TypeError, "out has torch.float16, not the one of x"
    yield "copy_2d", (x, y.int()), TypeError, "out has torch.int32, not the one of x"
    yield "copy_2d", (x, y[:16]), ValueError, "out has torch.Size([16, 59]), not torch.Size([17, 59"
    yield "copy_2d", (x, y.t()), ValueError, "out has torch.Size([59, 17]), not torch.Size([17, 59"
    yield "copy_2d", (x[:0], y), ValueError, "out has torch.Size([17, 59]), not torch.Size([0, 59])"
    yield "copy_2d", (x, flat), ValueError, "out has torch.Size([1003]), not"
    yield "copy_2d", (x, meta), ValueError, "out is on meta; needed: one cuda"
    yield "copy_2d", (y, leaf), ValueError, "out requires a gradient"
    yield "copy_2d", (y, torch._neg_view(x)), ValueError, "out is sparse, nested or lazy"
    yield "copy_2d", (y, x[:1].expand(17, 59)), ValueError, "positions of out share an element"
    yield "copy_2d", (y, x[:, :1].expand(17, 59)), ValueError, "positions of out share an element"
    slide = flat.as_strided((17, 59), (1, 1))
    yield "copy_2d", (y, slide), ValueError, "positions of out share an element; pass a new out"
    yield "transpose", (x, y), ValueError, "out has torch.Size([17, 59]), not torch.Size([59, 17])"
    op = "bias_add"
    yield op, (x,), TypeError, ""
    yield op, (x.tolist(), bias), TypeError, "x is a list, not a torch.Tensor"
    yield op, (x, 1.0), TypeError, "bias is a float, not a torch.Tensor"
    yield op, (x, None), TypeError, "bias is a NoneType"
    for dtype in torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn:
        yield op, (x.to(dtype), bias.to(dtype)), TypeError, f"x has {dtype}; supported here"
    yield op, (x, bias.half()), TypeError, "bias has torch.float16, not the one of x"
    yield op, (x, bias[:58]), ValueError, "bias has torch.Size([58]), not torch.Size([59])"
    yield op, (x, bias[:1]), ValueError, "bias has torch.Size([1]), not torch.Size([59])"
    yield op, (x, x[:1]), ValueError, "bias has torch.Size([1, 59]), not torch.Size([59])"
    yield op, (x, bias.to("meta")), ValueError, "bias is on meta; needed: one cuda"
    yield op, (x, bias.clone().requires_grad_()), ValueError, "bias requires a gradient"
    yield op, (x, torch._neg_view(bias)), ValueError, "bias is sparse, nested or lazy"
    yield op, (x, bias, x[:1].expand(17, 59)), ValueError, "positions of out share an element"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals(lesson, device):
    x, bias = numbers((17, 59), torch.float32, device), numbers(59, torch.float32, device)
    for op, arguments, error, message in refusals(x, bias):
        assert_refused(getattr(lesson, op), arguments, error, message, x)


def test_a_quantized_matrix_is_refused(lesson):
    x = torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8)
    with pytest.raises((TypeError, ValueError), match="x (has torch.qint8|is sparse)"):
        lesson.copy_2d(x)


def test_bits_of_bfloat16_are_moved_anywhere(device):
    x = torch.ones(4, 4, dtype=torch.bfloat16, device=device)
    assert torch.equal(lesson_code.load.__wrapped__("strides_2d").copy_2d(x), x)


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(17, 59, device=device)
    for op, arguments, message in [
        ("copy_2d", (x.cpu(),), "x is on cpu; needed: one cuda device"),
        ("copy_2d", (x, x.cpu()), "out is on cpu; needed: one cuda device"),
        ("bias_add", (x, x[0].cpu()), "bias is on cpu; needed: one cuda device"),
    ]:
        with pytest.raises(ValueError) as caught:
            getattr(lesson, op)(*arguments)
        assert str(caught.value) == message
    if torch.cuda.device_count() > 1:
        other = x.to("cuda:1")
        assert torch.equal(lesson.transpose(other), other.t())
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("M, N", [(1, 2**31 - 1), (2, 2**30 + 3), (46341, 46349), (2**30 + 3, 2)])
def test_large_matrices_on_cuda(lesson, device, M, N):
    """Around 2**31 elements, as one long row, as rows, and turned."""
    if torch.cuda.mem_get_info()[0] < 5 * M * N:
        pytest.skip(f"{5 * M * N / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.randint(-128, 128, (M, N), dtype=torch.int8, device=device)
    assert torch.equal(lesson.copy_2d(x), x)
    assert torch.equal(lesson.transpose(x), x.t())
    wide = torch.zeros(M, N + 1, dtype=torch.int8, device=device)
    assert torch.equal(lesson.copy_2d(x, out=wide[:, 1:]), x) and not wide[:, 0].any()
