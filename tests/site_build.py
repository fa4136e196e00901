"""The whole site, built once in a test run from the working tree as it lies here."""

import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from languages import LANGUAGES  # noqa: E402

CODES = [language.code for language in LANGUAGES]
CHINESE = re.compile(r"[\u3400-\u9fff]")
STRICT = "-q -W --keep-going -n"


@dataclass(frozen=True)
class Site:
    tree: Path  # the copy of the working tree
    warnings: str  # empty where the strict build succeeded

    @property
    def html(self) -> Path:
        return self.tree / "_build" / "html"

    def pages(self, code: str) -> list[Path]:
        return sorted((self.html / code).rglob("*.html"))

    def all_pages(self) -> list[Path]:
        return [page for code in CODES for page in self.pages(code)]

    def name(self, path: Path) -> str:
        return path.relative_to(self.html).as_posix()


def once(tmp_path_factory, name: str, make) -> Path:
    """The folder ``name`` of this test run; the first worker that asks makes it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # all workers' own
    folder, done = base / name, base / f"{name}.done"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


def copy_tree(to: Path) -> None:
    """Copy what a build needs, uncommitted changes too, but nothing that was built."""
    to.mkdir()
    shutil.copy(ROOT / "conf.py", to)
    built = shutil.ignore_patterns("sg_execution_times.rst", "*.mo", "__pycache__")

    def ignore(folder, names):
        return built(folder, names) | ({"lessons"} if Path(folder) == ROOT / "docs" else set())

    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, to / folder, ignore=ignore)


def run(tree: Path, what: str, sphinxopts: str, **more: str) -> subprocess.CompletedProcess:
    """Run a target of docs/_tools/build.py, as on a machine without a GPU."""
    ours = ("LESSON", "RECORD", "FORCE", "SITE_URL")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "SPHINXOPTS": sphinxopts, **more}
    command = [sys.executable, str(tree / "docs" / "_tools" / "build.py"), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def make_site(tree: Path) -> None:
    copy_tree(tree)
    build = run(tree, "html", STRICT)
    if build.returncode:  # one test says so; the others still look at the pages
        (tree / "warnings.txt").write_text(build.stderr or build.stdout, "utf-8")
        again = run(tree, "html", "-q")
        if again.returncode:
            raise RuntimeError(f"the site cannot be built:\n{again.stderr}")


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    tree = once(tmp_path_factory, "site", make_site)
    warnings = tree / "warnings.txt"
    return Site(tree, warnings.read_text("utf-8") if warnings.exists() else "")


@functools.cache
def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text("utf-8"), "html.parser")


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory) -> Path:
    """tests/node_modules with the versions of package.json, installed where they are missing."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed: HTML and accessibility are not checked")
    home = ROOT / "tests"
    wanted = json.loads((home / "package.json").read_text())["dependencies"]

    def version(name):
        package = home / "node_modules" / name / "package.json"
        return json.loads(package.read_text())["version"] if package.exists() else None

    def install(_):
        if {name: version(name) for name in wanted} != wanted:
            command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
            done = subprocess.run(command, cwd=home, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"npm install failed in tests/: {done.stdout}{done.stderr}")

    once(tmp_path_factory, "npm", install)
    return home / "node_modules"
