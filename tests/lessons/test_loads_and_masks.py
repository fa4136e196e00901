"""loads_and_masks: addresses, edges, neutral elements, whole vectors, interpreted and on CUDA."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64]
SIZES = [0, 1, 2, 15, 16, 17, 511, 512, 513, 1003, 1008, 1023, 1024, 1025, 2047, 2048, 2049, 4099]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64])
def test_addresses_count_elements(lesson, device, dtype):
    x = torch.zeros(64, dtype=dtype, device=device)[3:]
    seen = torch.full((16, 4), -1, dtype=torch.int64, device=device)
    lesson.address_kernel[(2,)](x, seen, 13, 8)
    offs = torch.arange(16, device=device)
    address = x.data_ptr() + offs * x.element_size()
    expected = [offs % 8, offs, address, (offs < 13).long()]
    assert torch.equal(seen, torch.stack(expected, dim=1))


@pytest.mark.parametrize("n_load", [0, 1, 13, 16])
@pytest.mark.parametrize("n_store", [0, 1, 13, 16])
def test_nothing_moves_beyond_the_masks(lesson, device, n_load, n_store):
    x = torch.arange(1.0, 17.0, device=device)
    room = torch.full((24,), 7.0, device=device)
    lesson.window_kernel[(1,)](x, room[4:20], n_load, n_store)
    both = min(n_load, n_store)
    assert torch.equal(room[4 : 4 + both], x[:both])
    assert (room[:4] == 7).all() and (room[4 + n_store :] == 7).all()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 1024), centre=st.sampled_from([-40.0, -4.0, 0.0, 4.0]))
@example(n=1024, centre=4.0)
@example(n=1, centre=-40.0)
def test_each_operation_has_its_neutral_element(lesson, device, n, centre):
    x = torch.randn(n, device=device) + centre
    got = torch.full((2, 3), math.nan, device=device)
    for row, other in zip(got, (0.0, -math.inf)):
        lesson.summary_kernel[(1,)](x, row, n, other, 1024)
    total = x.double().sum().item()
    assert got[0, 0].item() == pytest.approx(total, rel=1e-5, abs=1e-5 * x.abs().sum().item())
    assert got[1, 1].item() == x.max().item()
    assert got[1, 2].item() == pytest.approx(1.0, rel=1e-5)


def assert_doubles(lesson, x, start=0):
    """Into a poisoned view, and nowhere else, by both kernels that are always right."""
    n, block = x.numel(), 2048 // x.itemsize
    for kernel in (lesson.twice_kernel, lesson.twice_full_kernel):
        room = torch.full((start + n + 24,), math.nan, dtype=x.dtype, device=x.device)
        out = room[start : start + n]
        kernel[(n // block + 1,)](x, out, n, block)
        assert torch.equal(out, (2 * x.double()).to(x.dtype))
        assert room[:start].isnan().all() and room[start + n :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sizes(lesson, device, n, dtype):
    assert_doubles(lesson, torch.randn(n, dtype=torch.float64).to(dtype).to(device), start=16)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 4200), starts=st.tuples(*[st.integers(0, 17)] * 2))
def test_views_that_start_anywhere(lesson, device, n, starts):
    x = torch.randn(n + starts[0], device=device)[starts[0] :]
    assert_doubles(lesson, x, starts[1])


def test_a_true_promise_is_kept(lesson, device):
    """The false one is the lesson's own; the interpreter does not see it."""
    x = torch.randn(1008, dtype=torch.float16, device=device)
    room = torch.full((1024,), 7.0, dtype=torch.float16, device=device)
    lesson.twice_promised_kernel[(2,)](x, room, 1008, 512, num_warps=2)
    assert torch.equal(room[:1008], 2 * x) and (room[1008:] == 7).all()


@pytest.mark.gpu
def test_long_vectors_on_cuda(lesson, device):
    n = 2**31 + 3
    if torch.cuda.mem_get_info()[0] < 6 * n:
        pytest.skip(f"{6 * n / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.ones(n, dtype=torch.float16, device=device)
    for kernel in (lesson.twice_kernel, lesson.twice_full_kernel):
        out = torch.full_like(x, math.nan)
        kernel[(n // 1024 + 1,)](x, out, n, 1024)
        assert all((part == 2).all() for part in out.split(2**26))
