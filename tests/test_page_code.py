"""Python shown on pages that are no lessons: it is run as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

HOME = """\
import torch
import triton
import triton.language as tl

{kernel}

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


def python_of(page: str) -> str:
    """The first Python code on a page."""
    fence = r"^```(?:python|{code-block} python)\n(?::[^\n]*\n)*(.*?)^```"
    text = (DOCS / page).read_text("utf-8")
    return re.search(fence, text, re.DOTALL | re.MULTILINE)[1]


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


def test_home_page_kernel_adds_and_stays_in_bounds(tmp_path):
    run(HOME.format(kernel=python_of("index.md")), tmp_path, TRITON_INTERPRET="1")


def test_three_levels_agree(tmp_path):
    code = COMPILED.format(code=python_of("concepts/what-is-triton.md"))
    compiler = {} if shutil.which("g++") else {"TORCH_COMPILE_DISABLE": "1"}
    run(code, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **compiler)


def test_installation_check_prints_what_the_page_says(tmp_path):
    versions, place, values = run(python_of("start/install.md"), tmp_path).splitlines()
    page = (DOCS / "start" / "install.md").read_text("utf-8")
    assert re.fullmatch(r"torch \S+ triton \S+", versions)
    assert f"{place}\n{values}\n```" in page
