"""Which run of a lesson the pages show.

With a GPU: this machine's own run. Without: the committed recording of
``recorded_gpu``; failing that, a run in the interpreter, marked as such.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import gpu
import recordings
from lessons import HASH_VERSION, ROOT, Lesson, find
from recordings import Recording, RecordingError

COMMITTED = ROOT / "docs" / "recordings"
LOCAL = ROOT / "_build" / "runs"
recorded_gpu = ""  # the slug, set from conf.py


@dataclass(frozen=True)
class Run:
    """``state`` is recorded, executed, interpreter or none.

    ``reason`` says why there is no valid recording, where there is none.
    """

    state: str
    recording: Recording | None = None
    reason: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.state in ("recorded", "executed")


def local_home(lesson: Lesson) -> Path:
    return LOCAL / (gpu.slug(gpu.name()) if gpu.name() else "interpreter") / lesson.stem


def committed_home(lesson: Lesson, slug: str) -> Path:
    return COMMITTED / slug / lesson.stem


def load(home: Path, lesson: Lesson) -> Recording:
    """The recording in ``home``. Raises RecordingError if it is not of this code."""
    recording = recordings.read(home)
    manifest = recording.manifest
    if recording.gpu["slug"] != home.parent.name:
        raise RecordingError(f"it was recorded on {recording.gpu['name']}, not {home.parent.name}")
    if manifest["hash_version"] != HASH_VERSION:
        raise RecordingError("it was written by another version of the hash; record again")
    if manifest["code"] != lesson.code_hash():
        raise RecordingError(f"the code has changed since {manifest['date']}; record again")
    if len(recording.outputs) != len(lesson.code()):
        raise RecordingError("outputs.json does not have one output per code cell")
    return recording


@functools.cache
def current(stem: str) -> Run:
    """The run to show for a lesson, without executing anything."""
    lesson, reason = find()[stem], ""
    choices = [("interpreter", local_home(lesson))]
    if gpu.name() and gpu.can_run_triton():
        choices = [("executed", local_home(lesson))]
    else:
        choices.insert(0, ("recorded", committed_home(lesson, recorded_gpu)))
    for state, home in choices:
        try:
            return Run(state, load(home, lesson), reason)
        except RecordingError as error:
            reason = reason or str(error)
    return Run("none", None, reason)


def fingerprint(stem: str) -> str:
    """What a page that shows the lesson's run depends on, in one string."""
    lesson, run = find()[stem], current(stem)
    manifest = run.recording.manifest if run.recording else {}
    return f"{run.state} {run.reason} {manifest} {lesson.path.stat().st_mtime_ns}"


def depend(env, stem: str) -> None:
    """Have the page being read read again whenever the run to show changes."""
    shown(env).setdefault(env.docname, {})[stem] = fingerprint(stem)


def shown(env) -> dict[str, dict[str, str]]:
    """For each page the lessons whose runs it shows, as they were when it was read."""
    if not hasattr(env, "shown_runs"):
        env.shown_runs = {}
    return env.shown_runs


def outdated(app, env, added, changed, removed) -> list[str]:
    return [
        docname
        for docname, stems in shown(env).items()
        if docname in env.found_docs
        and any(stem not in find() or fingerprint(stem) != old for stem, old in stems.items())
    ]


def forget(app, env, docname) -> None:
    shown(env).pop(docname, None)
