"""Code shown on pages that are no lessons is run as it stands there, or checked where it cannot be."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import lessons
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "lessons" not in p.parts)]
TEXTS = {
    page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix(): page for page in PAGES
}
TEXTS = {name: page.read_text("utf-8") for name, page in TEXTS.items()}

NEWEST = (ROOT / ".github" / "workflows" / "newest.yml").read_text("utf-8")

HOME = """\
import torch
import triton
import triton.language as tl

{code}

x, y = torch.randn(2, 1003)
out = torch.full((1024,), float("nan"))
add_kernel[(4,)](x, y, out, 1003, BLOCK=256)
assert torch.equal(out[:1003], x + y)
assert out[1003:].isnan().all()
"""

COMPILED = """\
{code}

x = torch.randn(1003)
assert torch.equal(scale_bias(x, 2.0, 1.0), 2 * x + 1)
assert torch.equal(compiled(x, 2.0, 1.0), 2 * x + 1)
"""

HEADER = """\
{code}
assert triton.knobs.runtime.interpret
"""

RESULTS = """\
import recordings

results, n, low, median, high = [], 4, 1.0, 2.0, 3.0
{code}
recordings.check_results(results)
"""

TIMING = """\
import inspect
from unittest import mock

import triton.testing

defaults = inspect.signature(triton.testing.do_bench).parameters
assert [defaults[key].default for key in ("warmup", "rep", "return_mode")] == [25, 100, "mean"]
fn, times = print, [2.0, 1.0, 3.0]
triton.testing.do_bench = mock.create_autospec(triton.testing.do_bench, return_value=times)
{code}
assert [median, low, high] == times
"""

# (page, which Python block of it) -> a script around it
SCRIPTS = {
    ("concepts/what-is-triton.md", 0): COMPILED,
    ("contribute/lesson.md", 0): HEADER,
    ("contribute/lesson.md", 1): "{code}",
    ("contribute/lesson.md", 2): RESULTS,
    ("index.md", 0): HOME,
    ("reference/method.md", 0): TIMING,
    ("start/install.md", 0): "{code}",
}

ELSEWHERE = {
    "apt": "changes the system",
    "docker": "needs its service",
    "nvidia-smi": "needs a driver",
    "wsl": "is a part of Windows",
}


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in that language, without the directive's options."""
    return [code for found, code in all_blocks(page) if found == language]


def all_blocks(page: str) -> list[tuple[str, str]]:
    fence = r"^( *)(`{3,})(?:{code-block} )?([^\n`]*)\n(?: *:[^\n]*\n)*(.*?)^\1\2$"
    found = re.finditer(fence, TEXTS[page], re.DOTALL | re.MULTILINE)
    return [(match[3], textwrap.dedent(match[4])) for match in found]


def run(code: str, folder: Path, **more: str) -> str:
    """What the code prints, as a script of its own, on a machine without a GPU."""
    script = folder / "script.py"
    script.write_text(code, "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", **more}
    command = [sys.executable, script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {kind for page in TEXTS for kind, _ in all_blocks(page) if not kind.startswith("{")}
    assert kinds == {"bash", "powershell", "python", "text"}
    python = {(page, n) for page in TEXTS for n in range(len(blocks(page, "python")))}
    assert python == SCRIPTS.keys()


SLOW = "concepts/what-is-triton.md"  # torch.compile takes a C++ compiler's time


@pytest.mark.parametrize(
    "page, number",
    [pytest.param(*s, marks=pytest.mark.full if s[0] == SLOW else ()) for s in SCRIPTS],
)
def test_python(page, number, tmp_path):
    more = {"PYTHONPATH": str(DOCS / "_ext"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if page == "index.md":
        more["TRITON_INTERPRET"] = "1"
    if not shutil.which("g++"):
        more["TORCH_COMPILE_DISABLE"] = "1"
    script = SCRIPTS[page, number].format(code=blocks(page, "python")[number])
    output = run(script, tmp_path, **more)
    if page == "start/install.md":
        versions, place, values = output.splitlines()
        assert re.fullmatch(r"torch \S+ triton \S+", versions)
        assert blocks(page, "text")[0].endswith(f"\n{place}\n{values}\n")


def commands(page: str) -> list[list[str]]:
    """The words of each command in shell blocks and in the text, without `X=1` and sudo before it."""
    shell = "".join(blocks(page, "bash") + blocks(page, "powershell"))
    inline = re.findall(r"(?<!`)`((?:pip|make|python3?) [^`]+)`", TEXTS[page])
    lines = [shlex.split(line, comments=True) for line in [*shell.splitlines(), *inline]]
    for line in lines:
        while line and (line[0] == "sudo" or re.match(r"[A-Z_]+=", line[0])):
            line.pop(0)
    return [line for line in lines if line]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_shell(page):
    for code in blocks(page, "bash"):
        parsed = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
        assert parsed.returncode == 0, parsed.stderr
    environments = set()
    for words in commands(page):
        match words:
            case ["make", *arguments]:
                check_make(arguments)
            case ["pip", "install", "-r", file]:
                assert (ROOT / file).is_file()
            case ["pip", "install", trial] if trial.startswith("triton=="):
                version = trial.removeprefix("triton==").removesuffix(".*")
                assert f'"{version}"' in NEWEST and 'pip install "triton==$TRITON.*"' in NEWEST
            case ["pip", "install", *arguments]:
                check_pip(arguments)
            case ["python3", "-m", "venv", folder]:
                environments.add(f"{folder}/bin/activate")
            case ["source", script]:
                assert script in environments
            case ["python", script] if script.endswith(".py"):
                check_script(page, script)
            case ["python", "-m", "pytest", *_]:
                assert words in map(shlex.split, re.findall("python -m .*", NEWEST))
            case ["python", "-O"]:
                pass
            case [program, *_]:
                assert program in ELSEWHERE, f"nothing checks: {shlex.join(words)}"


def check_make(arguments):
    """The Makefile knows the targets and the variables; lessons that are named exist."""
    dry = ["make", "--dry-run", *arguments]
    result = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    for argument in arguments:
        if "=" in argument:
            name, value = argument.split("=")
            assert f"{name}=" in told
            if name == "LESSON":
                assert set(value.split()) <= {*lessons.find(), "..."}


def check_pip(arguments):
    """What a page installs lies within what the requirements allow."""
    if "--index-url" in arguments:
        at = arguments.index("--index-url")
        ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
        assert f"PIP_EXTRA_INDEX_URL: {arguments[at + 1]}\n" in ci
        del arguments[at : at + 2]
    newest, oldest = limits("requirements.txt"), limits("tests/requirements-oldest.txt")
    for asked in map(Requirement, arguments):
        allowed = newest[asked.name] or oldest[asked.name]
        versions = [f"{major}.{minor}" for major in range(1, 5) for minor in range(20)]
        taken = [version for version in versions if version in asked.specifier]
        assert taken, f"there is no {asked}"
        assert not asked.specifier or all(version in allowed for version in taken), asked


def limits(name: str) -> dict[str, SpecifierSet]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    found = [Requirement(line) for line in lines if re.match(r"\w", line)]
    return {requirement.name: requirement.specifier for requirement in found}


def check_script(page, script):
    """A file of the repository, a download, one that the page shows, or the reader's own."""
    downloads = {f"{lesson.download}.py" for lesson in lessons.find().values()}
    downloads |= {path.name for path in lessons.exercises()}
    shown = re.findall(r"^:caption: (\S+)$", TEXTS[page], re.MULTILINE)
    assert (ROOT / script).is_file() or script in {*downloads, *shown, "your_script.py"}
