"""A lesson alone in a folder, as a reader without a GPU runs it."""

import os
import subprocess
import sys
from pathlib import Path

import lessons


def run_alone(stem: str, folder: Path, *flags: str, **variables: str) -> str:
    """What a copy prints. Raises AssertionError, with its output, where it does not end well."""
    script = folder / f"{lessons.find()[stem].download}.py"
    script.write_bytes(lessons.find()[stem].path.read_bytes())
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    if "OPENBLAS_NUM_THREADS" in os.environ:
        environment["OPENBLAS_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"]
    child = subprocess.run(
        [sys.executable, *flags, script.name],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout
