"""Sphinx-Gallery, with its runs recorded and replayed, and its furniture ours.

Sphinx-Gallery has no hook around a script's execution: `execute_script` is
wrapped (its version is pinned, and a test guards this seam).
"""

import functools
import os
import re
from datetime import date
from pathlib import Path

import figures
import gpu
import recordings
import runs
from lessons import find, of_docname, select
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx_gallery import gen_rst

log = logging.getLogger(__name__)

# Where Python's packages lie on the machine of a run: a warning names its file.
PACKAGES = re.compile(r"/(?:[\w.+-]+/)+(?:site|dist)-packages/")


def execute_script(script_blocks, script_vars, gallery_conf, file_conf):
    """Replay the lesson's run, after executing it where there is none to replay."""
    lesson = find()[Path(script_vars["src_file"]).stem.split("_", 1)[1]]
    script_vars.update(example_globals={}, memory_delta=0.0)
    nothing = [""] * len(script_blocks), 0.0
    run, wanted = runs.current(lesson.stem), None
    if "RECORD" in os.environ:
        wanted = _to_record().get(lesson.stem)
        if not wanted and run.state == "none":
            return nothing
    if run.state == "none" or wanted:
        if not gpu.can_run_triton():
            log.warning("%s was not executed: %s", lesson.stem, run.reason, type="recordings")
            return nothing
        if gpu.name() is None:
            log.warning("%s is interpreted: %s", lesson.stem, run.reason, type="recordings")
        elif not wanted:
            print(f"executing {lesson.stem} on {gpu.name()} ...", flush=True)
        outputs, seconds = _execute(
            lesson, wanted, script_blocks, script_vars, gallery_conf, file_conf
        )
        if not script_vars.get("passing"):
            return outputs, seconds
        run = runs.current(lesson.stem)
    script_vars["passing"] = True
    outputs = iter(run.recording.outputs)
    return [next(outputs) if b.type == "code" else "" for b in script_blocks], 0.0


def _execute(lesson, wanted, script_blocks, script_vars, gallery_conf, file_conf):
    if wanted:
        print(f"\n[{wanted}] {lesson.stem} on {gpu.name()} ...", flush=True)
    import matplotlib

    with matplotlib.rc_context(fname=figures.STYLE):
        outputs, seconds = _sphinx_gallery_execute(
            script_blocks, script_vars, gallery_conf, file_conf
        )
    if not script_vars.get("passing"):
        if wanted:
            print(f"[{wanted}] {lesson.stem} raised; its old recording is kept", flush=True)
        return outputs, seconds
    variables = script_vars["example_globals"]
    manifest = gpu.describe() | {
        "lesson": lesson.stem,
        "code": lesson.code_hash(),
        "date": date.today().isoformat(),
        "seconds": round(seconds, 1),
    }
    home = runs.local_home(lesson)
    recordings.write(
        home,
        manifest,
        [PACKAGES.sub("", o) for b, o in zip(script_blocks, outputs) if b.type == "code"],
        [Path(p).with_suffix(".svg") for p in script_vars["image_path_iterator"].paths],
        variables.get("results", []),
        variables.get("excerpts", {}),
    )
    if wanted:
        recordings.publish(home, runs.committed_home(lesson, manifest["gpu"]["slug"]))
        print(f"[{wanted}] {lesson.stem} recorded in {seconds:.1f} s", flush=True)
    runs.current.cache_clear()
    return outputs, seconds


@functools.cache
def _to_record() -> dict[str, str]:
    """Stem -> "k/n" of the lessons that `make record` has to record."""
    force = os.environ.get("FORCE") == "1"
    stems = [lesson.stem for lesson in select(os.environ["RECORD"]) if force or not _fresh(lesson)]
    return {stem: f"{k}/{len(stems)}" for k, stem in enumerate(stems, 1)}


def _fresh(lesson) -> bool:
    try:
        runs.load(runs.committed_home(lesson, gpu.slug(gpu.name())), lesson)
        return True
    except recordings.RecordingError:
        return False


FURNITURE = [  # what Sphinx-Gallery writes in English around our text, and our directives for it
    (r"\.\. only:: html\n\n    \.\. note::\n        :class: sphx-glr-download-link-note.*?(?=\.\. rst-class)", ""),
    (r"\.\. _sphx_glr_download_.*", ".. lesson-downloads::\n"),
    (r"\.\. raw:: html\n\n  <div id='sg-tag-list'[^\n]*\n", ""),
    (r"\.\. raw:: html\n\n    <div class=\"sphx-glr-thumbnails\">\n(.*?)"
     r"\.\. thumbnail-parent-div-close\n\n\.\. raw:: html\n\n    </div>\n",
     lambda m: "".join(f".. lesson-cards:: {part}\n" for part in re.findall(r":doc:`/lessons/(\w+)/", m[1])[:1])),
]  # fmt: skip


def furnish(app, docname: str, source: list[str]) -> None:
    """Replace what Sphinx-Gallery writes around our text, and insert the card."""
    if not docname.startswith("lessons/"):
        return
    text = source[0]
    for pattern, replacement in FURNITURE:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    if lesson := of_docname(docname):
        head, mark, rest = text.partition(".. GENERATED FROM PYTHON SOURCE LINES")
        text = f"{head}\n.. recorded-card:: {lesson.stem}\n\n{mark}{rest}"
    source[0] = text


def check(app) -> None:
    runs.recorded_gpu = app.config.recorded_gpu
    runs.current.cache_clear()
    try:
        find()
        if "RECORD" in os.environ:
            _to_record()
    except ValueError as error:
        raise ExtensionError(str(error)) from None


def setup(app):
    global _sphinx_gallery_execute
    _sphinx_gallery_execute = gen_rst.execute_script
    gen_rst.execute_script = execute_script
    app.add_config_value("recorded_gpu", "", "env")
    app.connect("builder-inited", check, priority=400)  # before the gallery is generated
    app.connect("source-read", furnish)
    app.connect("env-get-outdated", runs.outdated)
    app.connect("env-purge-doc", runs.forget)
    return {"parallel_read_safe": True}
