"""measuring: its kernel against the closed form in float64, interpreted and on CUDA."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SIZES = [0, 1, 2, 255, 256, 257, 997, 1008, 1023, 1024, 1025, 4093]
STEPS = [0, 1, 2, 3, 64, 65, 999]
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10}
OWN = 24  # elements of the surroundings on each side


def assert_chains(lesson, x, k, start=OWN, **options):
    """Into a poisoned view, and nowhere else; the input stays as it is."""
    a, b = lesson.A.value, lesson.B.value
    assert a + b == 1  # so the fixed point is 1
    exact = a**k * x.double() + (1 - a**k)
    # Two roundings a step, older errors shrink by a; storing rounds once more.
    largest = x.double().abs().clamp(min=1)
    allowed = min(k, 1024) * 2.0**-23 * largest + (k > 0) * EPS[x.dtype] / 2 * largest
    before, n = x.clone(), x.numel()
    for poison in (math.nan, -7.0):
        room = torch.full((start + n + OWN,), poison, dtype=x.dtype, device=x.device)
        out = room[start : start + n].view(x.shape)
        assert lesson.chain(x, k, out, **options) is out
        assert bool(((out.double() - exact).abs() <= allowed).all())
        around = torch.cat([room[:start], room[start + n :]])
        assert bool((around.isnan() if math.isnan(poison) else around == poison).all())
    fresh = lesson.chain(x, k, **options)
    assert (fresh.shape, fresh.dtype, fresh.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(fresh, out) and torch.equal(x, before)


def normals(n, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("k", STEPS)
def test_sizes_and_steps(lesson, device, k, dtype):
    for n in SIZES if k < 100 else SIZES[-3:]:
        assert_chains(lesson, normals(n, dtype, device), k)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 2500),
    k=st.integers(0, 9),
    starts=st.tuples(*[st.integers(0, OWN)] * 2),
    block=st.sampled_from([16, 64, 256, 4096]),
    dtype=st.sampled_from(list(EPS)),
)
@example(n=1003, k=1, starts=(1, 0), block=256, dtype=torch.float16)
def test_views_and_blocks(lesson, device, n, k, starts, block, dtype):
    x = normals(n + starts[0], dtype, device)[starts[0] :]
    assert_chains(lesson, x, k, starts[1], block=block, num_warps=1)


def test_shapes_and_in_place(lesson, device):
    for shape in [(), (1, 1), (17, 59), (2, 3, 5, 7), (0, 4)]:
        assert_chains(lesson, normals(math.prod(shape), torch.float32, device).view(shape), 2)
    x = normals(1003, torch.float32, device)
    expected = lesson.chain(x, 5)
    assert lesson.chain(x, 5, out=x) is x and torch.equal(x, expected)


def test_no_step_copies_every_bit(lesson, device):
    special = [0.0, -0.0, math.inf, -math.inf, 1e-45, 3.4e38, 1.0]
    x = torch.tensor(special, device=device)
    assert torch.equal(lesson.chain(x, 0).view(torch.int32), x.view(torch.int32))


def test_values_stay_finite(lesson, device):
    x = torch.tensor([3e38, -3e38, 0.0, 1.0], device=device)
    assert bool(lesson.chain(x, 999).isfinite().all())
    assert lesson.chain(x, 999)[3] == 1


def test_reference(lesson, device):
    """The closed form is what the steps give."""
    x = stepped = normals(101, torch.float32, device).double()
    for k in range(8):
        torch.testing.assert_close(lesson.chain_ref(x, k), stepped, rtol=0, atol=1e-14)
        stepped = stepped * lesson.A.value + lesson.B.value


def test_overlap_in_part_is_refused(lesson, device):
    room = normals(200, torch.float32, device)
    before = room.clone()
    for x, out in ((room[:100], room[1:101]), (room[99:199], room[:100])):
        with pytest.raises(ValueError, match="^out overlaps x in part$"):
            lesson.chain(x, 1, out)
        assert torch.equal(room, before)
    expected = lesson.chain(room[:100].clone(), 1)
    assert torch.equal(lesson.chain(room[:100], 1, room[100:]), expected)


def refusals(x):
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        yield (x.to(dtype), 1), TypeError, f"x: {dtype}, not float32 or float16"
    yield (x, 1, x.half()), TypeError, "out: torch.float16, not float32 or float16 like x"
    for k in (-1, 1.0, True, None):
        yield (x, k), ValueError, f"k is {k!r}, not an int >= 0"
    for out in (x[:16], x.view(-1), x.t(), x.to("meta"), x.clone().requires_grad_()):
        yield (x, 1, out), ValueError, "out must be contiguous, on "
    for wrong in (x.t(), x[:, 1:], x.to("meta"), x.clone().requires_grad_()):
        yield (wrong, 1), ValueError, "x must be contiguous, on "


def test_refusals(lesson, device):
    x = normals(1003, torch.float32, device).view(17, 59)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.chain, arguments, error, message, x)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2**26 + 3, 2**31 + 3])
def test_long_vectors_on_cuda(lesson, device, n):
    """Offsets beyond 32 bits are right, to the last element."""
    if torch.cuda.mem_get_info()[0] < 5 * n:
        pytest.skip(f"{5 * n / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.full((n,), 3.0, dtype=torch.float16, device=device)
    out = lesson.chain(x, 1, out=torch.full_like(x, math.nan))
    assert bool((out == out[0]).all()) and out[0] == 3 - 2**-9  # (3 - 1) * B less
