"""What is broken on purpose in a lesson's kernels is noticed; an unbroken copy passes."""

import subprocess
import sys
from pathlib import Path

import pytest

UNBROKEN = """
import mutate
lesson = "vector_add"
mutant = next(mutate.mutants(lesson))
mutant = mutant._replace(source=mutate.lesson_code.find()[lesson].read_text("utf-8"))
[(_, code)] = mutate.run([mutant])
assert code == mutate.NOBODY, code
"""


def run(*arguments):
    folder = Path(__file__).parent
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)


@pytest.mark.full
def test_broken_copies_are_noticed():
    pytest.importorskip("triton")
    child = run("mutate.py", "vector_add")
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout.splitlines()[-1].split() == ["vector_add", "7", "7", "0", "0", "0", "0"]


@pytest.mark.full
def test_an_unbroken_copy_is_not():
    pytest.importorskip("triton")
    child = run("-c", UNBROKEN)
    assert child.returncode == 0, child.stderr
