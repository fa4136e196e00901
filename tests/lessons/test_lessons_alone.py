"""Each lesson alone in an empty folder, and the rules of form that a program can check.

A new lesson is covered without a line here, except where it needs one of the
exceptions below.
"""

import ast
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import lesson_code
import pytest
from alone import run_alone

ROOT = Path(__file__).resolve().parents[2]
LESSONS = lesson_code.find()
MAX_LINES = {
    "attention": 727,
    "attention_backward": 524,
    "autograd": 556,
    "autotune": 507,
    "diagnosis": 529,
    "fused_elementwise": 385,
    "gemm": 460,
    "gemm_epilogue": 477,
    "gemm_fast": 616,
    "measuring": 380,
    "reductions": 385,
    "softmax": 512,
    "strides_2d": 386,
    "norms": 385,
}  # else 350
MAY_IMPORT = {"torch", "triton", "matplotlib"} | set(sys.stdlib_module_names)
EXTRA_IMPORTS = {"debugging": {"triton_memcheck"}, "diagnosis": {"triton_memcheck"}}
ON_CPU = [  # lesson, call with a tensor on the CPU, what it says
    (
        "attention",
        "attention(*[x.half()[None, None]] * 3)",
        "q is on cpu; all need one cuda device",
    ),
    (
        "attention_backward",
        "attention(x.half(), x.half(), x.half())",
        "q is on cpu; all need one GPU",
    ),
    ("autotune", "gemm(x.half(), x.half())", "a is on cpu; needed: one cuda device"),
    ("autograd", "layer_norm(x)", "x is on cpu; needed: ['cuda']"),
    ("copy", "copy(x)", "x is on cpu; pass x.cuda()"),
    ("fused_elementwise", "gelu(x)", "x is on cpu; kernels run on cuda"),
    ("gemm", "gemm(x, x)", "a is on cpu; the kernel runs on cuda"),
    ("gemm_epilogue", "linear_act(x.half(), x.half())", "x is on cpu; the kernel runs on cuda"),
    ("gemm_fast", "matmul(x.half(), x.half())", "a is on cpu; all need one cuda device"),
    ("llm_operators", "cross_entropy(x, x[0].long())", "x is on cpu; needed: ['cuda']"),
    ("norms", "layer_norm(x)", "x is on cpu; needed: ['cuda']"),
    ("reductions", "reduce('sum', x, 0)", "x: cpu, x: cpu, not ('cuda',)"),
    ("softmax", "softmax(x)", "x is on cpu; the kernel runs on cuda"),
    ("strides_2d", "copy_2d(x)", "x is on cpu; needed: one cuda device"),
    ("strides_2d", "transpose(x)", "x is on cpu; needed: one cuda device"),
    ("strides_2d", "bias_add(x, x[0])", "x is on cpu; needed: one cuda device"),
    ("vector_add", "vector_add(x, x)", "x is on cpu; the kernel runs on cuda"),
]
ROLES = re.compile(r":[\w-]+:`")

each_lesson = pytest.mark.parametrize("stem", LESSONS)


@each_lesson
def test_runs_in_the_interpreter(stem, tmp_path):
    pytest.importorskip("triton")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = run_alone(stem, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert re.search("^Left out", said, re.MULTILINE), "it must say what it leaves out"
    # Unlike the time on the clock, CPU seconds are the same on a busy machine.
    assert sum(after[:2]) - sum(before[:2]) <= 20


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["", "-O"])
def test_a_cpu_tensor_is_refused_outside_the_interpreter(flags):
    pytest.importorskip("triton")
    code = f"""
import lesson_code, torch
x, said = torch.ones(3, 3), []
for stem, call, _ in {ON_CPU}:
    try:
        said.append(str(eval("lesson_code.load(stem)." + call)))
    except ValueError as error:
        said.append(str(error))
raise SystemExit(repr(said))
"""
    said = ast.literal_eval(lesson_code.last_words(code, *flags))
    assert said == [message for _, _, message in ON_CPU]


@pytest.mark.full
@each_lesson
def test_says_the_same_without_asserts(stem, tmp_path):
    """Checks that are asserts vanish under -O; then fewer errors would be told.

    How large a rounding error is depends on where NumPy's arrays happen to lie.
    """
    pytest.importorskip("triton")
    (tmp_path / "plain").mkdir()
    (tmp_path / "optimised").mkdir()
    plain = run_alone(stem, tmp_path / "plain")
    optimised = run_alone(stem, tmp_path / "optimised", "-O")
    plain, optimised = (re.sub(r"\d(\.\d+)?e-\d+", "tiny", said) for said in (plain, optimised))
    assert plain == optimised


def test_stems_are_unique():
    paths = list(lesson_code.EXAMPLES.glob("[0-9]_*/[0-9][0-9]_*.py"))
    assert sorted(paths) == sorted(LESSONS.values())


@each_lesson
def test_length(stem):
    lines = LESSONS[stem].read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES.get(stem, 350)
    assert max(map(len, lines)) <= 80


@each_lesson
def test_imports(stem):
    """Nothing of this repository, nothing that a reader would have to install as well."""
    tree = ast.parse(LESSONS[stem].read_text("utf-8"))
    allowed = MAY_IMPORT | EXTRA_IMPORTS.get(stem, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module.split(".")[0] in allowed
        elif isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "__file__" not in names, "Sphinx-Gallery and notebooks do not define it"


@each_lesson
def test_functions_raise(stem):
    tree = ast.parse(LESSONS[stem].read_text("utf-8"))
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)], "see python -O"


@each_lesson
def test_names(stem):
    """The kernel, the wrapper and the reference have names that belong together."""
    kernels = lesson_code.kernels(stem)
    functions = {
        node.name
        for node in ast.parse(LESSONS[stem].read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert kernels and all(name.endswith("_kernel") for name in kernels)
    if f"{stem}_kernel" in kernels:
        assert {stem, f"{stem}_ref"} <= functions


@each_lesson
def test_the_callers_mode_counts(stem):
    """Loading the code of a lesson neither prints, nor draws, nor changes the environment."""
    pytest.importorskip("triton")
    code = f"import os; before = dict(os.environ); import lesson_code; lesson_code.load({stem!r})"
    code += "; assert dict(os.environ) == before"
    code += "; import matplotlib.pyplot; assert not matplotlib.pyplot.get_fignums()"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout) == (0, ""), child.stderr


def cells(stem: str) -> list[tuple[str, str]]:
    """Pairs of kind and content: ("text", reST) or ("code", Python), in order."""
    parser = pytest.importorskip("sphinx_gallery.py_source_parser")
    _, blocks = parser.split_code_and_text_blocks(str(LESSONS[stem]))
    return [(block.type, block.content) for block in blocks]


@each_lesson
def test_figures_and_captions(stem):
    """One figure in a cell, shown at its end; the next words are its caption."""
    found = cells(stem)
    for (kind, content), following in zip(found, [*found[1:], ("", "")]):
        shows = len(re.findall(r"\bplt\.show\(\)", content)) if kind == "code" else 0
        draws = kind == "code" and re.search(r"\bplt\.(?!show|close|style)\w+\(", content)
        assert "savefig" not in content
        if draws or shows:
            assert shows == 1 and content.rstrip().endswith("plt.show()"), content
            assert following[0] == "text", content
            caption = following[1].strip().split("\n\n")[0]
            assert caption.startswith("Figure. "), following[1]
            assert not ROLES.search(caption), "a caption is read aloud: literals only"
        elif following[1].startswith("Figure."):
            raise AssertionError(f"a caption without a figure: {following[1]}")


@each_lesson
def test_title_and_first_paragraph(stem):
    kind, content = cells(stem)[0]
    title, underline, *rest = content.strip().splitlines()
    assert kind == "text" and underline == "=" * len(title)
    blurb = "\n".join(rest).strip().split("\n\n")[0]
    assert blurb and not ROLES.search(blurb), "it stands on cards: no roles"


@each_lesson
def test_text_is_easy_to_translate(stem):
    """Markup that breaks in a translation: drawn tables, footnotes, targets, substitutions."""
    for kind, content in cells(stem):
        if kind == "text":
            assert not re.search(r"^\s*(\+[-=]|=+ +=+)", content, re.MULTILINE), content
            assert not re.search(r"^\.\. (_|\[|\|)|\|\w+\||\]_|`_", content, re.MULTILINE), content


RECORDED = sorted((ROOT / "docs" / "recordings").glob("*/*/results.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_recorded_rates_have_a_ceiling(path):
    """Each case that was measured as a rate has its roof beside it, once."""
    reserved = {"provider", "value", "low", "high", "note"}
    rates = [row for row in json.loads(path.read_text("utf-8")) if row["metric"].endswith("/s")]
    cases = {}
    for row in rates:
        case = tuple(sorted((k, v) for k, v in row.items() if k not in reserved))
        cases.setdefault(case, []).append(row["provider"])
    for case, providers in cases.items():
        assert providers.count("ceiling") == 1, case
        assert len(set(providers)) == len(providers), case
