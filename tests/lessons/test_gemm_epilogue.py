"""gemm_epilogue: every promise of its docstring, against float64, interpreted and on CUDA."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matrices import SENTINEL, SHAPES, beyond_32_bits, normals, view
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

F16, BF16 = torch.float16, torch.bfloat16
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
LAYOUTS = ["aligned", "offset", "transposed", "sliced", "both sliced", "row", "column"]
ACTIVATIONS = [None, "gelu_tanh", "silu", "relu"]
torch_functions = torch.nn.functional


def exact(x, weight, bias, activation, residual):
    """With torch's own functions, in float64."""
    y = x.double() @ weight.double().t()
    if bias is not None:
        y = y + bias.double()
    if activation == "gelu_tanh":
        y = torch_functions.gelu(y, approximate="tanh")
    elif activation:
        y = getattr(torch_functions, activation)(y)
    return y if residual is None else y + residual.double()


def assert_close(out, x, weight, bias, activation, residual):
    best = exact(x, weight, bias, activation, residual)
    sums = x.double().abs() @ weight.double().abs().t()
    limits = torch.finfo(out.dtype)
    slack = (sums * (x.shape[1] + 8) + 8 * best.abs()) * 2**-22
    if bias is not None:
        slack = slack + bias.double().abs() * 2**-22
    if residual is not None:
        slack = slack + residual.double().abs() * 2**-22
    bound = slack + best.abs() * limits.eps / 2 + limits.tiny * limits.eps
    assert bool(((out.double() - best).abs() <= bound).all())


def assert_right(lesson, x, weight, bias, activation, residual, out_layout="offset"):
    """Into a window, and nowhere else; and into a new tensor."""
    M, N = x.shape[0], weight.shape[0]
    out, room = view(M, N, out_layout, x.dtype, x.device, SENTINEL)
    arguments = x, weight, bias, activation, residual
    assert lesson.linear_act(*arguments, out=out) is out
    assert_close(out, *arguments)
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "written outside of the window"
    fresh = lesson.linear_act(*arguments)
    assert (fresh.shape, fresh.dtype, fresh.device) == ((M, N), x.dtype, x.device)
    assert_close(fresh, *arguments)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K", [*SHAPES, (257, 1, 8), (65, 63, 72), (2, 129, 128)])
def test_sizes(lesson, device, M, N, K, dtype):
    x = normals(M, K, "aligned", dtype, device, 1)
    weight = normals(N, K, "aligned", dtype, device, 2)
    bias = normals(1, N, "aligned", dtype, device, 3)[0]
    residual = normals(M, N, "aligned", dtype, device, 4)
    assert_right(lesson, x, weight, bias, "gelu_tanh", residual)
    assert_right(lesson, x, weight, None, None, None)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 80)] * 3),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3, st.sampled_from(LAYOUTS[:5])),
    given=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 99),
)
@example((65, 33, 40), ("transposed", "row", "both sliced", "sliced"), (1, 1), "relu", F16, 0)
@example((33, 65, 16), ("aligned", "aligned", "column", "transposed"), (0, 1), "silu", BF16, 0)
@example((66, 80, 72), ("aligned", "aligned", "row", "aligned"), (1, 0), "gelu_tanh", F16, 0)
def test_any_strides(lesson, device, sizes, layouts, given, activation, dtype, seed):
    M, N, K = sizes
    x = normals(M, K, layouts[0], dtype, device, seed)
    weight = normals(N, K, layouts[1], dtype, device, seed + 1)
    bias = normals(5, N, layouts[2], dtype, device, seed + 2)[2] if given[0] else None
    residual = normals(M, N, layouts[2], dtype, device, seed + 3) if given[1] else None
    assert_right(lesson, x, weight, bias, activation, residual, layouts[3])


def test_a_strided_bias(lesson, device):
    x = normals(5, 16, "aligned", F16, device, 1)
    weight = normals(9, 16, "aligned", F16, device, 2)
    for bias in (normals(9, 4, "sliced", F16, device, 3)[:, 1], x[0, :1].expand(9)):
        assert_right(lesson, x, weight, bias, "silu", None)


def tiles(lesson):
    """Tiles as on GPUs, with the number of programs at once, and TMA or not."""
    for tile in lesson.TILES:
        yield *tile[:5], 3, True
    yield 128, 128, 64, 8, 3, 3, False


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_each_tile(lesson, device, dtype):
    """Persistent or not, whole or in halves; a ragged size and a whole one."""
    for tile, whole in itertools.product(tiles(lesson), [False, True]):
        BM, BN, BK, *_ = tile
        M, N, K = (2 * BM, 2 * BN, BK) if whole else (BM + 3, 3 * BN + 8, BK + 8)
        if (
            device == "cuda"
            and lesson.pick_tile(M, 2**14, None, torch.device(device))[-1] != tile[-1]
        ):
            continue  # this GPU has no TMA, or no need of pointers
        x = normals(M, K, "aligned", dtype, device, 1)
        weight = normals(N, K, "aligned", dtype, device, 2)
        bias = normals(1, N, "aligned", dtype, device, 3)[0]
        residual = normals(M, N, "aligned", dtype, device, 4)
        out, room = view(M, N, "offset", dtype, device, SENTINEL)
        lesson.launch(x, weight, bias, residual, out, "gelu_tanh", tile)
        assert_close(out, x, weight, bias, "gelu_tanh", residual)
        out.fill_(SENTINEL)
        assert bool((room == SENTINEL).all())


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 2.0**-24, 60000.0, -60000.0, -12.0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(lesson, device, activation):
    """As torch has it: ReLU keeps NaN, and infinities become what they become there."""
    x = torch.tensor(SPECIAL, device=device, dtype=F16)[:, None]
    one = torch.ones(1, 1, device=device, dtype=F16)
    got = lesson.linear_act(x, one, None, activation)
    want = exact(x, one, None, activation, None).to(F16)
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-24, equal_nan=True)
    if activation == "relu":
        assert torch.equal(got.isnan(), x.isnan())


def test_nan_and_infinity_stay_in_their_row_or_column(lesson, device):
    x = torch.ones(70, 72, device=device, dtype=F16)
    weight = torch.ones(66, 72, device=device, dtype=F16)
    bias, residual = torch.zeros(66, device=device, dtype=F16), torch.zeros_like(x[:, :66])
    x[3, 71], weight[65, 0], bias[7], residual[9, 9] = math.nan, math.inf, math.nan, -math.inf
    got = lesson.linear_act(x, weight, bias, "relu", residual)
    want = exact(x, weight, bias, "relu", residual)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=0, equal_nan=True)


def test_one_rounding(lesson, device):
    """A product that float16 cannot hold, whose result it can."""
    x, one = torch.full((2, 1, 1), 300.0, device=device, dtype=F16)
    minus = torch.full((1, 1), -60000.0, device=device, dtype=F16)
    assert lesson.linear_act(x, one, None, None, minus).item() == 30000
    assert lesson.linear_act(x, one, minus[0]).item() == 30000
    assert lesson.linear_act(x, one).isinf().all()


def test_the_residual_may_be_the_output(lesson, device):
    x = normals(70, 40, "aligned", F16, device, 1)
    weight = normals(90, 40, "aligned", F16, device, 2)
    for layout in ("aligned", "transposed", "both sliced"):
        residual = normals(70, 90, layout, F16, device, 3)
        want = lesson.linear_act(x, weight, None, "silu", residual)
        assert lesson.linear_act(x, weight, None, "silu", residual, out=residual) is residual
        assert torch.equal(residual, want)


def test_inputs_may_be_one_tensor(lesson, device):
    x = normals(40, 40, "aligned", F16, device, 5)
    before = x.clone()
    assert_right(lesson, x, x, x[3], None, x)
    assert_right(lesson, x, x.t(), x[:, 3], None, x.t())
    assert torch.equal(x, before)


def test_the_same_bits_again(lesson, device):
    x = normals(130, 264, "aligned", F16, device, 1)
    weight = normals(140, 264, "aligned", F16, device, 2)
    first = lesson.linear_act(x, weight, None, "gelu_tanh")
    for _ in range(3 if device == "cpu" else 20):
        assert torch.equal(lesson.linear_act(x, weight, None, "gelu_tanh"), first)


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(3, 3, device=device, dtype=F16, requires_grad=True)
    b = torch.ones(3, 3, device=device, dtype=F16)
    loss = (w * b).sum()
    lesson.linear_act(b.clone(), b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    layer = torch.nn.Linear(5, 5).to(device, F16)
    x = torch.ones(5, 5, device=device, dtype=F16)
    with torch.no_grad():
        got = lesson.linear_act(x, layer.weight, layer.bias)
    assert not got.requires_grad
    with torch.inference_mode():
        assert torch.equal(lesson.linear_act(x, layer.weight, layer.bias), got)
    torch.testing.assert_close(got, layer(x).detach(), rtol=2**-9, atol=2**-9)


def refusals(x):
    """Arguments, and what must be said, for a 6 × 6 float16 tensor."""
    flat = torch.zeros(100, device=x.device, dtype=x.dtype)
    yield (x.tolist(), x), TypeError, "x is a list, not a torch.Tensor"
    yield (x, None), TypeError, "weight is a NoneType, not a torch.Tensor"
    yield (x, x, 1.0), TypeError, "bias is a float"
    yield (x, x, None, None, [0]), TypeError, "residual is a list"
    yield (x, x, None, None, None, 0), TypeError, "out is a int"
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int8, torch.bool):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"x has {dtype}, x has "
        yield (x, x.to(dtype)), TypeError, f"weight has {dtype}, x has "
        yield (x, x, x[0].to(dtype)), TypeError, f"bias has {dtype}, x has "
        yield (x, x, None, None, x.to(dtype)), TypeError, f"residual has {dtype}, x has "
        yield (x, x, None, None, None, x.to(dtype)), TypeError, f"out has {dtype}, x has "
    yield (x, x.bfloat16()), TypeError, "weight has torch.bfloat16, x has torch.float16"
    yield (x, x[0]), ValueError, "weight has (6,), needed: (None, 6)"
    yield (x[None], x), ValueError, "x has (1, 6, 6), needed: (None, None)"
    yield (x, x[:, :5]), ValueError, "weight has (6, 5), needed: (None, 6)"
    yield (x, x, x), ValueError, "bias has (6, 6), needed: (6,)"
    yield (x, x, x[0, :1]), ValueError, "bias has (1,), needed: (6,)"
    yield (x, x, None, None, x[0]), ValueError, "residual has (6,), needed: (6, 6)"
    yield (x, x[:5], None, None, None, x.clone()), ValueError, "out has (6, 6), needed: (6, 5)"
    yield (
        (x, x, None, "gelu"),
        ValueError,
        "activation is 'gelu', not of [None, 'relu', 'silu', 'gelu_tanh']",
    )
    yield (x, x, None, 0), ValueError, "activation is 0, not of"
    yield (x, x.to("meta")), ValueError, f"weight is on meta, x is on {x.device}"
    yield (x.to("meta"), x.to("meta")), ValueError, "x is on meta; the kernel runs on cuda"
    yield (x.to_sparse(), x), ValueError, "x is sparse or a negated view"
    yield (x, torch._neg_view(x)), ValueError, "weight is sparse or a negated view"
    yield (x, x, torch._neg_view(x[0])), ValueError, "bias is sparse or a negated view"
    out = torch._neg_view(x.clone())
    yield (x, x, None, None, None, out), ValueError, "out is sparse or a negated view"
    leaf = x.clone().requires_grad_()
    yield (leaf, x), ValueError, "x requires a gradient; pass x.detach()"
    yield (x, leaf), ValueError, "weight requires a gradient"
    yield (x, x, leaf[0]), ValueError, "bias requires a gradient"
    yield (x, x, None, None, leaf), ValueError, "residual requires a gradient"
    yield (x, x, None, None, None, leaf), ValueError, "out requires a gradient"
    other, bias = x.clone(), flat[10:16]
    yield (x, other, None, None, None, x), ValueError, "out lies among the bytes of x"
    yield (other, x, None, None, None, x.t()), ValueError, "out lies among the bytes of weight"
    yield (x, x, None, None, x, x), ValueError, "out lies among the bytes of x"
    here = flat[:36].view(6, 6)
    yield (x, x, bias, None, None, here), ValueError, "out lies among the bytes of bias"
    shifted = flat[35:71].view(6, 6)
    yield (x, x, None, None, shifted, here), ValueError, "out lies among the bytes of residual"
    yield (x, x, None, None, here.t(), here), ValueError, "out lies among the bytes of residual"
    row = flat[:6].expand(6, 6)
    yield (x, x, None, None, None, row), ValueError, "out may overlap itself: strides (0, 1)"
    yield (x, x, None, None, row, row), ValueError, "out may overlap itself"
    close = flat.as_strided((6, 6), (5, 1))
    yield (x, x, None, None, None, close), ValueError, "out may overlap itself"
    long = x[:1, :1].expand(2**31 - 1, 1)
    yield (x[:, :1], long), ValueError, "weight has (2147483647, 1), needed: (None, 1)"


def test_refusals(lesson, device):
    x = torch.randn(6, 6, device=device).to(F16)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.linear_act, arguments, error, message, x)


def test_an_output_beside_its_inputs(lesson, device):
    """In one buffer, but apart; and of one row or column, whose stride never counts."""
    x, weight, out = torch.ones(3, 8, 8, device=device, dtype=F16)
    eights = torch.full_like(x, 8)
    assert torch.equal(lesson.linear_act(x, weight, out=out), eights)
    room = torch.zeros(64, device=device, dtype=F16)
    line = room.as_strided((1, 8), (0, 1))
    assert torch.equal(lesson.linear_act(x[:1], weight, out=line), eights[:1])
    line = room.as_strided((8, 1), (3, 0))
    assert torch.equal(lesson.linear_act(x, weight[:1], out=line), eights[:, :1])
    assert room.count_nonzero() == 13  # 0 to 7, then 9, 12, 15, 18, 21


def test_one_row_of_any_stride(lesson, device):
    """The stride of a single row is never used, so it may be what it likes."""
    room = normals(1, 400, "aligned", F16, device, 1)[0]
    weight = normals(9, 64, "aligned", F16, device, 2)
    for stride in (0, 1, 64, 10**9):
        x = room[:64].as_strided((1, 64), (stride, 1), room.storage_offset())
        assert_right(lesson, x, weight, None, None, None)


def test_what_a_descriptor_takes(lesson, device):
    room = torch.zeros(2048, device=device, dtype=F16)
    assert lesson.describe(room.view(32, 64), 16, 64).strides == [64, 1]
    assert lesson.describe(room.view(32, 64)[:, :48], 16, 64).strides == [64, 1]
    assert lesson.describe(room.as_strided((1, 56), (3, 1)), 16, 64).strides == [56, 1]
    wrong = [room.view(32, 64).t(), room.view(32, 64)[:, ::2], room[1:1025].view(16, 64)]
    wrong += [room.as_strided((9, 20), (20, 1)), room[:64].expand(5, 64), room.view(32, 64)[:, :0]]
    wrong += [room.as_strided((9, 20), (16, 1)), room.as_strided((9, 24), (16, 1))]
    # Copies of whole 16 bytes would pass the end of such a row.
    wrong += [room.view(32, 64)[:, :50], room.as_strided((1, 60), (3, 1))]
    assert not any(lesson.describe(t, 16, 64) for t in wrong)


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M", [1, 16, 17, 64, 128, 300, 512, 1000, 2048])
def test_layers_on_cuda(lesson, device, M, dtype):
    """Sizes at which each tile is chosen."""
    for N, K in [(4096, 1024), (14336, 512), (14336, 520)]:
        x = normals(M, K, "aligned", dtype, device, 1)
        weight = normals(N, K, "aligned", dtype, device, 2)
        bias = normals(1, N, "aligned", dtype, device, 3)[0]
        residual = normals(M, N, "aligned", dtype, device, 4)
        assert_right(lesson, x, weight, bias, "gelu_tanh", None)
        assert_right(lesson, x, weight, bias, None, residual)


@pytest.mark.gpu
@on_cuda
def test_in_a_graph_on_cuda(lesson, device):
    """A captured call reads the tensors again, with what is in them then."""
    x, weight = torch.randn(2, 256, 256, device=device).to(F16)
    out = lesson.linear_act(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lesson.linear_act(x, weight, None, "silu", out=out)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert_close(out, x, weight, None, "silu", None)


def test_offsets_beyond_32_bits(lesson, device):
    room = beyond_32_bits(device)
    weight = normals(5, 128, "aligned", F16, device, 1)
    for strides in ((1, 2**25), (2**30, 1)):  # elements; a step passes 2**31
        x = room.as_strided((3, 128), strides)
        x.copy_(torch.randn(3, 128, device=device))
        assert_right(lesson, x, weight, None, "silu", None)
        assert_right(lesson, weight, x, None, None, None)
    x = x.contiguous()  # the output would lie among the bytes of the view
    out = room.as_strided((3, 5), (2**30, 7), 500)
    residual = room.as_strided((3, 5), (2**30, 7), 500).copy_(torch.ones(3, 5))
    lesson.linear_act(x, weight, None, "silu", residual, out)
    assert_close(out, x, weight, None, "silu", torch.ones_like(out))
