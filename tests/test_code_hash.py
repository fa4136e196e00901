"""Code edits void a recording; edits of prose, comments and docstrings never do."""

import shutil
import subprocess

import pytest
from lessons import code_hash, find
from mini_site import ROOT

CELL = '''
import os

def f(x):
    """Return one more."""
    y = x + 1  # add

    return y  # done

TEXT = """first

second # not a comment"""
print(f"{f(1):#x}", "# kept")
'''

SAME = {
    "comment changed": ("# add", "# add one, at length"),
    "comment dropped": ("  # done", ""),
    "comment line added": ("import os\n", "# About os.\nimport os\n"),
    "blank line added": ("    return", "\n    return"),
    "blank line dropped": ("# add\n\n", "# add\n"),
    "trailing space": ("import os", "import os   "),
    "docstring changed": ("Return one more.", "Return x + 1.\n\n    An integer.\n    "),
    "docstring dropped": ('    """Return one more."""\n', ""),
}
OTHER = {
    "operator": ("x + 1", "x + 2"),
    "hash in a string": ("# kept", "# changed"),
    "hash in a long string": ("# not a comment", "# another"),
    "blank line in a string": ("first\n\nsecond", "first\nsecond"),
    "order": ("import os\n", ""),
}


@pytest.mark.parametrize("old, new", SAME.values(), ids=SAME)
def test_same_code(old, new):
    assert old in CELL
    assert code_hash([CELL]) == code_hash([CELL.replace(old, new)])


@pytest.mark.parametrize("old, new", OTHER.values(), ids=OTHER)
def test_other_code(old, new):
    assert old in CELL
    assert code_hash([CELL]) != code_hash([CELL.replace(old, new)])


def test_cells_count():
    assert code_hash(["a = 1\nb = 2"]) != code_hash(["a = 1", "b = 2"])


def test_a_syntax_error_still_has_a_hash():
    assert code_hash(["def f(:"]) != code_hash(["def g(:"])


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_gives_the_same_hash(version):
    python = shutil.which(f"python{version}")
    code = "import sys; sys.path.insert(0, 'docs/_ext'); import lessons"
    code += "; print(lessons.code_hash([sys.stdin.read()]))"
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python {version} here")
    for text in [CELL, *(cell for lesson in find().values() for cell in lesson.code())]:
        command = [python, "-c", code]
        result = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        assert result.stdout.strip() == code_hash([text]), result.stderr
