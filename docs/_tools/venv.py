"""Print the Python to use, making a virtual environment first where one is missing or stale.

    venv.py site      what building the site needs (everything where there is a GPU)
    venv.py all       what lessons and tests need as well
    venv.py oldest    the oldest supported versions, for tests, in .venv-oldest

Only the standard library, for any Python 3: it runs before anything is installed.
PYTHON names an interpreter that already has what is needed; it is used as it is.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FILES = {
    "site": ["docs/requirements.txt"],
    "all": ["docs/requirements.txt", "tests/requirements.txt", "requirements.txt"],
    "oldest": ["tests/requirements-oldest.txt"],
}


def stop(message):
    sys.exit("error: " + message)


def run(command):
    return subprocess.run(command, capture_output=True, text=True)


def base_python():
    """A Python 3.11 or newer that has venv."""
    test = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    tried = []
    for name in (sys.executable, "python3.12", "python3.11"):
        path = shutil.which(name)
        if path:
            result = run([path, "-c", test])
            if result.returncode == 0:
                return path
            tried.append(result.stderr)
    if any("No module named" in text for text in tried):
        stop(
            "this Python has no venv module; install it (Debian: apt install python3-venv)"
            " or give PYTHON=… that has the requirements"
        )
    stop("Python 3.11 or 3.12 is needed; install one or give PYTHON=…")


def digest(kind):
    content = [open(os.path.join(ROOT, name), "rb").read() for name in FILES[kind]]
    return kind + " " + hashlib.sha256(b"\0".join(content)).hexdigest()


def has_gpu():
    sys.path.insert(0, os.path.join(ROOT, "docs", "_ext"))
    import gpu

    return gpu.name() is not None


def installed(python, stamp):
    """What the stamp says is installed, or None where the environment is not usable."""
    if not os.path.exists(stamp) or run([python, "-c", ""]).returncode:
        return None
    with open(stamp) as file:
        return file.read()


def ready(name, kind):
    """The Python of the environment ``name``, brought up to date for ``kind``."""
    home = os.path.join(ROOT, name)
    python, stamp = os.path.join(home, "bin", "python"), os.path.join(home, ".requirements")
    base = base_python()
    found = installed(python, stamp)
    if found in (digest(kind), digest("all")):
        return python
    if not os.access(ROOT, os.W_OK):
        stop("no permission to write %s in %s; copy the repository elsewhere" % (name, ROOT))
    requirements = FILES[kind][-1]
    print("installing %s into %s ..." % (requirements, name), file=sys.stderr)
    if found is None:
        made = run([base, "-m", "venv", "--clear", home])
        if made.returncode:
            stop("cannot make %s: %s" % (name, (made.stderr + made.stdout).strip().split("\n")[-1]))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, "-r", os.path.join(ROOT, requirements)], stdout=2).returncode:
        stop("pip could not install %s (see above); is there a network?" % requirements)
    with open(stamp, "w") as file:
        file.write(digest(kind))
    return python


def main(kind):
    if kind == "oldest":
        return ready(".venv-oldest", kind)
    if os.environ.get("PYTHON"):
        path = shutil.which(os.environ["PYTHON"])
        if path is None:
            stop("PYTHON=%s is not an interpreter" % os.environ["PYTHON"])
        return path
    return ready(".venv", "all" if kind == "site" and has_gpu() else kind)


if __name__ == "__main__":
    print(main(sys.argv[1]))
