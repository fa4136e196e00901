"""Print the Python to use, making .venv first where it is missing or out of date.

    venv.py site    what building the site needs (everything where there is a GPU)
    venv.py all     what lessons and tests need as well

Only the standard library, for any Python 3: it runs before anything is installed.
PYTHON names an interpreter that already has what is needed; it is used as it is.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".requirements")
FILES = {
    "site": ["docs/requirements.txt"],
    "all": ["docs/requirements.txt", "tests/requirements.txt", "requirements.txt"],
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


def installed():
    try:
        with open(STAMP) as file:
            stamp = file.read()
    except OSError:
        return None
    return stamp if run([PYTHON, "-c", ""]).returncode == 0 else None


def main(kind):
    if os.environ.get("PYTHON"):
        path = shutil.which(os.environ["PYTHON"])
        if path is None:
            stop("PYTHON=%s is not an interpreter" % os.environ["PYTHON"])
        return path
    base = base_python()
    if kind == "site" and has_gpu():
        kind = "all"
    stamp = installed()
    if stamp in (digest("all"), digest(kind)):
        return PYTHON
    if not os.access(ROOT, os.W_OK):
        stop("no permission to write .venv in %s; copy the repository to a folder of yours" % ROOT)
    requirements = FILES[kind][-1]
    print("installing %s into .venv ..." % requirements, file=sys.stderr)
    if stamp is None:
        made = run([base, "-m", "venv", "--clear", VENV])
        if made.returncode:
            stop("cannot make .venv: " + (made.stderr + made.stdout).strip().split("\n")[-1])
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, "-r", os.path.join(ROOT, requirements)], stdout=2).returncode:
        stop("pip could not install %s (see above); is there a network?" % requirements)
    with open(STAMP, "w") as file:
        file.write(digest(kind))
    return PYTHON


if __name__ == "__main__":
    print(main(sys.argv[1]))
