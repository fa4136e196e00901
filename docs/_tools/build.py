"""Build the site, or record lessons: what the Makefile's targets call.

build.py html             both languages into _build/html, and the root page
build.py one              only the pages of the lessons in LESSON
build.py gettext          update the catalogs of the translation
build.py record           run the lessons in LESSON on this machine's GPU
build.py serve            show the site on this machine
"""

import gzip
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
BUILD = ROOT / "_build"
HTML = BUILD / "html"


def sphinx(builder: str, out: Path, language: str, *more: str) -> None:
    """Run sphinx-build; end this process with its exit code when it fails."""
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-c", str(ROOT)]
    command += [
        "-d",
        str(BUILD / "doctrees" / f"{builder}-{language}"),
        "-D",
        f"language={language}",
    ]
    command += os.environ.get("SPHINXOPTS", "-q").split()
    code = subprocess.run([*command, str(ROOT / "docs"), str(out), *more]).returncode
    if code:
        sys.exit(code)


def chosen():
    """The lessons that LESSON names. Ends with one line where it names others."""
    from lessons import select

    try:
        return select(os.environ.get("LESSON", ""))
    except ValueError as error:
        sys.exit(f"error: {error}")


def html(only=()) -> None:
    from languages import LANGUAGES, root_page

    start = time.monotonic()
    seconds = []
    for language in LANGUAGES:
        begun = time.monotonic()
        out = HTML / language.code
        pages = [str(ROOT / "docs" / f"{lesson.docname}.rst") for lesson in only]
        sphinx("html", out, language.sphinx, *pages)
        seconds.append(f"{language.code} {time.monotonic() - begun:.1f} s")
    site_url = os.environ.get("SITE_URL", "")
    site_url += "/" * (site_url != "" and not site_url.endswith("/"))
    (HTML / "index.html").write_text(root_page(site_url), "utf-8")
    (HTML / ".nojekyll").touch()
    print(
        f"built {', '.join(seconds)}, {time.monotonic() - start:.1f} s in all: {HTML / 'index.html'}"
    )
    print(page_weight())


def page_weight() -> str:
    """The largest page, compressed as a web server would send it."""
    sizes = {page: len(gzip.compress(page.read_bytes())) for page in HTML.rglob("*.html")}
    page = max(sizes, key=sizes.get)
    return (
        f"{len(sizes)} pages, the largest {sizes[page] / 1e3:.0f} kB gzip: {page.relative_to(HTML)}"
    )


def one() -> None:
    if not os.environ.get("LESSON"):
        sys.exit('error: make one needs LESSON="stem"')
    html(chosen())


def gettext() -> None:
    """Bring the catalogs up to date; changed messages keep their old translation as fuzzy."""
    import polib

    pot, locale = BUILD / "gettext", ROOT / "docs" / "locale"
    shutil.rmtree(pot, ignore_errors=True)
    sphinx("gettext", pot, "en")
    command = [sys.executable, "-m", "sphinx_intl", "update", "-p", str(pot), "-d", str(locale)]
    subprocess.run([*command, "-l", "zh_CN", "-w", "0"], check=True)
    for path in sorted(locale.rglob("*.po")):
        catalog = polib.pofile(str(path), wrapwidth=0)
        catalog.metadata = {
            "Language": "zh_CN",
            "Content-Type": "text/plain; charset=UTF-8",
            "Content-Transfer-Encoding": "8bit",
        }
        catalog.metadata_is_fuzzy = False
        if path.name != "sphinx.po":
            catalog.header = ""
        for entry in catalog.obsolete_entries():
            catalog.remove(entry)
        catalog.save()
        left = len(catalog.untranslated_entries()) + len(catalog.fuzzy_entries())
        if left:
            print(f"{left} messages to translate in {path.relative_to(ROOT)}")


def record() -> None:
    import gpu

    if gpu.name() is None:
        sys.exit("error: make record needs an NVIDIA GPU and its driver; this machine has none")
    if not gpu.can_run_triton():
        sys.exit("error: make record needs torch, triton and matplotlib; install requirements.txt")
    os.environ["RECORD"] = " ".join(lesson.stem for lesson in chosen())
    print(f"recording on {gpu.name()}: {os.environ['RECORD']}", flush=True)
    # The pages are read on the way; what they lack until all is recorded is no news here.
    os.environ["SPHINXOPTS"] = "-q -D suppress_warnings=measured,recordings"
    sphinx("dummy", BUILD / "record", "en")


def serve() -> None:
    if not (HTML / "index.html").exists():
        sys.exit("error: nothing is built yet; run make html first")
    port = int(os.environ.get("PORT", "8000"))
    handler = partial(SimpleHTTPRequestHandler, directory=HTML)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        sys.exit(f"error: port {port} cannot be used ({error.strerror}); try PORT=8001")
    print(f"http://127.0.0.1:{port}/ (stop with Ctrl-C)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    commands = {f.__name__: f for f in (html, one, gettext, record, serve)}
    commands[sys.argv[1]]()
