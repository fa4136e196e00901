"""Exercises: the starters of examples/exercises, and what their own check lets pass.

A solution, which no page shows, passes. So do not copies of it that are broken
in one place each, in ways that beginners and experts know.
"""

import ast
import importlib.util
import inspect
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from compile_only import Job, compile_kernels  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
STARTERS = ROOT / "examples" / "exercises"
SOLUTIONS = ROOT / "tests" / "exercises"
NAMES = sorted(path.stem for path in STARTERS.glob("*.py"))

HALF = ".to(tl.float16).to(tl.float32)"
# (what is wrong, what a correct solution says there, what the wrong one says)
BROKEN = {
    "cross_entropy": [
        ("masked logits are 0", 'other=float("-inf")', "other=0"),
        ("no shift: overflow", "tl.maximum(largest, tl.max(x) * LOG2E)", "tl.maximum(largest, 0.0)"),
        ("sums are not rescaled", "sums * tl.exp2(largest - base)", "sums"),
        ("shape used as stride", "row * stride_x", "row * V"),
        ("sums in half", "tl.sum(sums)", "tl.sum(sums.to(tl.float16)).to(tl.float32)"),
        ("NaN is skipped", "        largest = tl.max(x)", "        x = tl.where(x == x, x, -1e9)\n        largest = tl.max(x)"),
        ("ignored rows count", "target != -100", "target != -1"),
        ("a tail of -inf: -inf - -inf", 'base = tl.where(largest == float("-inf"), 0.0, largest)', "base = largest"),
        ("a tile of -inf: -inf - -inf", 'base = tl.where(new == float("-inf"), 0.0, new)', "base = new"),
        ("a tail is left out", "mask=full + cols < V", "mask=full + cols < V // 16 * 16"),
    ],
    "grouped_gemm": [
        ("writes rows of others", "mask=mask_m & mask_n)", "mask=mask_n)"),
        ("writes columns beyond N", "mask=mask_m & mask_n)", "mask=mask_m)"),
        ("no mask along K", "mask=(k < K - start)[None, :], other=0", "mask=(k < BLOCK_K)[None, :]"),
        ("too few programs", "BLOCK_M) + E", "BLOCK_M)"),
        ("too few programs along N", "triton.cdiv(N, BLOCK_N),)", "triton.cdiv(K, BLOCK_N),)"),
        ("room for 32 experts", "EXPERTS=triton.next_power_of_2(E)", "EXPERTS=min(32, triton.next_power_of_2(E))"),
        ("an expert's first tile is lost", "last <= tile_m", "last < tile_m"),
        ("shape used as stride", "* stride_we", "* N * K"),
        ("sums in half", "tl.dot(x, w, acc)", f"tl.dot(x, w, acc){HALF}"),
        ("NaN is skipped", "acc = tl.dot(", "x = tl.where(x == x, x, 0)\n            acc = tl.dot("),
    ],
    "int8_decode": [
        ("no mask along K", "mask=mask_b & (at < K)[None, :]", "mask=mask_b"),
        ("writes beyond N", "mask=mask_n & mask_b)", "mask=mask_b)"),
        ("writes beyond B", "mask=mask_n & mask_b)", "mask=mask_n)"),
        ("shape used as stride", "* stride_w\n", "* K\n"),
        ("sums in half", "x, w, acc)", f"x, w, acc){HALF}"),
        ("weights without a sign", " ^ 0x80)", ")"),
        ("one scale for all", "scale_ptr + rows", "scale_ptr + rows * 0"),
        ("NaN is skipped", "acc = tl.dot(", "x = tl.where(x == x, x, 0)\n        acc = tl.dot("),
    ],
    "paged_attention": [
        ("values without a mask", "mask=live[:, None], other=0)\n            s =", "mask=live[:, None] | True)\n            s ="),
        ("scores without a mask", 's = tl.where(live[None, :], s, float("-inf"))', "s = s * 1"),
        ("pages in a row", "page.to(tl.int64)", "(t // PAGE).to(tl.int64)"),
        ("heads interleaved", "heads = head * GROUP + g", "heads = g * tl.num_programs(1) + head"),
        ("shape used as stride", "slot * stride_ks", "slot * D"),
        ("values with the strides of keys", "slot * stride_vs", "slot * stride_ks"),
        ("pages of keys without a gap", "page * stride_kp", "page * PAGE * stride_ks"),
        ("pages of values without a gap", "page * stride_vp", "page * PAGE * stride_vs"),
        ("queries without a gap", "b.to(tl.int64) * stride_qb", "b * GROUP * tl.num_programs(1) * stride_qh"),
        ("outputs without a gap", "b.to(tl.int64) * stride_ob", "b * tl.num_programs(1) * stride_oh"),
        ("rows of the table without a gap", "table.stride(0)", "table.shape[1]"),
        ("no shift: overflow", "tl.maximum(largest, tl.max(s, 1))", "tl.maximum(largest, 0.0)"),
        ("sums are not rescaled", "total * shrink", "total"),
        ("sums in half", 'ieee")\n            largest', f'ieee"){HALF}\n            largest'),
        ("parts weigh the same", "tl.exp(logs - largest)", "tl.where(live, 1.0, 0.0)"),
        ("empty sequences are NaN", "tl.where(length > 0, tl.sum(weight), 1.0)", "tl.sum(weight)"),
        ("NaN is skipped", "s = tl.where(live", "s = tl.where(s == s, s, 0)\n            s = tl.where(live"),
    ],
    "rotary": [
        ("read after written", "b * cos + a * sin", "b * cos + tl.load(x_ptr + cols, mask=mask) * sin"),
        ("no mask for heads", "mask = (heads < H) & (cols < HALF)", "mask = (heads < H + 1) & (cols < HALF)"),
        ("no mask for columns", "mask = (heads < H) & (cols < HALF)", "mask = (heads < H) & (cols < BLOCK)"),
        ("a stride of the other tensor", "token * stride_ot", "token * stride_xt"),
        ("outputs without a gap", "token * stride_ot", "token * H * stride_oh"),
        ("turned the other way", "a * cos - b * sin", "a * cos + b * sin"),
        ("neighbours are pairs", "a = tl.load(x_ptr + cols", "a = tl.load(x_ptr + 2 * cols"),
        ("the rest is forgotten", "if REST:", "if REST > BLOCK:"),
        ("position is the row", "tl.load(position_ptr + token)", "token"),
        ("angles in half", "tl.load(cos_ptr + angle, mask=cols < HALF)", f"tl.load(cos_ptr + angle, mask=cols < HALF){HALF}"),
        ("NaN is skipped", "    if REST:", "    a = tl.where(a == a, a, 0)\n    if REST:"),
    ],
    "swiglu_backward": [
        ("up without a mask", "dh * gate * s, mask=mask)", "dh * gate * s)"),
        ("gate without a mask", "(1 + gate * (1 - s)), mask=mask)", "(1 + gate * (1 - s)))"),
        ("a stride of the other tensor", "row * stride_dx", "row * stride_x"),
        ("shape used as stride", "row * stride_dh", "row * N"),
        ("sigmoid in half", "(1 + tl.exp(-gate))\n", f"(1 + tl.exp(-gate))\n    s = s{HALF}\n"),
        ("overflow", "1 / (1 + tl.exp(-gate))", "tl.exp(gate) / (1 + tl.exp(gate))"),
        ("NaN is skipped", "    s = ", "    gate = tl.where(gate == gate, gate, 0)\n    s = "),
        ("up's gradient is gate's", "dh * gate * s, mask", "dh * up * s, mask"),
    ],
}  # fmt: skip


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(name: str, solution: Path) -> None:
    """The starter's check with the function of that file; exits where it is wrong."""
    starter, ours = load(STARTERS / f"{name}.py"), load(solution)
    function = getattr(ours, name)
    names = list(inspect.signature(getattr(starter, name)).parameters)
    assert list(inspect.signature(function).parameters)[: len(names)] == names
    setattr(starter, name, function)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of inf and NaN
        starter.check()


@pytest.fixture(params=NAMES)
def name(request, device):
    return request.param


def test_every_exercise_has_a_solution_and_is_tried():
    assert NAMES == sorted(path.stem for path in SOLUTIONS.glob("*.py")) == sorted(BROKEN)
    assert len(NAMES) == 6


def test_a_solution_passes(name, capsys):
    check(name, SOLUTIONS / f"{name}.py")
    assert capsys.readouterr().out.startswith("All values are right.\n")


@pytest.mark.parametrize(
    "name, what, right, wrong",
    [(name, *case) for name, cases in BROKEN.items() for case in cases],
    ids=[f"{name}: {case[0]}" for name, cases in BROKEN.items() for case in cases],
)
def test_a_broken_solution_is_caught(device, name, what, right, wrong, tmp_path):
    text = (SOLUTIONS / f"{name}.py").read_text("utf-8")
    assert right in text, "the solution was changed: break it in another way"
    broken = tmp_path / f"{name}.py"
    broken.write_text(text.replace(right, wrong), "utf-8")
    with pytest.raises(SystemExit) as caught:
        check(name, broken)
    assert " wrong; at (" in caught.value.code or "overwritten" in caught.value.code


def test_an_unfilled_starter_says_so(name):
    with pytest.raises(NotImplementedError, match=f"^{name} is yours to write$"):
        runpy.run_path(str(STARTERS / f"{name}.py"), run_name="__main__")


def test_a_starter_runs_alone_and_ends_with_its_message(tmp_path):
    name = NAMES[0]
    (tmp_path / f"{name}.py").write_bytes((STARTERS / f"{name}.py").read_bytes())
    child = subprocess.run(
        [sys.executable, "-I", f"{name}.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert child.returncode == 1
    assert child.stderr.endswith(f"\nNotImplementedError: {name} is yours to write\n")


def test_starters_are_short_and_share_their_tools():
    tools = {}
    for name in NAMES:
        starter = load(STARTERS / f"{name}.py")
        text = (STARTERS / f"{name}.py").read_text("utf-8")
        assert text.count("\n") <= 123
        assert starter.__doc__.startswith("Project ") and "\nRoof: " in starter.__doc__
        for tool in (starter.window, starter.judge, starter.rate):
            tools.setdefault(tool.__name__, set()).add(inspect.getsource(tool))
    assert {tool: len(texts) for tool, texts in tools.items()} == dict(window=1, judge=1, rate=1)


def test_the_page_shows_what_a_check_says(device, tmp_path):
    name, (_, right, wrong) = "swiglu_backward", BROKEN["swiglu_backward"][0]
    broken = tmp_path / f"{name}.py"
    broken.write_text((SOLUTIONS / broken.name).read_text("utf-8").replace(right, wrong), "utf-8")
    with pytest.raises(SystemExit) as caught:
        check(name, broken)
    page = (ROOT / "docs" / "concepts" / "practice-ladder.md").read_text("utf-8")
    assert f"```text\n{caught.value.code}\n```" in page


SIZE = "i32:16"
JOBS = {  # (exercise, kernel): arguments, constants, warps and stages, of the large case
    ("cross_entropy", "cross_entropy_kernel"): (
        {"x_ptr": "*fp16:16", "target_ptr": "*i64:16", "loss_ptr": "*fp32:16"},
        "V stride_x",
        {"BLOCK": 8192, "stride_loss": 1},
        (8, 3),
    ),
    ("grouped_gemm", "grouped_gemm_kernel"): (
        dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*fp16:16") | {"ends_ptr": "*i32:16"},
        "E N K stride_x stride_we stride_wk stride_o",
        {"EXPERTS": 8, "BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "EVEN": True},
        (8, 4),
    ),
    ("int8_decode", "int8_decode_kernel"): (
        dict(x_ptr="*fp16:16", w_ptr="*i8:16", scale_ptr="*fp32:16", out_ptr="*fp16:16"),
        "B N K stride_x stride_w stride_o",
        {"BLOCK_N": 32, "BLOCK_K": 256},
        (4, 4),
    ),
    ("paged_attention", "part_kernel"): (
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*fp16:16")
        | dict.fromkeys(("table_ptr", "length_ptr"), "*i32:16")
        | dict.fromkeys(("part_ptr", "log_ptr"), "*fp32:16")
        | {"scale": "fp32"},
        "GROUP PART stride_qb stride_qh stride_kp stride_ks stride_kh"
        " stride_vp stride_vs stride_vh stride_t",
        {"PAGE": 16, "D": 128, "BLOCK": 64},
        (4, 2),
    ),
    ("paged_attention", "merge_kernel"): (
        dict(part_ptr="*fp32:16", log_ptr="*fp32:16", length_ptr="*i32:16", out_ptr="*fp16:16"),
        "PART parts stride_ob stride_oh",
        {"D": 128, "PARTS": 8},
        (4, 3),
    ),
    ("rotary", "rotary_kernel"): (
        dict.fromkeys(("x_ptr", "out_ptr"), "*fp16:16")
        | dict(cos_ptr="*fp32:16", sin_ptr="*fp32:16", position_ptr="*i64:16"),
        "H D HALF stride_xt stride_xh stride_ot stride_oh",
        {"HEADS": 16, "BLOCK": 64, "REST": 0},
        (2, 3),
    ),
    ("swiglu_backward", "swiglu_backward_kernel"): (
        dict.fromkeys(("x_ptr", "dh_ptr", "dx_ptr"), "*fp16:16"),
        "N stride_x stride_dh stride_dx",
        {"BLOCK": 2048},
        (8, 3),
    ),
}


def test_solutions_compile_for_a_gpu():
    jobs = []
    for (name, kernel), (pointers, numbers, constants, (warps, stages)) in JOBS.items():
        arguments = pointers | dict.fromkeys(numbers.split(), SIZE)
        options = {"num_warps": warps, "num_stages": stages}
        jobs.append(Job(name, kernel, "sm_90", arguments, constants, options))
    for job, report in zip(jobs, compile_kernels(jobs)):
        assert report.spills == 0 and report.shared <= 227 * 1024, job
    assert sorted({job.lesson for job in jobs}) == NAMES


def test_no_page_shows_a_solution():
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "lessons" not in p.parts]
    assert not [page for page in pages if "tests/exercises" in page.read_text("utf-8")]


@pytest.mark.parametrize("function", ["window", "judge", "rate"])
def test_starters_repeat_it_word_for_word(function):
    """Each must run alone, so each has its own copy: of one text."""
    texts = set()
    for path in STARTERS.glob("*.py"):
        source = path.read_text("utf-8")
        [node] = [n for n in ast.parse(source).body if getattr(n, "name", "") == function]
        texts.add(ast.get_source_segment(source, node))
    assert len(texts) == 1
