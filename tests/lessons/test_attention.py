"""attention: against float64, for any shape, view, tile and kernel."""

import functools
import itertools
import math
import re
from collections import Counter

import pytest
from compile_only import Job, compile_kernel
from heads import LAYOUTS, check_held, normals, view
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

F16, BF16 = torch.float16, torch.bfloat16
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson


@pytest.fixture(params=["plain", "specialised"])
def kernel(request, lesson, device, monkeypatch):
    """Which kernel the wrapper takes; on a CPU neither asks what GPU there is."""
    if device == "cpu":
        monkeypatch.setattr(lesson, "traits", lambda _: (request.param != "plain", 4, True))
    elif request.param != "plain" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it needs a Hopper")
    elif request.param == "plain":
        known = lesson.traits
        monkeypatch.setattr(lesson, "traits", lambda d: (False, *known(d)[1:]))
    return request.param


def inputs(B, HQ, HK, M, N, D, dtype, device, layouts=("contiguous",) * 3, seed=0):
    shapes = (B, HQ, M, D), (B, HK, N, D), (B, HK, N, D)
    return [normals(s, x, dtype, device, seed + i) for i, (s, x) in enumerate(zip(shapes, layouts))]


def assert_close(lesson, out, q, k, v, causal=False, scale=None):
    """A weight is rounded before it meets its value, the result once more."""
    exact, size = lesson.attention_ref(q, k, v, causal, scale)
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
    allowed = torch.finfo(q.dtype).eps * size + 1e-6
    off = (out.double() - exact).abs()
    assert bool((off <= allowed).all()), f"off by {off.max()}"


def assert_right(lesson, q, k, v, causal=False, scale=None):
    assert_close(
        lesson, lesson.attention(q, k, v, causal=causal, scale=scale), q, k, v, causal, scale
    )


SHAPES = [(1, 1, 1, 1, 1, 16), (1, 1, 1, 1, 300, 64), (1, 2, 2, 257, 1, 16), (1, 2, 1, 5, 0, 64)]
SHAPES += [(2, 2, 1, 63, 65, 64), (1, 1, 1, 64, 64, 64), (1, 1, 1, 65, 127, 128)]
SHAPES += [(1, 2, 1, 129, 33, 40), (1, 6, 2, 31, 97, 24), (1, 1, 1, 128, 128, 80)]
SHAPES += [
    (1, 2, 1, 257, 131, 128),
    (1, 1, 1, 33, 70, 256),
    (1, 1, 1, 20, 30, 3),
    (1, 1, 1, 9, 9, 1),
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_sizes(lesson, device, sizes, causal, dtype):
    assert_right(lesson, *inputs(*sizes, dtype, device), causal)


@pytest.mark.parametrize(
    "M, N", [(1, 1), (127, 129), (128, 128), (130, 256), (300, 200), (200, 333)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_both_kernels(lesson, device, kernel, M, N, causal):
    for (D, dtype), times in itertools.product(((128, F16), (72, BF16)), (1, 8)):
        q, k, v = inputs(2, 4, 2, M, N, D, dtype, device)
        assert_right(lesson, times * q, k, v, causal)  # of 8, maxima grow by far more than SLACK


def test_the_wrapper_takes_both(lesson, device, monkeypatch):
    if device != "cpu":
        pytest.skip("it simulates a Hopper")
    monkeypatch.setattr(lesson, "traits", lambda _: (True, 4, True))
    launched = []
    for name in ("attention_kernel", "specialised_kernel"):
        real = getattr(lesson, name)
        note = lambda grid, real=real, name=name: launched.append(name) or real[grid]  # noqa: E731
        monkeypatch.setattr(lesson, name, type("", (), {"__getitem__": staticmethod(note)})())
    for D in (64, 65, 128, 129):
        lesson.attention(*inputs(1, 1, 1, 5, 5, D, F16, device))
    assert [name[:5] for name in launched] == ["atten", "speci", "speci", "atten"]


def test_each_half_fetches_its_own_queries(lesson):
    """Else a barrier waits for ever: the compiler once halved the tile, but not what TMA fetches."""
    BM, BN, warps, stages = lesson.SPECIALISED
    arguments = {f"{x}_desc": f"tensordesc<fp16[1, 1, {BN}, 128]>" for x in "kv"}
    arguments |= {"q_ptr": "*fp16:16", "out_ptr": "*fp16:16", "scale": "fp32"}
    sizes = "all_heads heads group M N D stride_q stride_ob stride_oh stride_om stride_od"
    arguments |= dict.fromkeys(sizes.split(), "i32")
    constants = {"BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_D": 128, "SMS": 132}
    constants |= dict.fromkeys(("CAUSAL", "PTX"), True)
    options = {"num_warps": warps, "num_stages": stages}
    job = Job("attention", "specialised_kernel", "sm_90", arguments, constants, options)
    asm = compile_kernel(job).asm
    text = asm["ttgir"]
    assert text.count("ttg.warp_specialize(") == 1
    made = re.findall(r"reinterpret_tensor_descriptor.*tensordesc<tensor<(\w+)xf16", text)
    assert made == [f"{BM // 2}x128"]
    fetched = Counter(map(int, re.findall(r"barrier_expect .*?, (\d+)", text)))
    assert fetched == {BM * 128: 2, 2 * BN * 128: 2}  # bytes: two halves; keys, values
    compared = re.findall(r"setp\.le\.s32 p,(%r\d+),(%r\d+)", asm["ptx"])
    assert len(compared) == 128  # of a thread in each half: 32 keys, 2 rows
    assert [len(set(side)) for side in zip(*compared[:64])] == [32, 2]


@pytest.mark.parametrize("causal", [0, 1])
def test_several_programs_fit_on_an_sm_with_heads_of_64(lesson, causal):
    BM, BN, warps, stages = lesson.TILES[64][0]
    arguments = {f"{x}_desc": f"tensordesc<fp16[1, 1, {BN}, 64]>" for x in "kv"}
    arguments |= {"q_desc": f"tensordesc<fp16[1, 1, {BM}, 64]>", "out_ptr": "*fp16:16"}
    arguments |= dict.fromkeys("heads group M N D stride_ob stride_oh stride_om".split(), "i32")
    arguments["scale"] = "fp32"
    constants = {"BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_D": 64, "CAUSAL": causal, "ROUND": True}
    constants |= {"seen_ptr": None, "stride_od": 1}
    options = {"num_warps": warps, "num_stages": stages}
    job = Job("attention", "attention_kernel", "sm_90", arguments, constants, options)
    report = compile_kernel(job)
    assert 2 * report.registers * 32 * warps <= 2**16
    assert 2 * (report.shared + 1024) <= 228 * 1024  # 1 KiB is the system's


@triton.jit
def step_kernel(x_ptr, row_ptr, work, STEP: tl.constexpr, HIDES: tl.constexpr, PTX: tl.constexpr):
    """One of the lesson's two steps on a tile of 512 by 16, in place: 8 rows a warp."""
    rows, cols = tl.arange(0, 512)[:, None], tl.arange(0, 16)[None, :]
    x, row = tl.load(x_ptr + rows * 16 + cols), tl.load(row_ptr + rows)
    if HIDES:
        x = STEP(x, cols, row, work > 0, PTX)
    else:
        x = STEP(x, row, PTX)
    tl.store(x_ptr + rows * 16 + cols, x)


@pytest.mark.parametrize("rows", [(), (0,), (37,), (511,), (3, 18, 40), range(512)], ids=str)
def test_steps_are_skipped_only_without_work(lesson, device, rows):
    """A row with work is changed, and no other, however few rows of a warp have some."""
    x = torch.randn(512, 16, device=device)
    alpha = torch.ones(512, device=device)
    last = torch.full((512,), 15, dtype=torch.int32, device=device)
    alpha[list(rows)], last[list(rows)] = 0.3, 5
    PTX = device == "cuda" and not torch.version.hip
    got = x.clone()
    step_kernel[(1,)](got, alpha, 0, STEP=lesson.correct, HIDES=False, PTX=PTX)
    assert torch.equal(got, x * alpha[:, None])
    hidden = torch.arange(16, device=device) > last[:, None]
    for work in (0, 2):  # Triton makes 1 a constant
        got = x.clone()
        step_kernel[(1,)](got, last, work, STEP=lesson.hide, HIDES=True, PTX=PTX)
        assert torch.equal(got, x.masked_fill(hidden, -math.inf) if work else x)


def test_the_reference(lesson):
    """Says what PyTorch says; and a row without keys is 0."""
    q, k, v = inputs(2, 4, 2, 9, 9, 16, torch.float64, "cpu")
    for causal in (False, True):
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(lesson.attention_ref(q, k, v, causal, 0.3)[0], want)
    out, _ = lesson.attention_ref(q, k[:, :, :4], v[:, :, :4], True)
    assert not out[:, :, :5].any() and out[:, :, 5:].any(-1).all()
    last = lesson.attention_ref(q[:, :, 8:], k, v, True)[0]
    torch.testing.assert_close(last, lesson.attention_ref(q[:, :, 8:], k, v)[0])


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (0, 0)]),
    lengths=st.tuples(st.integers(0, 140), st.integers(0, 140)),
    D=st.sampled_from([1, 16, 24, 64, 72, 128, 200]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 1e-3, 0.7, 1]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 99),
)
@example(1, (2, 1), (70, 0), 16, True, None, ("contiguous",) * 4, F16, 0)
@example(1, (2, 1), (0, 70), 16, True, None, ("contiguous",) * 4, F16, 0)
@example(2, (2, 1), (70, 40), 24, True, None, ("length first",) * 4, F16, 0)
def test_any_views(lesson, device, batch, heads, lengths, D, causal, scale, layouts, dtype, seed):
    """Also of the output: all of its numbers are written, and no other."""
    q, k, v = inputs(batch, *heads, *lengths, D, dtype, device, layouts, seed)
    out, room = view(q.shape, layouts[3].replace("expanded", "padded"), dtype, device)
    assert lesson.attention(q, k, v, causal=causal, scale=scale, out=out) is out
    assert_close(lesson, out, q, k, v, causal, scale)
    out.fill_(math.nan)
    assert room.isnan().all()


def test_rows_that_see_no_key(lesson, device, kernel):
    q, k, v = inputs(1, 2, 2, 300, 70, 128, F16, device)
    out = lesson.attention(q, k, v, causal=True)
    assert not out[:, :, :230].any() and out[:, :, 230:].any(-1).all()
    assert_close(lesson, out, q, k, v, True)
    out = torch.full_like(q, math.nan)
    assert not lesson.attention(q, k[:, :, :0], v[:, :, :0], out=out).any()


def test_each_tile(lesson, device):
    """That the lesson may choose, and others; causal or not; with tails on both sides."""
    large = lesson.traits(torch.device(device))[2]
    named = [(D, tile) for D, tiles in lesson.TILES.items() for tile in tiles[not large :]]
    others = [(64, (BM, BN, 4, 1)) for BM, BN in itertools.product((32, 64, 128), repeat=2)]
    for (D, tile), causal in itertools.product([*named, *others], (False, True)):
        q, k, v = inputs(1, 2, 1, 150, 200, D, F16, device)
        out = lesson.launch(q, k, v, torch.full_like(q, math.nan), causal, tile=tile)
        assert_close(lesson, out, q, k, v, causal)


def test_fast_and_wrong(lesson, device):
    """Without rounding, keys are seen that must not be, unless the tiles happen to fit."""
    q, k, v = inputs(1, 1, 1, 256, 256, 64, F16, device)
    exact, _ = lesson.attention_ref(q, k, v, True)
    for (BM, BN), wrong in (((64, 64), False), ((128, 64), False), ((64, 128), True)):
        for ROUND in (True, False):
            out = lesson.launch(q, k, v, torch.empty_like(q), True, None, (BM, BN, 4, 2), ROUND)
            assert ((out - exact).abs().max() > 0.05) == (wrong and not ROUND)


def test_what_is_seen(lesson, device):
    """0 where no row of a tile sees a key, 1 without a mask: only where all see all; else 2."""
    M, N, side = 200, 300, 32
    q, k, v = inputs(1, 1, 1, M, N, 64, F16, device)
    seen = torch.zeros(-(M // -side), -(N // -side), dtype=torch.int32, device=device)
    lesson.launch(q, k, v, torch.empty_like(q), True, tile=(side, side, 4, 1), seen=seen)
    for row, col in itertools.product(*map(range, seen.shape)):
        # The last key that the first row sees, and the last row; and the tile's keys.
        first, last = row * side + N - M, min((row + 1) * side, M) - 1 + N - M
        keys = range(col * side, min((col + 1) * side, N))
        if keys[0] > last:
            want = {0}
        elif keys[-1] > first:
            want = {2}
        else:  # a last key on the border may be masked in vain
            want = {1, 2} if keys[-1] == first or len(keys) < side else {1}
        assert seen[row, col].item() in want, (row, col)


def test_the_gpu_decides_the_tile(lesson, monkeypatch, device):
    if device != "cpu":
        pytest.skip("it simulates GPUs")
    taken, real = [], lesson.TensorDescriptor
    note = lambda *arguments: taken.append(arguments[3]) or real(*arguments)  # noqa: E731
    monkeypatch.setattr(lesson, "TensorDescriptor", note)
    for large, D in itertools.product((True, False), (16, 65, 129)):
        monkeypatch.setattr(lesson, "traits", lambda _: (False, 132, large))  # noqa: B023
        taken.clear()
        assert_right(lesson, *inputs(1, 1, 1, 5, 5, D, F16, device))
        BM, BN = lesson.TILES[64 if D == 16 else 128 if D == 65 else 256][not large][:2]
        assert [box[2] for box in taken] == [BN, BN, BM]


def test_shared_heads_are_repeated_heads(lesson, device, kernel):
    q, k, v = inputs(1, 6, 2, 50, 60, 128, F16, device)
    many = lesson.attention(q, *(t.repeat_interleave(3, 1) for t in (k, v)), causal=True)
    assert torch.equal(lesson.attention(q, k, v, causal=True), many)


def test_special_values(lesson, device, kernel):
    """A NaN reaches its row or its head; what is large stays finite while the scores do."""
    q, k, v = inputs(1, 2, 2, 140, 150, 128, F16, device)
    q[0, 0, 3, 5] = math.nan
    out = lesson.attention(q, k, v)
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 128
    q[0, 0, 3, 5], v[0, 1, 7, 2] = 0, math.inf
    out = lesson.attention(q, k, v)
    assert (out[0, 1, :, 2] == math.inf).all() and out.isfinite().sum() == out.numel() - 140
    k[0, 1, 149, 0] = math.nan
    out = lesson.attention(q, k, v, causal=True)  # only the last query sees the last key
    assert out[0, 1, -1].isnan().all() and not out[0, 1, :-1].isnan().any()
    q, k, v = inputs(1, 1, 1, 40, 50, 128, F16, device)
    assert_right(lesson, 60 * q, k, v)  # scores of some hundred: one key takes all
    tiny = torch.full_like(v, 2.0**-24)  # subnormal
    torch.testing.assert_close(lesson.attention(q, k, tiny), tiny[:, :, :40], rtol=0, atol=2.0**-24)
    far = torch.full_like(q, 250.0)  # no exponential of such a score exists
    for sign in (1, -1):
        same = lesson.attention(far, torch.full_like(k, sign * 250.0), v)
        want = v.mean(2, keepdim=True).expand_as(same)
        torch.testing.assert_close(same, want, rtol=0, atol=0.002)


def test_autograd_sees_the_write(lesson, device):
    q, k, v = inputs(1, 1, 1, 5, 5, 16, F16, device)
    w, out = torch.ones_like(q, requires_grad=True), torch.ones_like(q)
    loss = (w * out).sum()
    lesson.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        assert not lesson.attention(w, k, v).requires_grad
    with torch.inference_mode():
        assert_right(lesson, q, k, v)


def test_inputs_may_be_one_tensor(lesson, device, kernel):
    x = normals((1, 2, 70, 128), "contiguous", F16, device, 0)
    before = x.clone()
    assert_right(lesson, x, x, x, True)
    assert torch.equal(x, before)


def test_copies_only_where_they_must_be(lesson, device):
    for layout in LAYOUTS:
        x = normals((2, 3, 5, 24), layout, F16, device, 0)
        copied = lesson.suited(x).data_ptr() != x.data_ptr()
        assert copied == (layout in ("sliced", "offset", "expanded"))
        assert torch.equal(lesson.suited(x), x)


def refusals(x):
    """Arguments, options and what must be said, for a float16 tensor of (2, 4, 6, 16)."""
    yield (x.tolist(), x, x), {}, TypeError, "q is a list, not a torch.Tensor"
    yield (x, None, x), {}, TypeError, "k is a NoneType, not a torch.Tensor"
    for dtype in (torch.float32, torch.float64, torch.int8, torch.complex64):
        yield (x.to(dtype),) * 3, {}, TypeError, f"q has {dtype}; all need one dtype of"
        yield (x, x, x.to(dtype)), {}, TypeError, f"v has {dtype}; all need one dtype of"
    yield (x, x, x), {"out": x.float()}, TypeError, "out has torch.float32; all need"
    yield (x, x.to("meta"), x), {}, ValueError, "k is on meta; all need one cuda device"
    yield (x.to_sparse(), x, x), {}, ValueError, "q is sparse or a negated view"
    yield (x, torch._neg_view(x), x), {}, ValueError, "k is sparse or a negated view"
    for wrong in (x[0], x[None], x.repeat(1, 1, 1, 17)):
        yield (wrong, x, x), {}, ValueError, f"q has {wrong.shape}: not 4 sizes, D to 256"
    for k, v in ((x[..., :8], x), (x, x[:, :, :5]), (x[:1], x[:1]), (x[..., :8], x[..., :8])):
        yield (x, k, v), {}, ValueError, f"q, k, v have {x.shape}, {k.shape}, {v.shape}"
    for heads in (3, 0):
        k = x[:, :heads]
        yield (x, k, k), {}, ValueError, f"q has 4 heads, not a multiple of {heads}"
    wide = x[:1, :1, :1].expand(2**16, 2**8, 2**7, 16)
    yield (
        (wide, x[:1, :1].expand(2**16, 1, 6, 16), x[:1, :1].expand(2**16, 1, 6, 16)),
        {},
        ValueError,
        f"q has {wide.shape}: 2**31 rows",
    )
    for scale in (0, -1, 1e-30, math.nan, math.inf, 1e20):
        yield (x, x, x), {"scale": scale}, ValueError, f"scale is {scale}, not between"
    for scale in (True, "1", torch.tensor(0.5)):
        message = f"causal=False, scale={scale!r}: a bool, a number"
        yield (x, x, x), {"scale": scale}, TypeError, message
    for causal in (1, None, torch.ones(2)):
        yield (x, x, x), {"causal": causal}, TypeError, f"causal={causal!r}, scale=None: a bool"
    leaf = x.clone().requires_grad_()
    yield (leaf, x, x), {}, ValueError, "q requires a gradient; pass q.detach()"
    yield (x, x, x), {"out": x[:, :, :5]}, ValueError, f"out has {x[:, :, :5].shape}, q has"
    yield (x, x, x), {"out": x[:1].expand_as(x)}, ValueError, "out may overlap itself"
    yield (x, x, x), {"out": x}, ValueError, "out lies among the bytes of q; copy q"


def test_refusals(lesson, device):
    x = torch.randn(2, 4, 6, 16, device=device).to(F16)
    for arguments, options, error, message in refusals(x):
        call = functools.partial(lesson.attention, **options)
        assert_refused(call, arguments, error, message, x)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_long_sequences_on_cuda(lesson, device, kernel, dtype):
    """Many tiles for each program, and lengths that fill none."""
    for (M, N, D), causal in itertools.product([(2048, 4096, 128), (3001, 2999, 64)], (0, 1)):
        assert_right(lesson, *inputs(2, 8, 2, M, N, D, dtype, device), bool(causal))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_it_can_be_captured(lesson, device, kernel):
    q, k, v = inputs(1, 2, 2, 200, 200, 128, F16, device)
    out = lesson.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lesson.attention(q, k, v, out=out)
    q.normal_()
    graph.replay()
    assert_close(lesson, out, q, k, v)


def test_large_scores(lesson, device, kernel):
    """Weights add up to 1, though the maximum, once rounded, is off by units."""
    q = torch.full((1, 1, 4, 128), -250.0, dtype=F16, device=device)
    scale = 2**26.99 / (128 * 250**2)
    assert (lesson.attention(q, -q, torch.ones_like(q), scale=scale) == 1).all()


def test_each_tile_where_rows_see_no_key(lesson, device):
    """The first key that needs a mask is then before the first: no key counts there."""
    for BM, BN in ((128, 32), (128, 64), (64, 64), (32, 64)):
        q, k, v = inputs(1, 1, 1, 200, 90, 64, F16, device)
        out = lesson.launch(q, k, v, torch.full_like(q, math.nan), True, tile=(BM, BN, 4, 1))
        assert_close(lesson, out, q, k, v, True)


def test_what_a_descriptor_can_hold(lesson, device):
    check_held(lesson.suited, device)


@pytest.mark.parametrize(
    "major, kib, hip, want",
    [
        (9, 227, None, (True, True)),
        (10, 227, None, (False, True)),
        (12, 99, None, (False, False)),
        (8, 163, None, (False, False)),
        (8, 227, None, (False, False)),
        (9, 64, "6.4", (False, False)),
        (9, 227, "6.4", (False, False)),
    ],
)
def test_traits(lesson, monkeypatch, major, kib, hip, want):
    gpu = type("Gpu", (), {"major": major, "multi_processor_count": 7})
    gpu.shared_memory_per_block_optin = kib << 10
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    hopper, sms, large = lesson.traits.__wrapped__(torch.device("cuda"))
    assert (hopper, large, sms) == (*want, 7)


def test_the_longest(lesson, device):
    x = torch.zeros(1, 1, 1, 1, dtype=F16, device=device).expand(1, 1, 2**31 - 511, 1)
    with pytest.raises(ValueError, match="q has"):
        lesson.attention(x, x, x)
