"""programs: owners against a reference, tickets, what a kernel receives, who holds an element."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SIZES = [0, 1, 2, 7, 8, 9, 31, 37, 127, 128, 129, 1009]


def fresh(n, device):
    return torch.full((n,), -1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("block", [1, 8, 128])
@pytest.mark.parametrize("n", SIZES)
def test_owners(lesson, device, n, block):
    room = fresh(n + 300, device)
    out = room[3 : 3 + n]
    assert lesson.owners(out, block) is out
    assert torch.equal(out.cpu(), lesson.owners_ref(n, block))
    assert (room[:3] == -1).all() and (room[3 + n :] == -1).all()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 500), power=st.integers(0, 6), programs=st.integers(1, 40))
def test_a_grid_of_any_size(lesson, device, n, power, programs):
    """Too few programs leave the end alone, too many write nothing beyond."""
    block = 2**power
    room = fresh(n + 64, device)
    lesson.owners(room[:n], block, grid=(programs,))
    reached = min(n, programs * block)
    assert torch.equal(room[:reached].cpu(), lesson.owners_ref(reached, block))
    assert (room[reached:] == -1).all()


def test_refusals(lesson, device):
    vector = fresh(8, device)
    for out, error, message in [
        (vector.long(), TypeError, "out is not a tensor of torch.int32"),
        ([1, 2], TypeError, "out is not a tensor of torch.int32"),
        (vector.to_sparse(), ValueError, "out is not a contiguous vector"),
        (vector.view(2, 4), ValueError, "out is not a contiguous vector"),
        (vector[::2], ValueError, "out is not a contiguous vector"),
        (vector.to("meta"), ValueError, "out is on meta; pass out.cuda()"),
    ]:
        with pytest.raises(error) as caught:
            lesson.owners(out, 4)
        assert str(caught.value) == message


def test_a_view_arrives_as_an_address(lesson, device):
    x = torch.arange(12.0, device=device).view(3, 4)
    for view in (x[:2, :3], x.t()[:3, :2], x[1:, 1:]):
        room = torch.full((8,), torch.nan, device=device)
        lesson.receive_kernel[(1,)](view, room, 6, BLOCK=8, SHOW=False)
        start = view.storage_offset()
        assert torch.equal(room[:6], x.flatten()[start : start + 6])
        assert room[6:].isnan().all()


@pytest.mark.parametrize("programs", [1, 2, 37])
def test_tickets(lesson, device, programs):
    nano = 20_000 if device == "cuda" else 0
    begin, end, sm = lesson.tickets(programs, device, nano)
    every = torch.cat([begin, end]).sort().values
    assert torch.equal(every, torch.arange(2 * programs, dtype=torch.int32))
    assert (begin < end).all()
    if device == "cpu":  # one after another
        assert torch.equal(begin, 2 * torch.arange(programs)) and torch.equal(end, begin + 1)
        assert (sm == -1).all()
    else:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        assert (0 <= sm).all() and (sm < sms).all()


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 2, 4, 8, 32])
def test_threads_share_the_elements(lesson, device, warps):
    out = fresh(1024, device)
    lesson.thread_kernel[(1,)](out, 1024, num_warps=warps)
    threads, each = out.unique(return_counts=True)
    assert torch.equal(threads.cpu(), torch.arange(32 * warps, dtype=torch.int32))
    assert (each == 1024 // (32 * warps)).all()
