"""llm_operators: what is counted, and every promise of cross_entropy, against float64."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OUTSIDE = [-1, -99, -101, 2**31, 2**40, -(2**62), 2**63 - 1]  # and from N on


def normals(shape, dtype, device, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return values.to(dtype).to(device)


def targets(M, N, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(N, 1), (M,), generator=generator).to(device)


def with_nan_around(x, start=0, gap=3):
    """The same values as a window of a buffer full of NaN."""
    M, N = x.shape
    room = torch.full((M * (N + gap) + start + 9,), math.nan, dtype=x.dtype, device=x.device)
    window = room[start : start + M * (N + gap)].view(M, N + gap)[:, :N]
    window.copy_(x)
    return window


def reference(lesson, x, target):
    """In float64; a target outside of the row gives NaN, where PyTorch would stop."""
    M, N = x.shape
    ignored, known = target == -100, (target >= 0) & (target < N)
    exact = torch.full((M,), math.nan, dtype=torch.float64, device=x.device)
    if known.any():
        exact[known] = lesson.cross_entropy_ref(x[known], target[known])
    exact[ignored] = 0
    return exact


def assert_right(lesson, x, target):
    """Into poisoned places with a stride, and nowhere else; the inputs stay as they are."""
    exact = reference(lesson, x, target)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    inputs, before = (x, target), (x.clone(), target.clone())
    room = torch.full((len(x), 3), -7.0, dtype=wide, device=x.device)
    out = room[:, 1]
    assert lesson.cross_entropy(x, target, out) is out
    assert bool((room[:, ::2] == -7).all())
    fresh = lesson.cross_entropy(x, target)
    assert fresh.dtype == wide and fresh.shape == (len(x),) and fresh.is_contiguous()
    for got in (out, fresh):
        slack = 2**-44 if wide == torch.float64 else 2**-20
        finite = exact.isfinite() & (exact.abs() < torch.finfo(wide).max)
        error = (got.double() - exact).abs()[finite]
        assert bool((error <= slack * (1 + exact[finite].abs())).all()), error.max()
        assert torch.equal(got.isnan(), exact.isnan())
        assert torch.equal(got.isinf(), ~finite & ~exact.isnan())
    for t, was in zip(inputs, before):
        same = (t == was) | (t != t) & (was != was)
        assert bool(same.all())


TILE = 2 * 8 * 256  # of a 16-bit row on the 16-byte grid
SIZES = [1, 2, 3, 15, 16, 17, 255, 256, 257, 1003, 4095, 4096, 4097, TILE - 1, TILE, TILE + 1]


@each_dtype
@pytest.mark.parametrize("N", [*SIZES, 2 * TILE, 20_011])
def test_widths(lesson, device, N, dtype):
    x = normals((3, N), dtype, device)
    target = targets(3, N, device)
    assert_right(lesson, with_nan_around(x), target)
    assert_right(lesson, with_nan_around(x, 16, -N % 16 + 16), target)


@pytest.mark.parametrize("M", [1, 2, 7, 131])
def test_rows(lesson, device, M):
    x = with_nan_around(normals((M, 50), torch.float32, device))
    target = targets(M, 50, device)
    target[::3] = -100
    assert_right(lesson, x, target)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (4, 0)], ids=str)
def test_empty(lesson, device, shape):
    x, target = torch.empty(shape, device=device), targets(shape[0], 0, device)
    assert_right(lesson, x, target)
    assert_right(lesson, x, target - 100)
    out = torch.empty(shape[0], device=device)
    assert lesson.cross_entropy(x, target, out=out) is out


@settings(max_examples=50, deadline=None)
@given(
    M=st.integers(1, 9),
    N=st.integers(1, 70) | st.integers(4000, 4200),
    steps=st.tuples(*[st.integers(1, 3)] * 3),
    start=st.integers(0, 9),
    turned=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@example(M=1, N=1, steps=(1, 1, 1), start=0, turned=True, dtype=DTYPES[0], seed=0)
def test_views(lesson, device, M, N, steps, start, turned, dtype, seed):
    down, across, along = steps
    shape = (across * N + start, down * M) if turned else (down * M, across * N + start)
    x = normals(shape, dtype, device, seed)
    x = (x.t() if turned else x)[::down, start::across][:, :N]
    assert_right(lesson, x, targets(along * M, N, device, seed)[::along])


def test_repeated_rows_and_columns(lesson, device):
    x, target = normals((5, 300), torch.float32, device), targets(5, 300, device)
    assert_right(lesson, x[:1].expand(5, 300), target)
    assert_right(lesson, x[:, :1].expand(5, 300), target)
    assert_right(lesson, x, target[:1].expand(5))


@each_dtype
def test_ignored_and_outside(lesson, device, dtype):
    x = normals((2 + len(OUTSIDE), 40), dtype, device)
    target = torch.tensor([40, -100, *OUTSIDE], device=device)
    assert_right(lesson, x, target)


@each_dtype
@pytest.mark.parametrize("N", [5, 5000, 20_000])
def test_special_values(lesson, device, dtype, N):
    """-inf is a masked logit; NaN, +inf or nothing but -inf has no answer; nothing overflows."""
    inf, most = math.inf, torch.finfo(dtype).max
    x = normals((9, N), dtype, device)
    target = torch.full((9,), 3, device=device)
    x[0, 3], x[1, 3], x[2, 4] = -inf, inf, math.nan
    x[3], x[4, :3], x[4, 4:] = -inf, -inf, -inf
    x[5], x[6], x[7, 3], x[8, 3] = most, -most, most / 4, -most / 4
    assert_right(lesson, x, target)
    x[2] = math.nan
    assert bool(lesson.cross_entropy(x, target)[2].isnan())
    x[:] = -inf
    x[:, -1] = 1  # only the last thread has seen a number
    assert_right(lesson, x, torch.full((9,), N - 1, device=device))


@each_dtype
def test_zeros_and_denormals(lesson, device, dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([[0.0, -0.0, tiny, -tiny / 4, tiny / 2]] * 5, dtype=dtype, device=device)
    assert_right(lesson, x, torch.arange(5, device=device))


@pytest.mark.parametrize("shift", [100.0, 1e4, -3e6])
def test_a_large_shift_changes_nothing(lesson, device, shift):
    """Rounded once, such logits have exact differences; so has the loss."""
    x = (normals((4, 3000), torch.float32, device) + shift).contiguous()
    assert_right(lesson, x, targets(4, 3000, device))


def test_a_certain_token_costs_nothing(lesson, device):
    x = torch.full((2, 3000), -200.0, device=device)
    x[:, 7] = 0
    assert lesson.cross_entropy(x, torch.full((2,), 7, device=device)).tolist() == [0, 0]


def test_ascending_and_descending(lesson, device):
    """Each tile brings a new maximum, or none does."""
    row = torch.linspace(-300, 300, 30_000, device=device)
    x, target = torch.stack([row, row.flip(0)]), torch.tensor([5, 5], device=device)
    assert_right(lesson, x, target)


@pytest.mark.parametrize("turned", [False, True])
def test_strides_beyond_32_bits(lesson, device, turned):
    """In memory that is reserved but hardly touched."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("9 GiB of GPU memory are needed")
    step = 2**30 + 16
    x = torch.empty(4 * step + 64, dtype=torch.float16, device=device)
    x = x.as_strided((5, 9) if turned else (9, 5), (step, 1) if turned else (1, step))
    x.copy_(normals(x.shape, torch.float16, device))
    assert_right(lesson, x, targets(len(x), x.shape[1], device))


def test_autograd_sees_the_write(lesson, device):
    weight = torch.ones(3, device=device, requires_grad=True)
    b = torch.ones(3, device=device)
    loss = (weight * b).sum()
    lesson.cross_entropy(torch.ones(3, 4, device=device), targets(3, 4, device), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    x, target = torch.ones(3, 4, device=device, requires_grad=True), targets(3, 4, device)
    with torch.no_grad():
        assert not lesson.cross_entropy(x, target).requires_grad
    with torch.inference_mode():
        assert lesson.cross_entropy(x, target).shape == (3,)


def refusals(x, target):
    """Arguments, and what must be said, for 17 × 59 float32 and 17."""
    meta, room = x.to("meta"), torch.zeros(17, device=x.device)
    nested = torch.nested.nested_tensor([x[0], x[1, :5]])
    yield (x.tolist(), target), TypeError, "x is list; needed: a dense tensor of ["
    yield (None, target), TypeError, "x is NoneType"
    yield (nested, target), TypeError, "x is torch.float32; needed: a dense tensor"
    yield (x, target.tolist()), TypeError, "target is list"
    yield (x, target, 3), TypeError, "out is int"
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        yield (x.to(dtype), target), TypeError, f"x is {dtype}; needed"
    for dtype in (torch.int32, torch.float32, torch.bool):
        yield (x, target.to(dtype)), TypeError, f"target is {dtype}; needed"
    yield (x, target, room.half()), TypeError, "out is torch.float16; needed"
    yield (x.half(), target, room.half()), TypeError, "out is torch.float16; needed"
    yield (x.double(), target, room), TypeError, "out is torch.float32; needed"
    yield (x[0], target), ValueError, "x has (59,); needed"
    yield (x[None], target), ValueError, "x has (1, 17, 59); needed"
    yield (x, target[:16]), ValueError, "target has (16,); needed: (17,)"
    yield (x, target[:, None]), ValueError, "target has (17, 1); needed: (17,)"
    yield (x, target[0]), ValueError, "target has (); needed: (17,)"
    yield (x[:0], target), ValueError, "target has (17,); needed: (0,)"
    yield (x, target, room[:16]), ValueError, "out has (16,); needed: (17,)"
    yield (x, target, room[None]), ValueError, "out has (1, 17); needed: (17,)"
    yield (meta, target), ValueError, "x is on meta; needed: ['cuda'"
    yield (x, target.to("meta")), ValueError, f"target is on meta; needed: {x.device}"
    yield (x, target, room.to("meta")), ValueError, f"out is on meta; needed: {x.device}"
    yield (x.to_sparse(), target), ValueError, "x is sparse or a negated view"
    yield (x, target.to_sparse()), ValueError, "target is sparse or a negated view"
    yield (torch._neg_view(x), target), ValueError, "x is sparse or a negated view"
    yield (x, torch._neg_view(target)), ValueError, "target is sparse or a negated view"
    yield (x, target, torch._neg_view(room)), ValueError, "out is sparse or a negated view"
    yield (x.clone().requires_grad_(), target), ValueError, "x requires a gradient"
    yield (x, target, room.clone().requires_grad_()), ValueError, "out requires a gradient"
    yield (x, target, x[:, 0]), ValueError, "out shares memory"
    yield (x[:, 1:], target, x[:, 0]), ValueError, "out shares memory"
    yield (x.double(), target, target.view(torch.float64)), ValueError, "out shares memory"
    yield (x, target, room[:1].expand(17)), ValueError, "out shares memory"


def test_refusals(lesson, device):
    x = normals((17, 59), torch.float32, device)
    target = targets(17, 59, device)
    for arguments, error, message in refusals(x, target):
        assert_refused(lesson.cross_entropy, arguments, error, message, x)


SMALL = dict(HIDDEN=64, HEADS=4, KV_HEADS=2, DIM=16, MLP=256, VOCAB=500, CONTEXT=24)
PRODUCTS = "qkv out gate_up down gate_up_swiglu int8_linear int4_linear head".split()


@pytest.fixture
def rows(lesson, monkeypatch):
    """The operators of a small model, in float64: name -> function, FLOP, inputs."""
    for name, value in SMALL.items():
        monkeypatch.setattr(lesson, name, value)
    monkeypatch.setattr(lesson, "HALF", torch.float64)

    def rows(M, prefill, device="cpu"):
        torch.manual_seed(0)
        return {name: row for name, *row in lesson.operators(M, prefill, device)}

    return rows


def test_flop_of_products(rows):
    """As PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    for M in (1, 5):
        for name, (f, flop, *inputs) in rows(M, False, "meta").items():
            with FlopCounterMode(display=False) as counter:
                f(*inputs)
            if name in PRODUCTS:
                assert counter.get_total_flops() == flop, name


def test_flop_of_attention(rows):
    """Two products of ``DIM`` pairs for each query and each key that it may see."""
    _, flop, q, k, _ = rows(7, True)["attention"]
    assert (q.shape, k.shape) == ((1, 4, 7, 16), (1, 2, 7, 16))
    seen = sum(key <= query for query in range(7) for key in range(7))
    assert flop == 2 * 2 * 16 * 4 * seen
    _, flop, q, k, _ = rows(3, False)["attention"]
    assert (q.shape, k.shape) == ((3, 4, 1, 16), (3, 2, 24, 16))
    assert flop == 2 * 2 * 16 * 4 * 3 * 24


def test_what_the_operators_are(rows):
    found = rows(5, True)

    def run(name):
        f, _, *inputs = found[name]
        return inputs, f(*inputs)

    (x, cos, sin), got = run("rotary")
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1))
    (x,), got = run("swiglu")
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(got, gate * gate.sigmoid() * up)
    (x, y, weight), (total, got) = run("add_norm")
    assert torch.equal(total, x + y)
    scale = (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(got, total * scale * weight)
    (x, weight, scale), got = run("int8_linear")
    assert weight.dtype == torch.int8
    torch.testing.assert_close(got, x @ (weight * scale[:, None]).T)
    (x, weight, scale), got = run("int4_linear")
    wide = torch.empty(len(weight), 2 * weight.shape[1], dtype=x.dtype)
    wide[:, ::2], wide[:, 1::2] = weight % 16, weight // 16
    wide = (wide - 8) * scale.repeat_interleave(128, 1)
    torch.testing.assert_close(got, x @ wide.T)
    (q, k, v), got = run("attention")
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 4).masked_fill(mask, -math.inf)
    torch.testing.assert_close(got, scores.softmax(-1) @ v)
