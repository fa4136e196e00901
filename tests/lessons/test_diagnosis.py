"""diagnosis: each fault shows its symptom, each tool sees it, and each repair removes it."""

import math
import re
import sys

import lesson_code
import pytest
from alone import run_alone
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

F16, F32 = torch.float16, torch.float32
SCRIPT = lesson_code.find()["diagnosis"]
CHECKER = lesson_code.EXAMPLES / "tools" / "triton_memcheck.py"
SMALL = 16, 16, 16, 4, 1


def window(rows, cols, dtype, device, around):
    room = torch.full((rows + 16, cols + 16), around, device=device).to(dtype)
    return room[8 : rows + 8, 8 : cols + 8]


def assert_right(lesson, kernel, M, N, K, device, tile=SMALL):
    """``c += a @ b`` on windows in NaN, and nothing around ``c``."""
    seeded = torch.Generator().manual_seed(M + 100 * N + 10_000 * K)
    a, b, c = (
        window(*shape, dtype, device, math.nan).copy_(torch.randn(shape, generator=seeded))
        for shape, dtype in [((M, K), F16), ((K, N), F16), ((M, N), F32)]
    )
    exact = c.double() + a.double() @ b.double()
    assert lesson.accumulate_ref(a, b, c).equal(exact)
    sums = c.double().abs() + a.double().abs() @ b.double().abs()
    lesson.launch(kernel, a, b, c, tile)
    assert bool(((c - exact).abs() <= (K + 1) * 2**-23 * sums).all())
    assert c._base.isnan().sum() == c._base.numel() - M * N


@pytest.fixture(scope="module")
def repaired(lesson):
    """The kernel after 0, 1, 2 and 3 repairs."""
    return [lesson.repaired(count) for count in range(4)]


SHAPES = [(0, 5, 3), (5, 0, 3), (5, 7, 0), (1, 1, 1), (1, 257, 3), (257, 1, 3)]
SHAPES += [(3, 5, 257), (15, 16, 17), (16, 17, 15), (17, 15, 16), (16, 16, 16)]


@pytest.mark.parametrize("M, N, K", SHAPES)
def test_sizes(lesson, repaired, device, M, N, K):
    assert_right(lesson, repaired[3], M, N, K, device)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 70)] * 3),
    tile=st.sampled_from([SMALL, (16, 64, 32, 4, 2), (64, 16, 32, 2, 1)]),
)
@example((33, 65, 40), (64, 16, 32, 2, 1))
def test_any_sizes_and_tiles(lesson, repaired, device, sizes, tile):
    assert_right(lesson, repaired[3], *sizes, device, tile)


@pytest.mark.parametrize("tile", ["TILES", "SPEED"])
def test_the_tiles_of_the_lesson(lesson, repaired, device, tile):
    tiles = lesson.TILES if tile == "TILES" else [t for i, t in lesson.SPEED.values() if i == 3]
    for tile in tiles:
        assert_right(lesson, repaired[3], 130, 257, 70, device, tile)


def test_special_values(lesson, repaired, device):
    """Infinities and NaN reach their row or column, and no other result."""
    a = torch.ones(40, 40, device=device, dtype=F16)
    b, c = a.clone(), torch.ones(40, 40, device=device)
    a[3, 39], b[0, 36], a[35, 5], c[7, 8] = math.nan, math.inf, -math.inf, -0.0
    a[20] = 2**-24  # denormal
    exact = lesson.accumulate_ref(a, b, c).float()
    lesson.launch(repaired[3], a, b, c, SMALL)
    assert torch.equal(c.isnan(), exact.isnan())
    torch.testing.assert_close(c, exact, rtol=1e-6, atol=0, equal_nan=True)


def test_every_repair_changes_one_place(lesson):
    text = lesson.source(0)
    for old, new in lesson.REPAIRS:
        assert text.count(old) == 1 and text.count(new) == 0


@pytest.mark.parametrize("around", [math.nan, 0])
def test_what_a_square_hides(lesson, repaired, device, around):
    """Symptoms after 0, 1 and 2 repairs: how many are wrong, how many changed around."""

    def symptoms(*sizes):
        return [lesson.check(kernel, *sizes, around)[0] for kernel in repaired[:3]]

    assert symptoms(32, 32, 32) == [(0, 0)] * 3
    (wrong, _), *good = symptoms(24, 56, 32)
    assert 700 < wrong <= 24 * 32 and good == [(0, 0)] * 2
    tail = 32 * 32 if math.isnan(around) else 0
    assert symptoms(32, 32, 40) == [(tail, 0)] * 2 + [(0, 0)]
    first, second, third = symptoms(24, 56, 40)
    assert first[0] > 700 and third == (0, 0)
    assert second == (24 * 56 if math.isnan(around) else 0, 0)


def test_the_checker_is_silent_after_two_repairs(lesson, repaired, device):
    if device != "cpu":
        pytest.skip("it works in the interpreter")
    sys.path.insert(0, str(CHECKER.parent))
    try:
        from triton_memcheck import MemcheckError, memcheck
    finally:
        sys.path.pop(0)
    for kernel, tensors in zip(repaired, ["abc", "ab", "", ""]):
        found = set()
        try:
            with memcheck():
                lesson.check(kernel, 24, 56, 40)
        except MemcheckError as error:
            found = {problem.tensor[0] for problem in error.problems}
        assert found == set(tensors)


@pytest.mark.parametrize("restored", [[], ["c_ptr"]])
def test_a_tuner_launches_too(lesson, repaired, device, restored):
    kernel = lesson.tuned(repaired[2], restore_value=restored)
    a, b = torch.ones(2, 128, 128, device=device, dtype=F16)
    c = torch.zeros(128, 128, device=device)
    counts = []
    for _ in range(3):
        kernel[lambda meta: (128 // meta["BLOCK_N"], 128 // meta["BLOCK_M"])](
            a, b, c, 128, 128, 128, 128, 128, 128
        )
        counts += (c / 128).unique().tolist()
    first = counts[0]
    assert counts == [first, first + 1, first + 2]
    assert first == 1 if restored else first > len(lesson.TILES)


def test_the_error_of_a_narrow_sum_grows(lesson, repaired, device):
    errors = [
        [lesson.check(kernel, 64, 64, K, tile=lesson.TILES[0])[1] for K in (64, 1024)]
        for kernel in repaired[2:]
    ]
    (narrow_64, narrow_1024), (wide_64, wide_1024) = errors
    assert narrow_1024 > 2 * narrow_64 > 1e-4
    assert max(wide_64, wide_1024) < 1e-5  # Tensor Cores cut digits off


def test_row_sum(lesson, device):
    x = torch.randn(7, 1024, device=device).half()
    out = torch.full((9,), math.nan, device=device)
    lesson.row_sum_kernel[(7,)](x, out[1:8], 1024)
    torch.testing.assert_close(out[1:8].double(), x.double().sum(1), rtol=0, atol=1e-4)
    assert bool(out[[0, 8]].isnan().all())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where kernels that were compiled once are found again."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("arch, mma", [(90, "wgmma.mma_async"), (80, "mma.sync")])
def test_what_the_page_reads(lesson, device, arch, mma, cache, capsys, monkeypatch):
    """Compiled without a GPU, as the lesson does it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    found = lesson.reports(arch)
    assert capsys.readouterr().out.strip() == ""
    assert set(found) == {"row", *lesson.SPEED}
    row = found["row"]
    assert len(re.findall("ld.global.v4.b32", row["ptx"])) == 1
    assert len(re.findall("cvt.f32.f16", row["ptx"])) == 8
    assert len(re.findall("shfl.sync", row["ptx"])) == 7
    for name, kind in ("triton:found", "f16"), ("triton:exact", "f32"):
        asm = found[name]
        assert set(re.findall(r"dot.*->.(tensor<\w+)", asm["ttgir"])) == {f"tensor<128x256x{kind}"}
        instructions = set(re.findall(r"(?:wgmma.mma|mma.sync)\S+", asm["ptx"]))
        assert instructions and all(i.startswith(mma) for i in instructions)
        assert {"f32" in i for i in instructions} == {kind == "f32"}

    def spills(name):
        loops = [text for _, text in re.findall(lesson.LOOP, found[name]["sass"])]
        [loop] = [text for text in loops if "MMA" in text]
        return len(re.findall(lesson.SPILL, loop))

    assert spills("triton:exact") > 100
    assert spills("triton:small") == spills("triton") == 0


def test_the_type_of_the_sum_on_blackwell(lesson, cache, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    monkeypatch.setattr(lesson, "SPEED", {"triton": (3, lesson.TILES[0])})
    monkeypatch.setattr(lesson, "built", lesson.reports(100), raising=False)
    lesson.read("triton", lesson.TYPES)
    stages = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert [(stage, int(n) > 0) for stage, n, *_ in stages] == [
        ("ttgir", True),
        ("ptx", True),
        ("sass", True),
    ]
    assert stages[0][-1] == "64x64xf32" and stages[1][-1].startswith("tcgen05.mma")


def test_what_was_not_compiled_is_said(lesson, capsys, monkeypatch):
    code = "raise OSError('no ptxas')" + lesson.COMPILE
    monkeypatch.setattr(lesson, "COMPILE", code)
    monkeypatch.setattr(lesson, "built", lesson.reports(90), raising=False)
    lesson.read("row", "ttir:tt.load sass:LDG")
    assert capsys.readouterr().out == "Left out, asm: ['OSError: no ptxas']\n"


def test_without_a_disassembler(lesson, cache, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    code = lesson.COMPILE.replace("{triton.knobs.nvidia.nvdisasm.path}", "/none/nvdisasm")
    monkeypatch.setattr(lesson, "COMPILE", code)
    monkeypatch.setattr(lesson, "SPEED", {})
    monkeypatch.setattr(lesson, "built", lesson.reports(90), raising=False)
    lesson.read("row", "ttir:tt.load sass:LDG")
    said = "Left out, no SASS of row: CalledProcessError\n\nttir   1 x tt.load\n"
    assert capsys.readouterr().out == said


def test_what_it_prints_with_the_checker(tmp_path, cache):
    (tmp_path / CHECKER.name).write_bytes(CHECKER.read_bytes())
    said = run_alone("diagnosis", tmp_path, TRITON_CACHE_DIR=cache)
    reports = re.split(r"^\d repairs:$", said, flags=re.M)[1:]
    lines = [re.findall(r"^case\.py:\d+: (\w+ of \w+) out of bounds", r, re.M) for r in reports]
    loads = ["load of a_ptr", "load of b_ptr"]
    assert lines == [[*loads, "load of c_ptr", "store of c_ptr"], loads, []]
    assert "three calls added [4.0, 1.0, 1.0] products" in said
    assert "three calls added [1.0, 1.0, 1.0] products" in said
    assert not re.search(r"Error|Traceback|/tmp|/home|/root|0x", said)
