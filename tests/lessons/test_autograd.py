"""autograd: gradients of both norms against float64, interpreted and on CUDA; and what is refused."""

import itertools
import math
import sys

import lesson_code
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import torch.nn.functional as F  # noqa: E402

sys.path.append(str(lesson_code.EXAMPLES / "tools"))
from triton_memcheck import memcheck  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
NORMS = ["layer_norm", "rms_norm"]
WAYS = ["parts", "atomic", "lock", "race"]
each_norm = pytest.mark.parametrize("name", NORMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def normals(shape, dtype, device, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
    return values.to(dtype).to(device)


def with_nan_around(values):
    """The same values as a window of a buffer full of NaN."""
    shape = [n + 3 for n in values.shape]
    buffer = torch.full(shape, math.nan, dtype=values.dtype, device=values.device)
    window = buffer[tuple(slice(1, n + 1) for n in values.shape)]
    window.copy_(values)
    return window


def reference(name, dy, x, w, b, eps):
    """Output and gradients in float64, by PyTorch's own norms."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    with torch.enable_grad():
        if name == "layer_norm":
            y = F.layer_norm(leaves[0], x.shape[-1:], *leaves[1:], eps)
        else:
            y = F.rms_norm(leaves[0], x.shape[-1:], leaves[1], eps)
            y = y if b is None else y + leaves[2]
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(y, wanted, dy.double()))
    return y.detach(), *[None if t is None else next(found) for t in leaves]


def assert_close(got, exact, dtype, slack, what):
    assert got.dtype == dtype and got.shape == exact.shape, what
    finite = exact.isfinite()
    assert torch.equal(finite, got.isfinite()), f"{what}: not finite elsewhere"
    info = torch.finfo(dtype)
    allowed = exact.abs() * info.eps / 2 + slack + info.tiny * info.eps
    error = (got.double() - exact).abs()
    assert bool((error <= allowed)[finite].all()), f"{what}: {error[finite].max()}"


def assert_grads(lesson, name, dy, x, w=None, b=None, eps=1e-5, mean=0.0):
    """Output and gradients; what is not written would be NaN."""
    y, *exact = reference(name, dy, x, w, b, eps)
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, w, b)]
    before = [t.detach().clone() for t in (x, dy)]
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN
    try:
        got = getattr(lesson, name)(*leaves, eps=eps)
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(got, wanted, dy))
    finally:
        torch.use_deterministic_algorithms(False)
    work = 2**-49 if x.dtype == torch.float64 else 2**-20
    scale = 1 + max(t.double().abs().max().item() for t in (y, dy, *wanted))
    assert_close(got, y, x.dtype, work * scale, "y")
    r = x.double().var(-1, correction=0) if name == "layer_norm" else x.double().square().mean(-1)
    r = 1 + (r + eps).rsqrt().amax().item()  # how steep a row is, and how much of a mean it is
    r *= 1 + abs(mean) * r if name == "layer_norm" else 1
    for t, e, label in zip(leaves, exact, ("dx", "dw", "db")):
        if t is not None:
            g = next(found)
            rows = 1 if label == "dx" else math.sqrt(max(1, y.numel() // max(1, y.shape[-1])))
            assert_close(g, e, t.dtype, 4 * work * scale * r * rows, label)
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])


def parameters(n, dtype, device):
    return normals(n, dtype, device, 7), normals(n, dtype, device, 8)


SIZES = [1, 2, 15, 17, 127, 128, 509, 513, 1008, 1025, 2049]


@each_norm
@each_dtype
@pytest.mark.parametrize("N", SIZES)
def test_widths(lesson, device, name, N, dtype):
    x, dy = (with_nan_around(normals((3, N), dtype, device, s, 1)) for s in (1, 2))
    assert_grads(lesson, name, dy, x, *parameters(N, dtype, device), eps=0.1, mean=1)


@each_norm
@pytest.mark.parametrize(
    "N, dtype",
    [(4097, torch.float64), (5120, torch.bfloat16), (8192, torch.float32), (8193, torch.bfloat16)]
    + [(12_289, torch.float32), (16_384, torch.float16), (16_384, torch.float64)],
    ids=str,
)
def test_rows_that_programs_share(lesson, device, name, N, dtype):
    x, dy = (with_nan_around(normals((3, N), dtype, device, s)) for s in (1, 2))
    assert_grads(lesson, name, dy, x, *parameters(N, dtype, device))


@each_norm
@pytest.mark.parametrize("M, N", [(1, 1), (1, 200), (2, 31), (7, 8), (33, 31), (40, 1), (19, 200)])
def test_heights(lesson, device, name, M, N):
    x, dy = (with_nan_around(normals((M, N), torch.float32, device, s)) for s in (1, 2))
    assert_grads(lesson, name, dy, x, *parameters(N, torch.float32, device), eps=0.1)


@each_norm
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty(lesson, device, name, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    w, b = (torch.ones(shape[-1], device=device, requires_grad=True) for _ in range(2))
    y = getattr(lesson, name)(x, w, b)
    assert y.shape == x.shape
    y.sum().backward()
    for t in (x, w, b):
        assert t.grad.shape == t.shape and not t.grad.any()


@each_norm
@pytest.mark.parametrize("needed", [*itertools.product([0, 1], repeat=3)], ids=str)
@pytest.mark.parametrize("given", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_any_of_them_may_be_wanted_or_missing(lesson, device, name, needed, given):
    x, dy = (normals((5, 77), torch.float32, device, s) for s in (1, 2))
    inputs = [x, *(t if g else None for t, g in zip(parameters(77, x.dtype, device), given))]
    exact = reference(name, dy, *inputs, 1e-5)[1:]
    leaves = [t.clone().requires_grad_(bool(n)) if t is not None else None
              for t, n in zip(inputs, needed)]  # fmt: skip
    y = getattr(lesson, name)(*leaves, eps=1e-5)
    wanted = any(n and t is not None for n, t in zip(needed, leaves))
    assert y.requires_grad == wanted
    if wanted:
        y.backward(dy)
    for t, n, e in zip(leaves, needed, exact):
        if t is not None and n:
            torch.testing.assert_close(t.grad, e.float(), rtol=1e-5, atol=1e-5)
        elif t is not None:
            assert t.grad is None


@each_norm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", [77, 16_384])
def test_float32_parameters(lesson, device, name, N, dtype):
    x, dy = (normals((5, N), dtype, device, s) for s in (1, 2))
    w, b = parameters(N, torch.float32, device)
    assert_grads(lesson, name, dy, x, w, b)
    assert_grads(lesson, name, dy, x, w, b.to(dtype))
    assert_grads(lesson, name, dy, x, w.to(dtype), b)


@each_norm
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=2),
    N=st.integers(2, 70) | st.integers(1000, 1100),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    start=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
)
@example(shape=[3], N=2, steps=(1, 1), start=0, dtype=torch.float32)
def test_views(lesson, device, name, shape, N, steps, start, dtype):
    x, dy = (
        normals((*shape, step * N + start + 2), dtype, device, s)[
            ..., start : start + step * N : step
        ]
        for s, step in enumerate(steps)
    )
    assert_grads(lesson, name, dy, x, *parameters(N, dtype, device), eps=0.1)


@each_norm
def test_layouts_of_the_gradient(lesson, device, name):
    """It comes from whoever used y: turned, repeated, negated, sparse, with gaps."""
    x = normals((4, 6, 10), torch.float32, device)
    w, b = parameters(10, torch.float32, device)
    dy = normals((4, 6, 10), torch.float32, device, 3)
    assert_grads(lesson, name, dy.sum().expand(4, 6, 10), x, w, b)
    assert_grads(lesson, name, dy[:1, :1].expand(4, 6, 10), x, w, b)
    assert_grads(lesson, name, dy[..., :1].expand(4, 6, 10), x, w, b)
    assert_grads(lesson, name, normals((6, 4, 10), x.dtype, device).transpose(0, 1), x, w, b)
    assert_grads(lesson, name, normals((10, 6, 4), x.dtype, device).permute(2, 1, 0), x, w, b)
    assert_grads(lesson, name, normals((4, 12, 30), x.dtype, device)[:, ::2, ::3], x, w, b)
    assert_grads(lesson, name, dy.flip(0), x.flip(0)[::2].repeat(2, 1, 1), w, b)
    leaf = x.clone().requires_grad_()
    expected = reference(name, -dy, x, w, b, 1e-5)[1]
    getattr(lesson, name)(leaf, w, b, eps=1e-5).backward(torch._neg_view(dy))
    torch.testing.assert_close(leaf.grad, expected.float(), rtol=1e-5, atol=1e-5)
    index = torch.zeros(2, 3, 1, dtype=torch.int64, device=device)
    grads = []
    for sparse in (False, True):
        leaf.grad = None
        y = getattr(lesson, name)(leaf, w, b)
        torch.gather(y, 2, index, sparse_grad=sparse).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@each_norm
def test_transposed_and_repeated_inputs(lesson, device, name):
    x, dy = (normals((37, 110), torch.float32, device, s) for s in (1, 2))
    w, b = parameters(37, torch.float32, device)
    assert_grads(lesson, name, dy.t(), x.t(), w, b)
    assert_grads(lesson, name, dy.t().contiguous(), x.t(), w, b)
    assert_grads(lesson, name, dy[::3, ::5], x[::3, ::5])
    assert_grads(lesson, name, dy, x[:1].expand(37, 110))
    assert_grads(lesson, name, dy[:, :6], x[:, :1].expand(37, 6), eps=1)


@each_norm
def test_in_a_graph(lesson, device, name):
    """Used twice, through views, accumulated, kept for a second pass."""
    x, (w, b) = normals((6, 40), torch.float64, device), parameters(40, torch.float64, device)
    found = []
    for norm in (getattr(lesson, name), None):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        if norm is None and name == "rms_norm":
            norm = lambda x, w, b: F.rms_norm(x, (40,), w, 1e-6) + b  # noqa: E731
        norm = norm or (lambda x, w, b: F.layer_norm(x, (40,), w, b))
        h = norm(norm(leaves[0] * 2, *leaves[1:]).view(2, 3, 40).tanh(), *leaves[1:])
        loss = h.square().sum() + h[0].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([t.grad for t in leaves])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


@each_norm
@pytest.mark.parametrize("given", [(1, 1), (0, 1), (0, 0)], ids=str)
def test_gradcheck(lesson, device, name, given):
    x = normals((3, 5), torch.float64, device).requires_grad_()
    inputs = [t.requires_grad_() if g else None
              for t, g in zip(parameters(5, x.dtype, device), given)]  # fmt: skip
    assert torch.autograd.gradcheck(getattr(lesson, name), (x, *inputs))


@each_norm
def test_no_second_derivative(lesson, device, name):
    x = normals((3, 5), torch.float64, device).requires_grad_()
    norm = getattr(lesson, name)
    for loss in (lambda: norm(x).sum(), lambda: norm(x).square().sum()):
        with pytest.raises(RuntimeError, match="Norm has no second derivative"):
            torch.autograd.grad(loss(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Norm has no second derivative"):
        torch.autograd.gradgradcheck(norm, x)


@each_norm
@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_input_is_noticed(lesson, device, name, which):
    inputs = [normals((3, 5), torch.float32, device), torch.ones(5, device=device)]
    inputs = [t.requires_grad_() * 1 for t in inputs]
    y = getattr(lesson, name)(*inputs)
    inputs[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@each_norm
def test_only_two_numbers_a_row_are_kept(lesson, device, name):
    x = normals((30, 50), torch.float32, device).requires_grad_()
    w = torch.ones(50, device=device, requires_grad=True)
    y = getattr(lesson, name)(x, w, w)
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]
    own = [t for t in kept if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert sum(t.numel() for t in own) == 30 * (2 if name == "layer_norm" else 1)
    assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()


@each_norm
def test_where_no_gradient_is_recorded(lesson, device, name):
    x = normals((3, 4), torch.float32, device).requires_grad_()
    with torch.no_grad():
        assert not getattr(lesson, name)(x).requires_grad
    with torch.inference_mode():
        assert getattr(lesson, name)(x).shape == (3, 4)
    assert getattr(lesson, name)(x.detach()).grad_fn is None
    assert getattr(lesson, name)(torch.nn.Parameter(x)).requires_grad


@each_norm
@each_dtype
def test_infinities_and_nan(lesson, device, name, dtype):
    """They reach the whole of their row of dx, and all of dw, as in PyTorch."""
    w, b = parameters(40, dtype, device)
    for row, value in ((0, math.inf), (1, -math.inf), (2, math.nan)):
        for at in (0, 39):
            x, dy = (normals((4, 40), dtype, device, s) for s in (1, 2))
            (x if at else dy)[row, at] = value
            leaves = [t.requires_grad_() for t in (x, w.clone(), b.clone())]
            got = torch.autograd.grad(getattr(lesson, name)(*leaves), leaves, dy)
            exact = reference(name, *(t.cpu() for t in (dy, x, w, b)), 1e-5)[1:]
            for g, e in zip(got, exact):  # torch 2.11 on CUDA: NaN in all of dw
                assert torch.equal(g.isfinite().cpu(), e.isfinite())


@each_norm
@each_dtype
def test_denormals_and_zeros(lesson, device, name, dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([[0.0, -0.0, tiny, -tiny / 4, tiny / 2]] * 3, dtype=dtype, device=device)
    dy = normals((3, 5), dtype, device)
    assert_grads(lesson, name, dy, x, *parameters(5, dtype, device), eps=1)
    assert_grads(lesson, name, x.clone(), dy, *parameters(5, dtype, device), eps=1)


def test_constant_rows_and_large_means(lesson, device):
    for mean in (100.0, -3e4):
        x, dy = (
            normals((3, 300), torch.float32, device, 1, mean),
            normals((3, 300), torch.float32, device),
        )
        assert_grads(lesson, "layer_norm", dy, x, *parameters(300, x.dtype, device), mean=mean)
    x = torch.full((2, 300), 0.1, device=device, requires_grad=True)
    y = lesson.layer_norm(x)
    assert y.abs().max().item() < 2**-18
    [dx] = torch.autograd.grad(y, x, torch.ones_like(x))
    assert dx.abs().max().item() < 1e-3  # r is 316


@each_norm
def test_eps_is_exact_in_float64(lesson, device, name):
    x, dy = normals((2, 50), torch.float64, device) * 1e-6, normals((2, 50), torch.float64, device)
    assert_grads(lesson, name, dy, x)
    assert_grads(lesson, name, dy, x, eps=1)


def call_backward(lesson, how, programs, dy, x, w, b):
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = lesson.Norm.apply(*leaves, 1e-5, True, how, programs)
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("programs", [1, 2, 7, 100])
@pytest.mark.parametrize("how", WAYS)
def test_ways_to_add(lesson, device, how, programs):
    """Any number of programs, also more than there are rows."""
    x, dy = (normals((11, 600), torch.float32, device, s) for s in (1, 2))
    w, b = parameters(600, torch.float32, device)
    exact = reference("layer_norm", dy, x, w, b, 1e-5)[1:]
    if how == "race" and device == "cuda":
        programs = 1  # of several, one may undo what the other did
    for g, e in zip(call_backward(lesson, how, programs, dy, x, w, b), exact):
        torch.testing.assert_close(g, e.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
@pytest.mark.parametrize("how", WAYS)
def test_ways_to_add_read_and_write_nothing_else(lesson, device, how):
    x, dy = (normals((5, 600), torch.float32, device, s) for s in (1, 2))
    with memcheck():
        call_backward(lesson, how, 1, dy, x, *parameters(600, torch.float32, device))


def test_parts_are_added_in_one_order(lesson, device):
    x, dy = (
        normals((2000 if device == "cuda" else 50, 256), torch.float32, device, s) for s in (1, 2)
    )
    w, b = parameters(x.shape[-1], torch.float32, device)
    runs = [call_backward(lesson, "parts", 0, dy, x, w, b) for _ in range(3)]
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))


@pytest.mark.parametrize(
    "tile", [(1, 64, 1), (4, 16, 4), (2, 32, 2), (1, 32, 3), (8, 8, 7)], ids=str
)
@pytest.mark.parametrize("stages", [1, 3])
def test_any_tile_and_nothing_outside(lesson, device, tile, stages):
    """Into windows of poisoned buffers, from windows full of NaN around."""
    (rows, block, split), M, N = tile, 13, 50
    span = -(-N // split)
    x, dy = (with_nan_around(normals((M, N), torch.float32, device, s)) for s in (1, 2))
    w, b = parameters(N, x.dtype, device)
    _, *exact = reference("layer_norm", dy, x, w, b, 1e-5)
    mean, rstd = x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt()
    room = torch.full((M * N + 16,), math.nan, device=device)
    sums = torch.full((2, 3 * N + 16), math.nan, device=device)
    dx, parts = room[8:-8], sums[:, 8:-8]
    lesson.norm_backward_kernel[(3, split)](
        x, dy, w, mean, rstd, dx, parts[0], parts[1], None, M, N, span,
        *x.stride(), *dy.stride(), "parts", rows, block, split, stages,
    )  # fmt: skip
    got = dx.view(M, N), *parts.view(2, 3, N).sum(1)
    for g, e in zip(got, exact):
        torch.testing.assert_close(g, e.float(), rtol=1e-4, atol=1e-5)
    assert room.isnan().sum().item() == 16 and sums.isnan().sum().item() == 32


def test_a_sharer_writes_its_own_columns_only(lesson, device):
    """So it does not matter which of them is last: here the second is missing."""
    M, N, span = 5, 50, 25
    x, dy = (normals((M, N), torch.float32, device, s) for s in (1, 2))
    dx, dw, db = (torch.full((M, N), math.nan, device=device) for _ in range(3))
    lesson.norm_backward_kernel[(M, 1)](
        x, dy, None, x.mean(-1), torch.ones(M, device=device), dx, dw, db, None, M, N, span,
        N, 1, N, 1, "parts", 1, 32, 2, 1,
    )  # fmt: skip
    for t in dx, dw, db:
        assert t[:, :span].isfinite().all() and t[:, span:].isnan().all()


def test_parts_beyond_32_bits(lesson, device):
    """Each program's own place, in memory that is reserved but hardly touched."""
    N, span = 2**30 + 16, 50
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("5 GiB of GPU memory are needed")
    x, dy = (normals((3, span), torch.float32, device, s) for s in (1, 2))
    parts = torch.empty(2 * N + 64, dtype=torch.float16, device=device).as_strided((3, 64), (N, 1))
    parts.fill_(math.nan)
    lesson.norm_backward_kernel[(3, 1)](
        x, dy, None, None, torch.ones(3, device=device), None, parts, None, None, 3, N, span,
        span, 1, span, 1, "parts", 1, 64, 1, 1,
    )  # fmt: skip
    torch.testing.assert_close(parts[:, :span].float(), x * dy, rtol=1e-3, atol=1e-3)
    assert parts[:, span:].isnan().all()


@each_norm
@pytest.mark.parametrize("N, block", [(1, 1), (16, 16), (33, 64)])
def test_forward_writes_nothing_outside(lesson, device, name, N, block):
    x = with_nan_around(normals((5, N), torch.float32, device))
    w, b = parameters(N, x.dtype, device)
    room, stats = (torch.full((k + 16,), math.nan, device=device) for k in (5 * N, 10))
    y, mean, rstd = room[8:-8], stats[8:13], stats[13:18]
    center = mean if name == "layer_norm" else None
    lesson.norm_kernel[(5,)](x, w, b, y, center, rstd, N, *x.stride(), 1e-5, block)
    exact = reference(name, x, x, w, b, 1e-5)[0]
    torch.testing.assert_close(y.view(5, N), exact.float(), rtol=1e-4, atol=1e-4)
    assert room.isnan().sum().item() == 16
    assert stats.isnan().sum().item() == 16 + 5 * (center is None)
    if center is not None:
        torch.testing.assert_close(mean, x.mean(-1), rtol=1e-5, atol=1e-6)


@each_norm
@pytest.mark.parametrize("M, N", [(3, 40), (40, 3)])
def test_strides_beyond_32_bits(lesson, device, name, M, N):
    """In memory that is reserved but hardly touched."""
    step = 2**30 + 16
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("5 GiB of GPU memory are needed")
    buffer = torch.empty(2 * step + 64, dtype=torch.float16, device=device)
    x = buffer.as_strided((M, N), (step, 1) if M < N else (1, step))
    x.copy_(normals((M, N), torch.float16, device))
    dy = normals((M, N), torch.float16, device, 2)
    assert_grads(lesson, name, dy, x, eps=0.1)
    assert_grads(lesson, name, x, dy, eps=0.1)


def refusals(x, w):
    """Arguments, and what must be said, for 17 × 59 float32 and 59."""
    flat, meta, wide = x.reshape(-1), x.to("meta"), torch.zeros(118, device=x.device)
    yield (x.tolist(),), TypeError, "x is a list, not a dense tensor"
    yield (None,), TypeError, "x is a NoneType"
    nested = torch.nested.nested_tensor([x[0], x[1, :5]])
    yield (nested,), TypeError, "x is a Tensor, not a dense tensor"
    yield (x, 1.0), TypeError, "weight is a float"
    yield (x, w, [0.0]), TypeError, "bias is a list"
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8):
        yield (x.to(dtype),), TypeError, f"x has {dtype}; supported"
        yield (x, w.to(dtype)), TypeError, f"weight has {dtype}; supported"
    yield (x, w.half()), TypeError, "weight has torch.float16; supported"
    yield (x.half(), w.half(), w.double()), TypeError, "bias has torch.float64; supported"
    yield (x[0, 0],), ValueError, "x has torch.Size([])"
    yield (x, w[:58]), ValueError, "weight has torch.Size([58]); needed: torch.Size([59])"
    yield (x, w[:1]), ValueError, "weight has torch.Size([1])"
    yield (x, x), ValueError, "weight has torch.Size([17, 59])"
    yield (x, w, w[0]), ValueError, "bias has torch.Size([])"
    yield (meta,), ValueError, "x is on meta; needed: ['cuda'"
    yield (x, w.to("meta")), ValueError, f"weight is on meta; needed: {x.device}"
    yield (x.to_sparse(),), ValueError, "x is sparse or a negated view"
    yield (x.to_sparse_csr(),), ValueError, "x is sparse or a negated view"
    yield (torch._neg_view(x),), ValueError, "x is sparse or a negated view"
    yield (x, torch._neg_view(w)), ValueError, "weight is sparse or a negated view"
    yield (x, wide[::2]), ValueError, "weight is not contiguous"
    yield (x, w, w[:1].expand(59)), ValueError, "bias is not contiguous"
    for eps in (-1e-9, math.inf, 10**400, math.nan, "1", None, torch.tensor(1e-5)):
        yield (x, w, w, eps), ValueError, f"eps is {eps!r}; needed: a finite number"
    yield (torch.zeros(1, 16_385, device=x.device),), ValueError, "x is 1 x 16385; most"
    yield (flat[0].expand(2**31, 1),), ValueError, "x is 2147483648 x 1; most"
    yield (flat[:960].view(8, 12, 10)[:, :11],), ValueError, "rows of x have no one distance"
    yield (flat[:960].view(8, 12, 10).transpose(0, 1),), ValueError, "rows of x have no one"


@each_norm
def test_refusals(lesson, device, name):
    x = normals((17, 59), torch.float32, device)
    w = normals(59, torch.float32, device)
    for arguments, error, message in refusals(x, w):
        assert_refused(getattr(lesson, name), arguments, error, message, x)


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(3, 5, device=device)
    for arguments, message in [
        ((x.cpu(),), "x is on cpu; needed: ['cuda']"),
        ((x, x[0].cpu()), "weight is on cpu; needed: cuda:0"),
    ]:
        with pytest.raises(ValueError) as caught:
            lesson.layer_norm(*arguments)
        assert str(caught.value) == message
    if torch.cuda.device_count() > 1:
        other = normals((3, 5), torch.float32, "cuda:1")
        assert_grads(lesson, "layer_norm", other.clone(), other)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("N", [3, 5120])
def test_more_than_31_bits_on_cuda(lesson, device, N):
    """Offsets beyond 32 bits are right, to the last row."""
    M = 2**31 // N + 300
    if torch.cuda.mem_get_info()[0] < 14 * M * N:
        pytest.skip(f"{14 * M * N / 2**30:.0f} GiB of GPU memory are needed")
    x, dy = torch.randn(2, M, N, dtype=torch.bfloat16, device=device)
    x.requires_grad_()
    w = torch.randn(N, device=device, requires_grad=True)
    dx, dw = torch.autograd.grad(lesson.rms_norm(x, w), (x, w), dy)
    for part in (slice(0, 200), slice(M - 200, M)):
        exact = reference("rms_norm", dy[part], x[part], w, None, 1e-6)[1]
        torch.testing.assert_close(dx[part].double(), exact, rtol=1e-2, atol=1e-2)
    total = torch.zeros(N, dtype=torch.float64, device=device)
    for xs, dys in zip(x.detach().split(2**24 // N), dy.split(2**24 // N)):
        r = (xs.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        total += (dys.double() * xs.double() * r).sum(0)
    torch.testing.assert_close(dw.double(), total, rtol=1e-3, atol=M**0.5 / 100)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("how", ["atomic", "lock", "parts"])
def test_no_race_on_cuda(lesson, device, how):
    x, dy = (normals((20_000, 1000), torch.float32, device, s) for s in (1, 2))
    w, b = parameters(1000, torch.float32, device)
    exact = reference("layer_norm", dy, x, w, b, 1e-5)[1:]
    for _ in range(5):
        for g, e in zip(call_backward(lesson, how, 0, dy, x, w, b), exact):
            torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=2e-3)
