"""norms: every promise of both docstrings, against float64, interpreted and on CUDA."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
NORMS = ["layer_norm", "rms_norm"]
each_norm = pytest.mark.parametrize("name", NORMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def normals(shape, dtype, device, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
    return values.to(dtype).to(device)


def with_nan_around(values, gap=(2, 3), start=0):
    """The same values as a window of a buffer full of NaN."""
    shape = [n + g for n, g in zip(values.shape, gap)]
    size = math.prod(shape) + start
    buffer = torch.full((size,), math.nan, dtype=values.dtype, device=values.device)
    window = buffer[start:].view(shape)[tuple(slice(0, n) for n in values.shape)]
    window.copy_(values)
    return window


def tolerance(exact, dtype, w=None, b=None):
    """One rounding to the dtype, and a little for sums in float32 (or float64)."""
    slack = 2**-48 if dtype == torch.float64 else 2**-19
    scale = exact.abs().amax(-1, keepdim=True) + 1
    for t in (w, b):
        scale = scale + (t.double().abs().amax() if t is not None else 0)
    info = torch.finfo(dtype)
    return exact.abs() * info.eps / 2 + slack * scale + info.tiny * info.eps


def assert_close(got, exact, dtype, w=None, b=None):
    assert got.dtype == dtype and got.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(finite, got.isfinite()), "not finite elsewhere"
    error = (got.double() - exact).abs()
    assert bool((error <= tolerance(exact, dtype, w, b))[finite].all()), error.max()


def assert_normalises(lesson, name, x, w=None, b=None, eps=1e-5):
    """Into poisoned windows, and nowhere else; the inputs stay as they are."""
    exact = reference(lesson, name, x, w, b, eps)
    inputs = [t for t in (x, w, b) if t is not None]
    before = [t.clone() for t in inputs]
    operator = getattr(lesson, name)
    lead = x.shape[:-1] if x.dim() > 2 else [n + 1 for n in x.shape[:-1]]
    room = torch.full((*lead, x.shape[-1] + 5), math.nan, dtype=x.dtype, device=x.device)
    out = room[(*(slice(0, n) for n in x.shape[:-1]), slice(2, 2 + x.shape[-1]))]
    assert operator(x, w, b, eps=eps, out=out) is out
    assert_close(out, exact, x.dtype, w, b)
    assert room.isnan().sum().item() - out.isnan().sum().item() == room.numel() - out.numel()
    fresh = operator(x, w, b, eps=eps)
    assert fresh.is_contiguous() and fresh.device == x.device
    assert_close(fresh, exact, x.dtype, w, b)
    for t, was in zip(inputs, before):
        assert torch.equal(t, was)


def reference(lesson, name, x, w=None, b=None, eps=1e-5):
    return lesson.norm_ref(x, w, b, eps, name == "layer_norm")


def parameters(n, dtype, device):
    return normals(n, dtype, device, 7), normals(n, dtype, device, 8)


SIZES = [1, 2, 3, 15, 16, 17, 127, 128, 129, 509, 1003, 1008, 1023, 1024, 1025, 2047, 2049]


@each_norm
@each_dtype
@pytest.mark.parametrize("N", SIZES)
def test_widths(lesson, device, name, N, dtype):
    x = with_nan_around(normals((3, N), dtype, device, mean=3))
    assert_normalises(lesson, name, x, *parameters(N, dtype, device))


@each_norm
@each_dtype
@pytest.mark.parametrize("N", [4096, 5120, 8193, 12288, 16384, 16385, 33000])
def test_wide_rows(lesson, device, name, N, dtype):
    x = with_nan_around(normals((2, N), dtype, device, mean=3))
    assert_normalises(lesson, name, x, *parameters(N, dtype, device))


@each_norm
@pytest.mark.parametrize("M", [1, 2, 7, 31, 32, 33, 67])
@pytest.mark.parametrize("N", [1, 8, 31, 32, 100])
def test_several_rows_in_a_program(lesson, device, name, M, N):
    x = with_nan_around(normals((M, N), torch.float32, device, mean=3))
    assert_normalises(lesson, name, x, *parameters(N, torch.float32, device))


@each_norm
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty(lesson, device, name, shape):
    x, out = torch.empty(2, *shape, device=device)
    w = torch.ones(shape[-1], device=device)
    assert getattr(lesson, name)(x, w, w, out=out) is out
    assert getattr(lesson, name)(x).shape == shape


@each_norm
@pytest.mark.parametrize("with_w", [False, True])
@pytest.mark.parametrize("with_b", [False, True])
def test_weight_and_bias_are_optional(lesson, device, name, with_w, with_b):
    for N in (77, 1030, 17_000):
        x = normals((3, N), torch.float32, device)
        w, b = parameters(N, torch.float32, device)
        assert_normalises(lesson, name, x, w if with_w else None, b if with_b else None)


@each_norm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_float32_parameters(lesson, device, name, dtype):
    for N in (77, 1030):
        x = normals((3, N), dtype, device)
        w, b = parameters(N, torch.float32, device)
        assert_normalises(lesson, name, x, w, b)
        assert_normalises(lesson, name, x, w, b.to(dtype))


@each_norm
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=2),
    N=st.integers(1, 70) | st.integers(1000, 1100),
    step=st.integers(1, 3),
    start=st.integers(0, 5),
    pad=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    mean=st.sampled_from([0.0, 1.0, -30.0]),
    eps=st.sampled_from([1e-5, 1e-6, 0.5]),
)
@example(shape=[3], N=1, step=1, start=0, pad=0, dtype=torch.float32, mean=1.0, eps=1e-5)
def test_views(lesson, device, name, shape, N, step, start, pad, dtype, mean, eps):
    buffer = normals((*shape, step * N + start + pad), dtype, device, mean=mean)
    x = buffer[..., start : start + step * N : step]
    assert_normalises(lesson, name, x, *parameters(N, dtype, device), eps)


@each_norm
def test_transposed_and_repeated(lesson, device, name):
    x = normals((37, 1100), torch.float32, device, mean=2)
    w, b = parameters(37, torch.float32, device)
    assert_normalises(lesson, name, x.t(), w, b)
    assert_normalises(lesson, name, x[::3, ::5])
    assert_normalises(lesson, name, x[:1].expand(6, 1100))
    assert_normalises(lesson, name, x[:, :1].expand(37, 6))
    assert_normalises(lesson, name, x[0, 0].expand(3, 2000))
    assert_normalises(lesson, name, x.view(37, 11, 100))
    out = torch.full((37, 1100), math.nan, device=device).t()
    getattr(lesson, name)(x.t(), w, b, 1e-5, out)
    assert_close(out, reference(lesson, name, x.t(), w, b), x.dtype, w, b)


@each_norm
@pytest.mark.parametrize("KEEP", [1, 3])
@pytest.mark.parametrize("BLOCK", [1, 16])
def test_any_part_may_be_kept(lesson, device, name, BLOCK, KEEP):
    """Small blocks, so that there are many, the last one cut anywhere."""
    for N in sorted({1, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 40 * BLOCK - 1}):
        x = with_nan_around(normals((2, N), torch.float32, device, mean=500))
        out = torch.full_like(x, math.nan)
        w, b = parameters(N, torch.float32, device)
        center = name == "layer_norm"
        constants = 1e-5, center, 1, BLOCK, KEEP, KEEP * BLOCK < N
        lesson.norm_kernel[(2,)](x, w, b, out, 2, N, *x.stride(), *out.stride(), *constants)
        assert_close(out, reference(lesson, name, x, w, b), x.dtype, w, b)


@pytest.mark.parametrize("N", [1, 7, 1000, 5121, 20_000])
@pytest.mark.parametrize("mean", [1e2, 1e4, -1e6, 1e7])
def test_large_means(lesson, device, N, mean):
    """The deviations of such values are exact; so must be what follows, nearly."""
    x = normals((3, N), torch.float32, device, mean=mean)
    assert_normalises(lesson, "layer_norm", x)


@pytest.mark.parametrize("N", [1, 3, 1000, 3001, 20_000])
def test_constant_rows(lesson, device, N):
    """The mean of equal values is rounded; its error must not be blown up."""
    for value in (0.0, 0.1, -7.7e5, 1.3e7, 3e-41):
        x = torch.full((2, N), value, device=device)
        b = normals(N, torch.float32, device)
        y = lesson.layer_norm(x, None, b)
        # A GPU divides float32 with an error of two units in the last place.
        assert (y - b).abs().max().item() <= 2**-18
        assert_normalises(lesson, "rms_norm", x, None, b)
    for value in (123456789.0, 9876540000.0, -3.3e11):
        # Compiled, mean(d * d) - slip * slip is negative for some of them.
        assert bool(lesson.layer_norm(torch.full((2, N), value, device=device)).isfinite().all())


def test_a_jump_within_a_row(lesson, device):
    """Chunks whose means lie far apart, and one value far from all others."""
    for N in (5120, 20_480):
        x = normals((3, N), torch.float32, device)
        x[0, N // 2 :] += 1e5
        x[1, :4096] -= 3e4
        x[2, 0] = 1e6
        assert_normalises(lesson, "layer_norm", x)
        assert_normalises(lesson, "rms_norm", x)


@each_norm
@each_dtype
def test_infinities_and_nan(lesson, device, name, dtype):
    for N in (40, 3000, 17_000):
        x = normals((5, N), dtype, device)
        x[0, 1], x[1, N - 1], x[2, N // 2] = math.inf, -math.inf, math.nan
        x[3, 3], x[3, 4] = math.inf, -math.inf
        y = getattr(lesson, name)(x, out=torch.empty_like(x))
        if name == "layer_norm":
            assert bool(y[:4].isnan().all())
        else:
            exact = reference(lesson, name, x)
            assert torch.equal(y.isnan(), exact.isnan()) and bool((y[:2].nan_to_num(0) == 0).all())
        assert bool(y[4].isfinite().all())


@each_norm
@each_dtype
def test_denormals_and_zeros(lesson, device, name, dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([[0.0, -0.0, tiny, -tiny / 4, tiny / 2]] * 3, dtype=dtype, device=device)
    assert_normalises(lesson, name, x)


@each_norm
@pytest.mark.parametrize("N", [50, 3000, 17_000])
def test_in_place(lesson, device, name, N):
    x = normals((4, N), torch.float32, device)
    operator = getattr(lesson, name)
    expected = operator(x)
    assert operator(x, out=x) is x
    assert torch.equal(x, expected)
    window = with_nan_around(normals((4, N), torch.float32, device))
    operator(window, out=window)
    assert torch.equal(window, expected)


def test_eps_is_exact_in_float64(lesson, device):
    """As a float32, 1e-5 is wrong in the eighth digit, which such rows would show."""
    x = normals((2, 50), torch.float64, device) * 1e-6
    assert_normalises(lesson, "layer_norm", x)
    assert_normalises(lesson, "rms_norm", x)


@each_norm
def test_an_integer_as_eps(lesson, device, name):
    x = normals((2, 50), torch.float32, device)
    assert_normalises(lesson, name, x, eps=1)
    assert_normalises(lesson, name, x, eps=0)


@each_norm
@pytest.mark.parametrize("M, N", [(3, 40), (40, 3)])
def test_strides_beyond_32_bits(lesson, device, name, M, N):
    """In place, in memory that is reserved but hardly touched."""
    step = 2**30 + 16
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("5 GiB of GPU memory are needed")
    buffer = torch.empty(2 * step + 64, dtype=torch.float16, device=device)
    x = buffer.as_strided((M, N), (step, 1) if M < N else (1, step))
    x.copy_(normals((M, N), torch.float16, device))
    exact = reference(lesson, name, x)
    assert getattr(lesson, name)(x, eps=1e-5, out=x) is x
    assert_close(x, exact, x.dtype)


@each_norm
def test_autograd_sees_the_write(lesson, device, name):
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    b = normals((3, 4), torch.float32, device)
    loss = (weight * b).sum()
    getattr(lesson, name)(b.clone(), out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_norm
def test_gradients_are_fine_where_none_is_recorded(lesson, device, name):
    x = normals((3, 4), torch.float32, device).requires_grad_()
    with torch.no_grad():
        assert not getattr(lesson, name)(x).requires_grad
    with torch.inference_mode():
        assert getattr(lesson, name)(x).shape == (3, 4)


def refusals(x, w):
    """Arguments, and what must be said, for 17 × 59 float32 and 59."""
    leaf, flat, meta = x.clone().requires_grad_(), x.reshape(-1), x.to("meta")
    row, wide = w[:1].expand(59), torch.zeros(118, device=x.device)
    yield (x.tolist(),), TypeError, "x is a list, not a dense tensor"
    yield (None,), TypeError, "x is a NoneType"
    nested = torch.nested.nested_tensor([x[0], x[1, :5]])
    yield (nested,), TypeError, "x is a Tensor, not a dense tensor"
    yield (x, 1.0), TypeError, "weight is a float"
    yield (x, w, [0.0]), TypeError, "bias is a list"
    yield (x, w, w, 1e-5, 3), TypeError, "out is a int"
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8):
        yield (x.to(dtype),), TypeError, f"x has {dtype}; supported"
        yield (x, w.to(dtype)), TypeError, f"weight has {dtype}; supported"
    yield (x, w.half()), TypeError, "weight has torch.float16; supported"
    yield (x.half(), w.half(), w.double()), TypeError, "bias has torch.float64; supported"
    yield (x, w, w, 1e-5, x.half()), TypeError, "out has torch.float16; supported"
    yield (x[0, 0],), ValueError, "x has torch.Size([])"
    yield (x, w[:58]), ValueError, "weight has torch.Size([58]); needed: torch.Size([59])"
    yield (x, w[:1]), ValueError, "weight has torch.Size([1])"
    yield (x, x), ValueError, "weight has torch.Size([17, 59])"
    yield (x, w, w[0]), ValueError, "bias has torch.Size([])"
    yield (x, w, w, 1e-5, x[:16]), ValueError, "out has torch.Size([16, 59])"
    yield (x, w, w, 1e-5, flat), ValueError, "out has torch.Size([1003])"
    yield (x[:0], w, w, 1e-5, x), ValueError, "out has torch.Size([17, 59])"
    yield (meta,), ValueError, "x is on meta; needed: ['cuda'"
    yield (x, w.to("meta")), ValueError, f"weight is on meta; needed: {x.device}"
    yield (x, w, w, 1e-5, meta), ValueError, f"out is on meta; needed: {x.device}"
    yield (x.to_sparse(),), ValueError, "x is sparse or a negated view"
    yield (x.to_sparse_csr(),), ValueError, "x is sparse or a negated view"
    yield (torch._neg_view(x),), ValueError, "x is sparse or a negated view"
    yield (x, torch._neg_view(w)), ValueError, "weight is sparse or a negated view"
    yield (x, w, w, 1e-5, torch._neg_view(x)), ValueError, "out is sparse or a negated view"
    yield (leaf,), ValueError, "x requires a gradient; pass x.detach()"
    yield (x, w.clone().requires_grad_()), ValueError, "weight requires a gradient"
    yield (x, w, torch.nn.Parameter(w)), ValueError, "bias requires a gradient"
    yield (x, w, w, 1e-5, leaf), ValueError, "out requires a gradient"
    yield (x, wide[::2]), ValueError, "weight is not contiguous"
    yield (x, w, row), ValueError, "bias is not contiguous"
    for eps in (-1e-5, math.nan, math.inf, "1", None):
        yield (x, w, w, eps), ValueError, f"eps is {eps!r}"
    cube = torch.zeros(4, 7, 8, device=x.device)
    yield (cube.transpose(0, 1),), ValueError, "rows of x or out have no one distance"
    apart = torch.zeros(7, 4, 8, device=x.device).transpose(0, 1)
    yield (cube, None, None, 1e-5, apart), ValueError, "rows of x or out have no one distance"
    yield (x, w, w, 1e-5, torch.zeros_like(x)[:1].expand(17, 59)), ValueError, "elements of out"
    yield (x, w, w, 1e-5, wide.as_strided((17, 59), (1, 1))), ValueError, "elements of out"
    yield (x, w, w, 1e-5, wide.as_strided((2, 59), (58, 1))), ValueError, "out has"
    yield (x[:2], w, w, 1e-5, wide.as_strided((2, 59), (58, 1))), ValueError, "elements of out"
    yield (x[:2], w, w, 1e-5, x[1:3]), ValueError, "out shares memory with x"
    yield (x[1:3], w, w, 1e-5, x[:2]), ValueError, "out shares memory with x"
    yield (x[:, :40], None, None, 1e-5, x[:, 10:50]), ValueError, "out shares memory with x"
    yield (x[:9, :9], None, None, 1e-5, x[:9, :9].t()), ValueError, "out shares memory with x"
    pair = wide.view(2, 59)
    yield (x[:2], wide[:59], None, 1e-5, pair), ValueError, "out shares memory with weight"
    yield (x[:2], w, wide[59:], 1e-5, pair), ValueError, "out shares memory with bias"
    yield (pair, w, pair[0], 1e-5, pair), ValueError, "out shares memory with bias"


@each_norm
def test_refusals(lesson, device, name):
    x = normals((17, 59), torch.float32, device)
    w = normals(59, torch.float32, device)
    for arguments, error, message in refusals(x, w):
        assert_refused(getattr(lesson, name), arguments, error, message, x)


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x, w = torch.ones(7, 9, device=device), torch.ones(9, device=device)
    for arguments, message in [
        ((x.cpu(),), "x is on cpu; needed: ['cuda']"),
        ((x, w.cpu()), "weight is on cpu; needed: cuda:0"),
        ((x, w, w, 1e-5, x.cpu()), "out is on cpu; needed: cuda:0"),
    ]:
        with pytest.raises(ValueError) as caught:
            lesson.layer_norm(*arguments)
        assert str(caught.value) == message
    if torch.cuda.device_count() > 1:
        other = x.to("cuda:1")
        assert_normalises(lesson, "layer_norm", other)
        with pytest.raises(ValueError, match="weight is on cuda:0; needed: cuda:1"):
            lesson.layer_norm(other, w)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(
    "M, N", [(2**20 + 5, 2056), (2**16 + 1, 2**15 + 8), (2, 2**31 + 16), (2, 2**31 - 5)]
)
def test_beyond_32_bits_on_cuda(lesson, device, M, N):
    """Offsets beyond 2**31 elements are right in the last row."""
    if torch.cuda.mem_get_info()[0] < 5 * M * N:
        pytest.skip(f"{5 * M * N / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.randn(M, N, dtype=torch.float16, device=device)
    y = lesson.layer_norm(x)
    for part in (slice(0, 1), slice(M - 1, M)):
        tail = slice(0, N) if N < 2**20 else slice(N - 2**20, N)
        mean, var = x[part].float().mean(), x[part].float().var(correction=0)
        exact = (x[part, tail].float() - mean) / (var + 1e-5).sqrt()
        assert torch.allclose(y[part, tail].float(), exact, rtol=1e-3, atol=1e-3)
