"""The Makefile's commands on a machine that lacks something: one line that says what to do."""

import os
import shutil
import sys

import gpu
import pytest
from mini_site import ROOT, MiniSite, run

no_gpu = pytest.mark.skipif(gpu.name() is not None, reason="this machine has a GPU")


@pytest.fixture
def site(tmp_path):
    site = MiniSite(tmp_path / "site")
    shutil.copy(ROOT / "Makefile", site.home)
    for name in ("docs/requirements.txt", "tests/requirements.txt", "requirements.txt"):
        site.write(name, (ROOT / name).read_text())
    return site


def make(site, *arguments, **environment):
    return run(["make", "--no-print-directory", *arguments], site.home, environment)


def one_line(result, *parts):
    lines = [line for line in result.output.splitlines() if not line.startswith("make:")]
    assert result.returncode != 0
    assert len(lines) == 1 and lines[0].startswith("error: "), result.output
    for part in parts:
        assert part in lines[0]


def test_help_is_the_default_and_names_every_target(site):
    output = make(site).output
    assert output == make(site, "help").output
    for (
        name
    ) in "html test test-full test-gpu serve record one gettext lint linkcheck clean".split():
        assert f"make {name} " in output


def test_html_builds_both_languages_and_the_root(site):
    result = make(site, "html", PYTHON=sys.executable)
    assert result.returncode == 0, result.output
    assert "built en" in result.output and "zh" in result.output and "in all" in result.output
    for page in ("index.html", "en/index.html", "zh/index.html", "zh/downloads/tiny.py"):
        assert (site.home / "_build/html" / page).exists()
    assert make(site, "one", "LESSON=tiny", PYTHON=sys.executable).returncode == 0


def test_clean_removes_what_is_built(site):
    make(site, "html", PYTHON=sys.executable)
    make(site, "clean")
    assert not (site.home / "_build").exists() and not (site.home / "docs/lessons").exists()


@no_gpu
def test_record_without_gpu(site):
    one_line(make(site, "record", PYTHON=sys.executable), "needs an NVIDIA GPU")


def test_unknown_lesson(site):
    result = make(site, "one", "LESSON=tiny nosuch", PYTHON=sys.executable)
    one_line(result, "no lesson named nosuch", "tiny")


def test_one_without_lesson(site):
    one_line(make(site, "one", PYTHON=sys.executable), 'needs LESSON="stem"')


def test_serve_before_html(site):
    one_line(make(site, "serve", PYTHON=sys.executable), "run make html first")


def test_python_that_is_none(site):
    result = make(site, "html", PYTHON="/nosuch/python")
    assert result.returncode != 0 and "/nosuch/python" in result.output


def fake_python(folder, body):
    """A `python3` and friends on PATH that run this machine's Python with some lack."""
    folder.mkdir()
    for name in ("python3", "python3.11", "python3.12"):
        path = folder / name
        path.write_text(f'#!/bin/sh\n{body}\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def venv_tool(site, prelude, **environment):
    """Run venv.py in a Python that executes ``prelude`` first and is its own only candidate."""
    code = f"import sys, runpy; sys.argv = ['venv.py', 'site']; {prelude}\n"
    code += "runpy.run_path('docs/_tools/venv.py', run_name='__main__')"
    return run([sys.executable, "-c", code], site.home, environment)


def test_python_too_old(site, tmp_path):
    body = 'case "$2" in *version_info*) exit 1;; esac'
    prelude = f"sys.executable = {str(tmp_path / 'bin' / 'python3')!r}"
    result = venv_tool(site, prelude, **fake_python(tmp_path / "bin", body))
    one_line(result, "Python 3.11 or 3.12 is needed")


def test_no_venv_module(site, tmp_path):
    body = 'case "$2" in *ensurepip*) echo "No module named ensurepip" >&2; exit 1;; esac'
    prelude = f"sys.executable = {str(tmp_path / 'bin' / 'python3')!r}"
    result = venv_tool(site, prelude, **fake_python(tmp_path / "bin", body))
    one_line(result, "has no venv module", "python3-venv")


def test_no_write_permission(site):
    prelude = "import os; a = os.access; os.access = lambda p, m: m != os.W_OK and a(p, m)"
    one_line(venv_tool(site, prelude), "no permission to write .venv")


def test_requirements_that_cannot_be_installed(site):
    site.write("docs/requirements.txt", "no-such-package-of-ours==0\n")
    result = venv_tool(site, "pass", PIP_NO_INDEX="1")
    assert result.returncode != 0
    assert "error: pip could not install docs/requirements.txt" in result.output
    assert not (site.home / ".venv" / ".requirements").exists()
