"""copy: every bit, every refusal, the verdicts on machines made up, and the multiply-adds."""

import math
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

BLOCK = 2048
SIZES = [0, 1, 2, 3, 4, 7, 8, 15, 16, 997, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8, 98_432]
EVERY = [getattr(torch, name) for name in dir(torch)]
DTYPES = sorted({d for d in EVERY if isinstance(d, torch.dtype)}, key=str)
DTYPES = [d for d in DTYPES if not str(d).startswith("torch.q")]  # quantized: no plain tensors


def noise(size, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


def assert_copies(lesson, size, start=0, target=0, device="cpu"):
    """Bytes from one place of a buffer to one of another, and nothing around them."""
    source = noise(size + 64, device)
    before = source.clone()
    room = ~noise(size + 64, device, seed=1)
    expected = room.clone()
    expected[target : target + size] = source[start : start + size]
    out = room[target : target + size]
    assert lesson.copy(source[start : start + size], out=out) is out
    assert torch.equal(room, expected) and torch.equal(source, before)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(lesson, device, size):
    assert lesson.BLOCK_BYTES == BLOCK
    assert_copies(lesson, size, device=device)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 9000), start=st.integers(0, 32), target=st.integers(0, 32))
@example(size=4096, start=4, target=4)
@example(size=4096, start=8, target=2)
@example(size=4100, start=0, target=0)
def test_any_address(lesson, device, size, start, target):
    """Words of 1, 2, 4 and 8 bytes, as addresses and length allow."""
    assert_copies(lesson, size, start, target, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(lesson, device, dtype):
    x = noise(3 * 5 * dtype.itemsize, device).view(dtype).view(3, 5)
    got = lesson.copy(x)
    assert (got.shape, got.dtype, got.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(got.view(torch.uint8), x.view(torch.uint8))
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(), (1, 1), (17, 59), (2, 3, 5, 7), (0, 4), (3, 0, 2)], ids=str)
def test_shapes(lesson, device, shape):
    x = torch.arange(math.prod(shape), device=device).view(shape)
    assert torch.equal(lesson.copy(x), lesson.copy_ref(x)) and lesson.copy(x).shape == x.shape


def test_onto_itself_and_its_neighbour(lesson, device):
    pair = torch.arange(2 * 1003, device=device).view(2, 1003)
    before = pair.clone()
    assert lesson.copy(pair[0], out=pair[0]).data_ptr() == pair.data_ptr()
    assert torch.equal(pair, before)
    lesson.copy(pair[0], out=pair[1])
    assert torch.equal(pair, before[:1].expand(2, -1))


def refusals(x):
    leaf, flat = x.clone().requires_grad_(), x.reshape(-1)
    lazy = torch.ones(3, dtype=torch.complex64, device=x.device).conj()
    yield (x, [0.0]), TypeError, "out is a list, not a tensor"
    yield ([0.0], x), TypeError, "x is a list, not a tensor"
    yield (None,), TypeError, "empty_like"
    yield (x, x.double()), ValueError, "out differs from x in shape, dtype or device"
    yield (x, flat), ValueError, "out differs from x in shape"
    yield (x, x[:16]), ValueError, "out differs from x in shape"
    yield (x, x.to("meta")), ValueError, "out differs from x in shape"
    yield (x.to("meta"),), ValueError, "x is on meta; pass x.cuda()"
    yield (x.t(),), ValueError, "x is not contiguous; pass x.clone(memory_format="
    yield (x, x.t().contiguous().t()), ValueError, "out is not contiguous"
    yield (flat[::2], None), ValueError, "x is not contiguous"
    yield (x[:1].expand(17, 59),), ValueError, "x is not contiguous"
    yield (x.to_sparse(),), ValueError, "x is not contiguous"
    yield (lazy,), ValueError, "x is not contiguous"
    yield (lazy.imag,), ValueError, "x is not contiguous"
    yield (leaf,), ValueError, "x requires a gradient"
    yield (x, leaf), ValueError, "out requires a gradient"
    yield (flat[:500], flat[1:501]), ValueError, "out overlaps x in part"
    yield (flat[1:501], flat[:500]), ValueError, "out overlaps x in part"
    yield (flat[:500], flat[499:999]), ValueError, "out overlaps x in part"


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "conj", "neg"])
def test_the_repair_repairs(lesson, device, kind):
    """A plain clone would keep the order of a transposed tensor."""
    x = torch.arange(1003.0, device=device).view(17, 59)
    lazy = torch.complex(x, -x).conj()
    views = {"transposed": x.t(), "strided": x[::2, ::3], "expanded": x[:1].expand(17, 59)}
    x = (views | {"conj": lazy, "neg": lazy.imag})[kind]
    with pytest.raises(ValueError) as caught:
        lesson.copy(x)
    repaired = eval(str(caught.value).split("pass ")[1], {"torch": torch, "x": x})
    assert torch.equal(lesson.copy(repaired), x)


def test_refusals(lesson, device):
    x = torch.arange(1003.0, device=device).view(17, 59)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.copy, arguments, error, message, x)
    with torch.no_grad():
        assert torch.equal(lesson.copy(torch.nn.Parameter(x)), x)


HEALTHY = {
    "build": 13,
    "driver": 13,
    "capability": (9, 0),
    "cc": "/usr/bin/gcc",
    "current": "cuda:0",
    "tensors": {"x": "cuda:0"},
}
NO_GPU = {"capability": (0, 0), "current": "none", "tensors": {"x": "cpu"}}


@pytest.mark.parametrize(
    "change, fault, repair",
    [
        ({"build": 0} | NO_GPU, "PyTorch", "install its CUDA wheel"),
        ({"driver": 0} | NO_GPU, "driver", "install the driver"),
        ({"driver": 12} | NO_GPU, "driver age", "update the driver"),
        (NO_GPU, "a GPU", "see CUDA_VISIBLE_DEVICES"),
        ({"capability": (7, 5)}, "GPU age", "Triton supports 8.0 and later"),
        ({"cc": "none"}, "C compiler", "install gcc"),
        ({"tensors": {"x": "cpu"}}, "x", "pass x.cuda()"),
        ({"tensors": {"x": "cuda:1"}}, "x", "launch in torch.cuda.device_of(x)"),
        ({"tensors": {"x": "cuda:0", "y": "cuda:2"}}, "y", "launch in torch.cuda.device_of(y)"),
        ({"current": "cuda:1"}, "x", "launch in torch.cuda.device_of(x)"),
    ],
    ids=str,
)
def test_the_first_fault(lesson, change, fault, repair):
    rows = [row for row in lesson.diagnose(HEALTHY | change) if not row[2]]
    assert (rows[0][0], rows[0][3]) == (fault, repair)


@pytest.mark.parametrize("change", [{}, {"driver": 14}, {"capability": (12, 0)}, {"tensors": {}}])
def test_no_fault(lesson, change):
    assert all(row[2] for row in lesson.diagnose(HEALTHY | change))


class OldDriver:
    def __init__(self, name):
        assert name == "libcuda.so.1"

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = 12080


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("library, version", [(OldDriver, 12), (no_driver, 0)])
def test_look_without_a_gpu(lesson, monkeypatch, library, version):
    monkeypatch.setattr(lesson.ctypes, "CDLL", library)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    facts = lesson.look(x=torch.ones(3))
    assert facts.keys() == HEALTHY.keys() and list(facts) == list(HEALTHY)
    assert facts == {"build": 13, "driver": version, "cc": "none"} | NO_GPU
    monkeypatch.setenv("CC", sys.executable)
    assert lesson.look()["cc"] == sys.executable
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert lesson.look()["cc"] == "none"


def test_look_with_two_gpus(lesson, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    facts = lesson.look()
    assert (facts["capability"], facts["current"]) == ((7, 5), "cuda:1")


@pytest.mark.parametrize("n", [1, 1003, 1024, 1025])
@pytest.mark.parametrize("k", [0, 1, 5, 16, 17, 256])
def test_multiply_adds(lesson, device, n, k):
    x = torch.linspace(-2, 2, n, device=device)
    room = torch.full((n + 8,), math.nan, device=device)
    lesson.fma(x, room[:n], k)
    expected = x.double()
    for _ in range(k):
        expected = (1 - 2**-12) * expected + 2**-12
    torch.testing.assert_close(room[:n].double(), expected, atol=2e-7 * (k + 1), rtol=0)
    assert room[n:].isnan().all()


@pytest.mark.gpu
def test_a_clock_reads_microseconds(lesson, device):
    value, low, high = lesson.clock([lambda: torch.cuda._sleep(2_000_000)] * 3)
    assert 200 < low <= value <= high < 20_000
