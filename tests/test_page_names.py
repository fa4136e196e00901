"""What pages and lessons name of PyTorch and Triton exists in the versions installed here.

`make test` has the new end of the supported range, `make test-full` the old one.
"""

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]
PAGES = [p for p in (ROOT / "docs").rglob("*.md") if "lessons" not in p.parts]
TEXTS = sorted([ROOT / "README.md", *PAGES, *(ROOT / "examples").rglob("*.py")])
ROOTS = {"torch": "torch", "triton": "triton", "tl": "triton.language"}
IMPORT = re.compile(r"^ *import ((?:torch|triton)[\w.]*) as (\w+)$", re.MULTILINE)
FROM = re.compile(r"^ *from ((?:torch|triton)\b[\w.]*) import (\w+)(?: as (\w+))?$", re.MULTILINE)


def names(text: str) -> set[str]:
    """Every dotted name, in code and in prose, that begins with a module, in full."""
    modules = dict(ROOTS)
    modules |= {alias: module for module, alias in IMPORT.findall(text)}
    modules |= {alias or name: f"{module}.{name}" for module, name, alias in FROM.findall(text)}
    dotted = rf"(?<![\w./-])({'|'.join(modules)})((?:\.[A-Za-z_]\w*)+)"
    return {modules[module] + rest for module, rest in re.findall(dotted, text)}


def find(name: str):
    """The object of that dotted name; what is no attribute may be a module to import."""
    path, *rest = name.split(".")
    found = importlib.import_module(path)
    for part in rest:
        path += f".{part}"
        if path == "triton.runtime.driver.active":  # what it has depends on the machine
            return type(found).active
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_names_exist(path):
    missing = []
    for name in sorted(names(path.read_text("utf-8"))):
        try:
            find(name)
        except ImportError:
            missing.append(name)
    assert not missing


def test_names_are_seen():
    text = "import torch.nn.functional as F\nfrom triton.language.extra import libdevice\n"
    text += "`tl.sum`, F.silu(x), libdevice.tanh and torch.cuda.is_available().\npytorch.org/x"
    assert names(text) - {"torch.nn.functional", "triton.language.extra"} == {
        "triton.language.sum",
        "torch.nn.functional.silu",
        "triton.language.extra.libdevice.tanh",
        "torch.cuda.is_available",
    }
    with pytest.raises(ImportError):
        find("triton.language.summ")
