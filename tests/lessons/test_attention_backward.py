"""attention_backward: output and gradients against float64, for any shape, view and tile."""

import functools
import math

import pytest
from heads import LAYOUTS, check_held, normals, view
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

F16, BF16 = torch.float16, torch.bfloat16
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson


def inputs(B, HQ, HK, LQ, LK, D, dtype, device, layouts=("contiguous",) * 4, seed=0):
    shapes = (B, HQ, LQ, D), (B, HK, LK, D), (B, HK, LK, D), (B, HQ, LQ, D)
    return [normals(s, x, dtype, device, seed + i) for i, (s, x) in enumerate(zip(shapes, layouts))]


def by_formula(q, k, v, do, causal, scale):
    """Output and gradients in float64, and what 16 bits for P, dS and O may change."""
    eps = torch.finfo(q.dtype).eps
    q, k, v, do = (t.double() for t in (q, k, v, do))
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    cols = torch.arange(k.shape[2], device=q.device)
    s = scale * q @ keys.mT
    if causal:
        s = s.masked_fill(cols > rows, -math.inf)
    p = s.softmax(-1).nan_to_num(0)
    out, dp = p @ values, do @ values.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    # Each P is off by eps of itself; O, and with it delta, by eps of the sum of sizes.
    p_off = eps * p
    out_off = eps * (p @ values.abs()) + eps * out.abs()
    ds_off = 2 * eps * p * (dp.abs() + (do.abs() * (p @ values.abs())).sum(-1, keepdim=True))

    def shared(t):
        return t.unflatten(1, (k.shape[1], group)).sum(2) if group else torch.zeros_like(k)

    found = out, scale * ds @ keys, scale * shared(ds.mT @ q), shared(p.mT @ do)
    size = abs(scale)
    off = out_off, size * ds_off @ keys.abs(), size * shared(ds_off.mT @ q.abs())
    off += (shared(p_off.mT @ do.abs()),)
    return found, [a + eps * b.abs() + 1e-6 for a, b in zip(off, found)]


def assert_right(lesson, q, k, v, do, causal=False, scale=None):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = lesson.attention(*leaves, causal=causal, scale=scale)
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
    grads = torch.autograd.grad(out, leaves, do)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    exact, allowed = by_formula(q, k, v, do, causal, scale)
    for name, found, right, bound in zip(("out", "dq", "dk", "dv"), (out, *grads), exact, allowed):
        assert found.shape == right.shape and found.dtype == q.dtype
        assert bool(((found.double() - right).abs() <= bound).all()), name
    return out, grads


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors are full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


SHAPES = [(1, 1, 1, 1, 1, 16), (1, 1, 1, 1, 300, 64), (1, 2, 2, 257, 1, 16)]
SHAPES += [(2, 2, 1, 63, 65, 64), (1, 1, 1, 64, 64, 64), (1, 1, 1, 65, 127, 128)]
SHAPES += [(1, 2, 1, 129, 33, 40), (1, 6, 2, 31, 97, 24), (3, 1, 1, 128, 128, 32)]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_sizes(lesson, device, sizes, causal, dtype):
    assert_right(lesson, *inputs(*sizes, dtype, device), causal)


def test_the_reference(lesson):
    """By autograd it says what the formulas say."""
    for causal in (False, True):
        q, k, v, do = inputs(2, 4, 2, 9, 5, 16, torch.float64, "cpu")
        by_autograd = lesson.attention_backward_ref(q, k, v, do, causal, 0.3)
        by_hand, _ = by_formula(q, k, v, do, causal, 0.3)
        for a, b in zip(by_autograd, by_hand):
            torch.testing.assert_close(a, b)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (0, 0), (0, 1)]),
    lengths=st.tuples(st.integers(0, 140), st.integers(0, 140)),
    D=st.sampled_from([16, 24, 64, 72, 128]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, 0.7, -0.1, 1]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 99),
)
@example(1, (2, 1), (70, 0), 16, True, None, ("contiguous",) * 4, F16, 0)
@example(1, (2, 1), (0, 70), 16, True, None, ("contiguous",) * 4, F16, 0)
@example(2, (2, 1), (70, 40), 24, True, None, ("length first",) * 4, F16, 0)
def test_any_views(lesson, device, batch, heads, lengths, D, causal, scale, layouts, dtype, seed):
    sizes = batch, *heads, *lengths, D
    assert_right(lesson, *inputs(*sizes, dtype, device, layouts, seed), causal, scale)


def test_rows_that_see_no_key(lesson, device):
    q, k, v, do = inputs(1, 2, 2, 200, 70, 64, F16, device)
    out, (dq, dk, dv) = assert_right(lesson, q, k, v, do, causal=True)
    assert not out[:, :, :130].any() and not dq[:, :, :130].any()
    again = lesson.attention(q.clone().requires_grad_(), k, v, causal=True)
    lse = again.grad_fn.saved_tensors[4]
    assert (lse[:, :, :130] == math.inf).all() and lse[:, :, 130:].isfinite().all()
    assert dq[:, :, 131:].any(-1).all()  # row 130 sees one key, whose weight stays 1
    _, (_, dk_seen, dv_seen) = assert_right(lesson, *(t[:, :, -70:] for t in (q, k, v, do)), True)
    torch.testing.assert_close(dk, dk_seen)
    torch.testing.assert_close(dv, dv_seen)


@pytest.mark.parametrize("BN", [32, 64, 128])
@pytest.mark.parametrize("BM", [32, 64, 128])
def test_each_tile(lesson, device, BM, BN):
    """Of all three kernels, with a mask that crosses the tiles, and tails on both sides.

    With 126 keys more than queries, the mask hides one key of a tile, the last of its first row.
    """
    q, k, v, do = inputs(1, 2, 1, 150, 276, 32, F16, device)
    tiles = dict.fromkeys(("dq", "dkdv"), (BM, BN, 4, 1))
    for causal in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = lesson.Attention.apply(*leaves, causal, 0.2, tiles)
        exact, allowed = by_formula(q, k, v, do, causal, 0.2)
        found = out, *torch.autograd.grad(out, leaves, do)
        for a, b, bound in zip(found, exact, allowed):
            assert bool(((a.double() - b).abs() <= bound).all())


def named_tiles(lesson):
    yield from ((D, tiles) for D, tiles in lesson.TILES.items())
    yield from ((D, lesson.SMALL) for D in (64, 128))


def test_named_tiles(lesson, device):
    """Each that the lesson may choose, causal or not."""
    for D, tiles in named_tiles(lesson):
        assert all(lesson.PAD % tile[0] == 0 for tile in tiles.values())
        q, k, v, do = inputs(1, 1, 1, 150, 170, D, F16, device)
        for causal in (False, True):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = lesson.Attention.apply(*leaves, causal, 0.1, tiles)
            exact, allowed = by_formula(q, k, v, do, causal, 0.1)
            found = out, *torch.autograd.grad(out, leaves, do)
            for a, b, bound in zip(found, exact, allowed):
                assert bool(((a.double() - b).abs() <= bound).all()), (D, tiles)


def test_tiles_of(lesson, monkeypatch):
    class Gpu:
        major, shared_memory_per_block_optin = 9, 227 << 10

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu)
    cuda = torch.device("cuda")
    choose = lesson.tiles_of
    assert choose(64, cuda) is choose(16, cuda) is lesson.TILES[64]
    assert choose(72, cuda) is choose(128, cuda) is lesson.TILES[128]
    Gpu.shared_memory_per_block_optin = 99 << 10
    assert choose(64, cuda) is lesson.SMALL
    Gpu.major, Gpu.shared_memory_per_block_optin = 8, 227 << 10
    assert choose(64, cuda) is lesson.SMALL


def test_nothing_is_written_outside(lesson, device):
    """Output, rows and gradients in windows: each number of theirs, and no other."""
    tiles, how = lesson.tiles_of(24, torch.device(device)), (True, 0.2)
    q, k, v, do = inputs(2, 2, 1, 70, 90, 24, F16, device)
    (out, out_room), (dq, dq_room) = (view(q.shape, "padded", F16, device) for _ in range(2))
    (dk, dk_room), (dv, dv_room) = (view(k.shape, "padded", F16, device) for _ in range(2))
    rows = torch.full((2, 4, 2, 128), math.nan, device=device)
    lse, delta = rows[:, 1:3].unbind()
    tensors = dict(q=q, k=k, v=v, out=out)
    lesson.launch(lesson.forward_kernel, tiles["dq"], *how, tensors, lse_ptr=lse)
    more = dict(lse_ptr=lse, delta_ptr=delta)
    tensors = dict(q=q, k=k, v=v, out=out, do=do, dq=dq)
    lesson.launch(lesson.dq_kernel, tiles["dq"], *how, tensors, **more)
    tensors = dict(q=q, k=k, v=v, do=do, dk=dk, dv=dv)
    lesson.launch(lesson.dkdv_kernel, tiles["dkdv"], *how, tensors, **more)
    exact, allowed = by_formula(q, k, v, do, *how)
    for a, b, bound in zip((out, dq, dk, dv), exact, allowed):
        assert bool(((a.double() - b).abs() <= bound).all())
        a.fill_(math.nan)
    for room in (out_room, dq_room, dk_room, dv_room, rows[:, 0], rows[:, 3]):
        assert room.isnan().all()
    assert not rows[:, 1:3].isnan().any()


def test_the_same_bits(lesson, device):
    q, k, v, do = inputs(1, 4, 2, 100, 150, 64, F16, device)
    runs = [assert_right(lesson, q, k, v, do, True)[1] for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_shared_heads_are_repeated_heads(lesson, device):
    q, k, v, do = inputs(1, 6, 2, 50, 60, 16, F16, device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    shared = lesson.attention(*leaves, causal=True)
    many = lesson.attention(q, *(t.repeat_interleave(3, 1) for t in (k, v)), causal=True)
    assert torch.equal(shared, many)


def test_what_is_kept(lesson, device):
    """The inputs, the output, and one number a row, padded; a copy only where it must be."""
    q, k, v, do = inputs(1, 1, 1, 70, 130, 16, F16, device, ("length first",) * 4)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = lesson.attention(*leaves)  # must live: it is among what is kept
    saved = out.grad_fn.saved_tensors
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in leaves]
    assert saved[3].shape == q.shape and saved[4].shape == (1, 1, 128)
    for layout in ("sliced", "offset", "expanded"):
        odd = normals(q.shape, layout, F16, device, 0)
        assert lesson.dense(odd).data_ptr() != odd.data_ptr() or layout == "expanded"
        assert torch.equal(lesson.dense(odd), odd)


def test_what_a_descriptor_can_hold(lesson, device):
    check_held(lesson.dense, device)


def test_gradients_as_autograd_brings_them(lesson, device):
    """Expanded, for one input only, added up over two uses; refused a second time."""
    q, k, v, _ = inputs(1, 2, 2, 40, 50, 16, F16, device)
    ones = torch.ones_like(q)
    exact, _ = by_formula(q, k, v, ones, False, 0.25)
    for i, t in enumerate((q, k, v)):
        leaf = t.clone().requires_grad_()
        out = lesson.attention(*(leaf if i == j else x for j, x in enumerate((q, k, v))))
        out.sum().backward()
        torch.testing.assert_close(leaf.grad.double(), exact[1 + i], rtol=0.01, atol=0.01)
    leaf = q.clone().requires_grad_()
    both = lesson.attention(leaf, leaf, leaf)
    both.sum().backward()
    exact, _ = by_formula(q, q, q, ones, False, 0.25)
    torch.testing.assert_close(leaf.grad.double(), sum(exact[1:]), rtol=0.01, atol=0.02)
    out = lesson.attention(leaf, k, v)
    for loss in (out.sum(), out.square().sum()):  # the gradient of a sum has no history
        with pytest.raises(RuntimeError, match="attention has no second derivative"):
            torch.autograd.grad(loss, leaf, create_graph=True, retain_graph=True)
    with torch.no_grad():
        assert not lesson.attention(leaf, k, v).requires_grad
    with torch.inference_mode():
        assert lesson.attention(q, k, v).shape == q.shape


def test_a_negated_gradient_and_another_default_dtype(lesson, device):
    q, k, v, do = inputs(1, 2, 2, 40, 50, 16, F16, device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    usual = torch.autograd.grad(lesson.attention(*leaves), leaves, do)
    negated = torch.autograd.grad(lesson.attention(*leaves), leaves, torch._neg_view(-do))
    torch.set_default_dtype(torch.bfloat16)
    try:
        rough = torch.autograd.grad(lesson.attention(*leaves), leaves, do)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in negated, rough:
        assert all(torch.equal(a, b) for a, b in zip(found, usual))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.1])
def test_the_check_of_the_lesson_can_fail(lesson, wrong):
    exact = [torch.ones(3, dtype=torch.float64) for _ in range(4)]
    assert lesson.errors([t.float() for t in exact], exact, 0.02) == [0] * 4
    for i in range(4):
        found = [t.float() for t in exact]
        found[i][1] = wrong
        with pytest.raises(RuntimeError, match="wrong: errors"):
            lesson.errors(found, exact, 0.02)


def test_a_change_in_between_is_noticed(lesson, device):
    q, k, v, do = inputs(1, 1, 1, 20, 20, 16, F16, device)
    leaf = q.clone().requires_grad_()
    out = lesson.attention(leaf, k, v)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(do)
    out = lesson.attention(leaf, k, v)
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(do)


def test_special_values(lesson, device):
    """A NaN reaches its row; what is large stays finite while the scores do."""
    q, k, v, do = inputs(1, 1, 1, 40, 50, 16, F16, device)
    q[0, 0, 3, 5] = math.nan
    out = lesson.attention(q, k, v)
    assert out[0, 0, 3].isnan().all() and not out[0, 0, [2, 4]].isnan().any()
    q, k, v, do = inputs(1, 1, 1, 40, 50, 16, F16, device)
    assert_right(lesson, 60 * q, k, v, do)  # scores of some hundred: one key takes all
    assert_right(lesson, q, k, v, do, scale=0)
    tiny = torch.full_like(v, 2.0**-24)  # subnormal
    torch.testing.assert_close(lesson.attention(q, k, tiny), tiny[:, :, :40], rtol=0, atol=2.0**-24)
    far = torch.full_like(q, 250.0)  # each score is 10**6: no exponential of it exists
    same = lesson.attention(far, torch.full_like(k, 250.0), v)
    torch.testing.assert_close(same, v.mean(2, keepdim=True).expand_as(same), rtol=0, atol=0.002)


def refusals(x):
    """Arguments, and what must be said, for a float16 tensor of (2, 4, 6, 16)."""
    yield (x.tolist(), x, x), TypeError, "q is a list, not a tensor"
    yield (x, None, x), TypeError, "k is a NoneType, not a tensor"
    for dtype in (torch.float32, torch.float64, torch.int8, torch.complex64):
        yield (x.to(dtype),) * 3, TypeError, f"q has {dtype}; all need one of"
        yield (x, x, x.to(dtype)), TypeError, f"v has {dtype}; all need one of"
    yield (x, x.bfloat16(), x), TypeError, "k has torch.bfloat16; all need one of"
    yield (x, x.to("meta"), x), ValueError, "k is on meta; all need one GPU"
    yield (x.to("meta"),) * 3, ValueError, "q is on meta; all need one GPU"
    yield (x.to_sparse(), x, x), ValueError, "q is sparse or a negated view"
    yield (x, torch._neg_view(x), x), ValueError, "k is sparse or a negated view"
    for wrong in (x[0], x[None], x[..., :8], x[..., :12], x.repeat(1, 1, 1, 9)):
        yield (wrong, x, x), ValueError, f"q has {wrong.shape}: not 4 sizes, D 16, 24 to 128"
    wide = x[:, :, :1].expand(2, 4, 2**30 + 1, 16)
    yield (x, wide, wide), ValueError, f"k has {wide.shape}: not 4 sizes"
    wide = x[:1, :1].expand(2**16, 1, 6, 16)
    yield (wide,) * 3, ValueError, f"q has {wide.shape}: not 4 sizes"
    yield (x, x[:, :, :5], x), ValueError, f"{x.shape}, {x[:, :, :5].shape}, {x.shape} do"
    yield (x, x[:1], x[:1]), ValueError, f"{x.shape}, {x[:1].shape}, {x[:1].shape} do not fit"
    twice = x.repeat(1, 1, 1, 2)
    yield (x, twice, twice), ValueError, f"{x.shape}, {twice.shape}, {twice.shape} do not fit"
    for q, k in (x, x[:, :3]), (x, x[:, :0]), (x[:, :2], x), (x[:, :0], x[:, :0][:1]):
        message = f"{q.shape}, {k.shape}, {k.shape} do not fit together"
        yield (q, k, k), ValueError, message


def test_refusals(lesson, device):
    x = torch.randn(2, 4, 6, 16, device=device).to(F16)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.attention, arguments, error, message, x)
    for options, error, message in (
        (dict(causal=1), TypeError, "causal=1, scale=0.25: a bool, a number"),
        (dict(causal=None), TypeError, "causal=None, "),
        (dict(scale=True), TypeError, "causal=False, scale=True"),
        (dict(scale="1"), TypeError, "causal=False, scale='1'"),
        (dict(scale=math.nan), ValueError, "scale is nan, not a number below 1e20"),
        (dict(scale=-math.inf), ValueError, "scale is -inf, not a number below 1e20"),
        (dict(scale=1e20), ValueError, "scale is 1e+20, not a number below 1e20"),
        (dict(scale=-1e20), ValueError, "scale is -1e+20, not a number below 1e20"),
    ):
        call = functools.partial(lesson.attention, x, x, x, **options)
        assert_refused(call, (), error, message, x)


def test_large_scores(lesson, device):
    """Weights add up to 1, though the maximum, once rounded, is off by units."""
    q = torch.full((1, 1, 4, 16), -250.0, dtype=F16, device=device)
    scale = 2**27.9 / (16 * 250**2 * math.log2(math.e))
    assert (lesson.attention(q, -q, torch.ones_like(q), scale=scale) == 1).all()


def test_gradients_of_large_scores(lesson, device):
    """Up to the size that the docstring names."""
    q = torch.full((1, 1, 64, 16), 63.9, dtype=F16, device=device)
    v, do = (normals(q.shape, "contiguous", F16, device, seed) for seed in (1, 2))
    assert_right(lesson, q, q.clone(), v, do)
