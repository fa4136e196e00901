"""The messages that the page on installation quotes are produced, or found where they are written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "start" / "install.md").read_text("utf-8")
QUOTED = re.findall(r"^\* - `(.*)`$", PAGE, re.MULTILINE)
TEXTS = [p for p in (ROOT / "docs").rglob("*.md") if "lessons" not in p.parts]
TEXTS = sorted([*TEXTS, *(ROOT / "examples").rglob("*.py")])

# How a quoted message begins that is not produced here, and why.
NOT_HERE = {
    "triton.runtime.errors.InterpreterError: TypeError": "Triton 3.6 with NumPy 2.4 or later",
    "ValueError: Pointer argument": "a launch on a GPU",
    "The NVIDIA driver": "an old driver, and a PyTorch for CUDA",
    "… with CUDA capability": "an old GPU, and a PyTorch for CUDA",
}

# Makes the mistakes without a GPU, and prints the last line of each traceback.
MISTAKES = """
import json, os, sys, traceback
import torch, triton, triton.language as tl
from triton.runtime.build import compile_module_from_src


@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, 1.0)


def no_gpu():
    kernel[(1,)](torch.zeros(1))


def cpu_wheel():
    torch.zeros(1, device="cuda")


def no_compiler():
    os.environ.pop("CC", None)
    os.environ["PATH"] = ""
    compile_module_from_src("int unique_to_this_test;", "name")


def at_the_prompt():
    exec("@triton.jit\\ndef typed(x_ptr):\\n    pass", dict(triton=triton))


def interpreter_too_late():
    os.environ["TRITON_INTERPRET"] = "1"

    @triton.jit
    def late(x_ptr):
        tl.store(x_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 4)), 0))

    late[(1,)](torch.zeros(4))


lines = []
for mistake in (no_gpu, cpu_wheel, no_compiler, at_the_prompt, interpreter_too_late):
    try:
        mistake()
    except Exception as error:
        lines.append(traceback.format_exception_only(error)[-1].strip())
print(json.dumps(lines))
"""

NO_NUMPY = """
import sys
from importlib.machinery import PathFinder

class WithoutNumPy(PathFinder):
    def find_spec(name, *more):
        return None if name == "numpy" else PathFinder.find_spec(name, *more)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutNumPy
import triton

@triton.jit
def kernel():
    pass

kernel[(1,)]()
"""


def run(folder: Path, code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Run Python code as a script, on a machine without a GPU and with nothing compiled yet."""
    (folder / "script.py").write_text(code, "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PIP_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(folder), **more}
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def produced(tmp_path_factory):
    """The last lines of what each mistake says."""
    folder = tmp_path_factory.mktemp("mistakes")
    mistakes = run(folder, MISTAKES)
    assert mistakes.returncode == 0, mistakes.stderr
    no_numpy = run(folder, NO_NUMPY, TRITON_INTERPRET="1")
    # All that can be downloaded is a wheel for Linux, and this is macOS.
    (folder / "triton-3.7.1-py3-none-manylinux_2_27_x86_64.whl").touch()
    pip = "download --no-index --find-links . --only-binary :all: --platform macosx_11_0_arm64"
    code = "import runpy; runpy.run_module('pip', run_name='__main__')"
    no_wheel = run(folder, code, *pip.split(), "triton", PIP_CONFIG_FILE=os.devnull)
    last = [child.stderr.splitlines()[-1] for child in (no_numpy, no_wheel)]
    return [*json.loads(mistakes.stdout), *last]


def test_messages_are_produced(produced):
    here = [message for message in QUOTED if not message.startswith(tuple(NOT_HERE))]
    assert len(here) == len(QUOTED) - len(NOT_HERE)
    if torch.version.cuda:
        here.remove("AssertionError: Torch not compiled with CUDA enabled")
    assert set(here) <= set(produced)


def test_what_the_page_says_about_its_sources():
    first, second = QUOTED[-2:]
    assert first.startswith("The NVIDIA driver") and second.startswith("… with CUDA capability")
    assert "The last two are quoted from the source code of\nPyTorch" in PAGE
    source = Path(torch.cuda.__file__).read_text("utf-8")
    assert second.replace("…", "{}", 1).replace("…", "{}") in source


def test_pointer_argument_is_counted_in_old_triton_only():
    """The page quotes `(at 0)`, and says that Triton 3.7 leaves it out."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia"
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("driver.*")))
    [counted] = re.findall(r"Pointer argument( \(at %d\))? cannot be accessed from Triton", source)
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert bool(counted) == (version < (3, 7))
    assert "Triton 3.7 leaves out `(at 0)`" in PAGE


def test_a_bound_in_an_array_is_no_scalar_for_new_numpy():
    """The loop of Triton 3.6's interpreter asks NumPy for this conversion."""
    numpy = pytest.importorskip("numpy", minversion="2.4")
    [message] = [m for m in QUOTED if m.startswith("triton.runtime.errors.InterpreterError: Type")]
    with pytest.raises(TypeError) as caught:
        int(numpy.array([4]))
    assert message.endswith(repr(caught.value))


def test_no_other_text_quotes_a_message():
    """One that does needs a test as those above, or shows what code printed."""
    message = re.compile(r"`([^`\n]*\b(?:[A-Z]\w*(?:Error|Warning)|ERROR): [^`\n]+)`")
    found = {quoted for path in TEXTS for quoted in message.findall(path.read_text("utf-8"))}
    assert found == {quoted for quoted in QUOTED if message.match(f"`{quoted}`")}
