"""A small copy of the site's machinery with lessons of the test's own, to build and to break."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

TINY = '''
"""
Tiny
====

A first paragraph.
"""

from pathlib import Path

runs = Path("runs.txt")
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
results = [
    {"provider": "triton", "metric": "GB/s", "N": 16, "value": 90.0},
    {"provider": "torch", "metric": "GB/s", "N": 16, "value": 60.0},
]
excerpts = {"note": "a text"}
print("hello from the tiny lesson")

# %%
# Its figure
# ----------
import matplotlib.pyplot as plt

plt.plot([1, 3, 2])
plt.show()

# %%
# Figure. A line with one peak.
#
# It was :measured:`tiny triton/torch metric=GB/s N=16` as fast.
'''

# Runs sphinx-build on a machine that is made to have a GPU, or to lack torch.
PATCHED = """
import os, sys
sys.path.insert(0, {ext!r})
import gpu
if {fake_gpu!r}:
    gpu.name = lambda: {fake_gpu!r}
    gpu.describe = lambda: dict(gpu=dict(name={fake_gpu!r}, slug=gpu.slug({fake_gpu!r})))
if not {torch!r}:
    gpu.can_run_triton = lambda: False
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


class MiniSite:
    def __init__(self, home: Path):
        self.home = home
        (home / "docs").mkdir(parents=True)
        for name in ("_ext", "_templates", "_static", "_tools"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "docs" / name, home / "docs" / name, ignore=ignore)
        conf = (ROOT / "conf.py").read_text("utf-8").replace("nvidia-h200", "test-gpu")
        self.write("conf.py", conf)
        self.write("docs/index.md", "# Home\n\n```{toctree}\nlessons/index\n```\n")
        self.write("examples/GALLERY_HEADER.rst", "Lessons\n=======\n")
        self.write("examples/1_part/GALLERY_HEADER.rst", "Part\n====\n")
        self.lesson(TINY)

    def write(self, name: str, text: str) -> None:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def lesson(self, text: str, name: str = "1_part/01_tiny.py") -> None:
        self.write(f"examples/{name}", textwrap.dedent(text).lstrip("\n"))

    def edit(self, old: str, new: str, name: str = "examples/1_part/01_tiny.py") -> None:
        text = (self.home / name).read_text("utf-8")
        assert old in text
        self.write(name, text.replace(old, new))

    def sphinx(self, *more, builder="html", language="en", fake_gpu="", torch=True, **environment):
        """Run sphinx-build; the result has returncode and output."""
        code = PATCHED.format(ext=str(self.home / "docs/_ext"), fake_gpu=fake_gpu, torch=torch)
        out = self.home / "_build" / "html" / language[:2]
        command = [sys.executable, "-c", code, "-q", "-b", builder, "-c", str(self.home)]
        command += ["-d", str(self.home / "_build" / f"doctrees-{builder}-{language}")]
        command += ["-D", f"language={language}", *more, str(self.home / "docs"), str(out)]
        return run(command, self.home, environment)

    def record(self, lessons="", fake_gpu="Test GPU", **environment):
        return self.sphinx(builder="dummy", fake_gpu=fake_gpu, RECORD=lessons, **environment)

    def page(self, name="lessons/1_part/01_tiny", language="en") -> str:
        return (self.home / "_build" / "html" / language / f"{name}.html").read_text("utf-8")

    def recording(self, stem="tiny", slug="test-gpu") -> Path:
        return self.home / "docs" / "recordings" / slug / stem

    def manifest(self, **kwargs) -> dict:
        return json.loads((self.recording(**kwargs) / "manifest.json").read_text("utf-8"))

    def times_run(self) -> int:
        path = self.home / "examples" / "1_part" / "runs.txt"
        return len(path.read_text()) if path.exists() else 0


def conf(name):
    """A constant that the site's conf.py sets; running it would set the environment too."""
    for node in ast.parse((ROOT / "conf.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)


def run(command, cwd, environment=None):
    """Run a command to its end, with stdout and stderr together in ``output``."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("RECORD", "TRITON", "PYTEST", "MAKE", "MFLAGS")) and k != "PYTHON"
    }
    result = subprocess.run(
        command,
        cwd=cwd,
        env=clean | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    result.output = result.stdout
    return result
