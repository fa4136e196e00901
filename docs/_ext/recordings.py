"""Recordings: what one run of a lesson printed, drew and measured, as a folder.

manifest.json   GPU, versions, date, seconds, code hash, SHA-256 of each file
outputs.json    reST that Sphinx-Gallery rendered, one string per code cell
results.json    the lesson's measurements
figure-N.svg    its figures in a neutral ink
excerpts/       its named texts (IR, PTX, device limits)
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lessons import HASH_VERSION

MANIFEST = {
    "lesson": str,
    "code": str,
    "hash_version": int,
    "gpu": dict,
    "date": str,
    "seconds": (int, float),
    "files": dict,
}
RESERVED = {"provider", "metric", "value", "low", "high", "note"}


class RecordingError(ValueError):
    """A recording that cannot be used, and why."""


@dataclass(frozen=True)
class Recording:
    home: Path
    manifest: dict
    outputs: list[str]
    results: list[dict]

    @property
    def gpu(self) -> dict:
        return self.manifest["gpu"]

    def excerpt(self, name: str) -> Path:
        return self.home / "excerpts" / name

    def figure(self, number: int) -> Path:
        return self.home / f"figure-{number}.svg"


def write(home: Path, manifest: dict, outputs, figures, results, excerpts) -> None:
    """Write a recording beside ``home``, then put it in place of the old one.

    Whatever goes wrong before the last step (disk full, killed), the old
    recording stays; `read` finds it even between the two renames. Two that
    write at the same time take turns.
    """
    check_results(results)
    with _aside(home) as fresh:
        (fresh / "excerpts").mkdir(parents=True)
        for number, figure in enumerate(figures, 1):
            shutil.copyfile(figure, fresh / f"figure-{number}.svg")
        for name, text in excerpts.items():
            (fresh / "excerpts" / name).write_text(text, "utf-8")
        _dump(fresh / "outputs.json", outputs)
        _dump(fresh / "results.json", results)
        files = {
            path.relative_to(fresh).as_posix(): _sha256(path)
            for path in sorted(fresh.rglob("*"))
            if path.is_file()
        }
        _dump(fresh / "manifest.json", manifest | {"hash_version": HASH_VERSION, "files": files})
        _check(fresh)


def publish(source: Path, home: Path) -> None:
    """Copy the recording ``source`` to ``home``, in place of the old one."""
    with _aside(home) as fresh:
        shutil.copytree(source, fresh)
        _check(fresh)


@contextlib.contextmanager
def _aside(home: Path):
    """A folder beside ``home`` that takes its place when the block succeeds."""
    home.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = home.with_name(f"{home.name}.new"), _old(home)
    with _locked(home.parent):
        _recover(home)
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            yield fresh
            shutil.rmtree(old, ignore_errors=True)
            if home.exists():
                home.rename(old)
            fresh.rename(home)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            _recover(home)
            raise
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path):
    """Keep other processes away from the recordings in a folder, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks files only
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(home: Path) -> Recording:
    """Read and check a recording. Raises RecordingError, saying what is wrong."""
    if not home.parent.is_dir():
        raise RecordingError("there is no recording")
    with _locked(home.parent):
        _recover(home)
        return _check(home)


def _check(home: Path) -> Recording:
    if not home.is_dir():
        raise RecordingError("there is no recording")
    manifest = _load(home / "manifest.json", dict)
    if missing := MANIFEST.keys() - manifest.keys():
        raise RecordingError(f"manifest.json lacks {', '.join(sorted(missing))}")
    for key, kind in MANIFEST.items():
        if not isinstance(manifest[key], kind):
            raise RecordingError(f"manifest.json: {key} cannot be {manifest[key]!r}")
    if missing := {"name", "slug"} - manifest["gpu"].keys():
        raise RecordingError(f"manifest.json: gpu lacks {', '.join(sorted(missing))}")
    if manifest["lesson"] != home.name.removesuffix(".new"):
        raise RecordingError(f"it is a recording of the lesson '{manifest['lesson']}'")
    if missing := {"outputs.json", "results.json"} - manifest["files"].keys():
        raise RecordingError(f"manifest.json: files lacks {', '.join(sorted(missing))}")
    for name, digest in manifest["files"].items():
        if _sha256(home / name) != digest:
            raise RecordingError(f"{name} is not the file that was recorded (cut off or edited)")
    outputs = _load(home / "outputs.json", list)
    if not all(isinstance(output, str) for output in outputs):
        raise RecordingError("outputs.json does not hold texts only")
    results = _load(home / "results.json", list)
    check_results(results)
    return Recording(home, manifest, outputs, results)


def check_results(results: list[dict]) -> None:
    """Check measurements against the schema. Raises RecordingError."""
    seen = set()
    for row in results:
        where = f"results: {row!r}"
        if not isinstance(row, dict):
            raise RecordingError(f"{where} is not a dict")
        for key in ("provider", "metric"):
            if not isinstance(row.get(key), str):
                raise RecordingError(f"{where} has no {key}")
        for key in ("value", "low", "high"):
            number = row.get(key, None if key == "value" else row.get("value"))
            if type(number) not in (int, float) or not math.isfinite(number):
                raise RecordingError(f"{where}: {key} is not a finite number")
        if not row.get("low", row["value"]) <= row["value"] <= row.get("high", row["value"]):
            raise RecordingError(f"{where}: value is not between low and high")
        for key, value in case(row).items():
            if type(value) not in (int, float, str, bool):
                raise RecordingError(f"{where}: {key} is neither a number nor a text")
        if type(row.get("bytes", 0)) is not int:
            raise RecordingError(f"{where}: bytes is not an integer")
        if str(row.get("dtype")).startswith("torch."):
            raise RecordingError(f"{where}: write the dtype without 'torch.'")
        key = (row["provider"], row["metric"], *sorted(case(row).items()))
        if key in seen:
            raise RecordingError(f"{where} stands twice")
        seen.add(key)


def case(row: dict) -> dict:
    """The part of a row that is the same for all providers compared."""
    return {key: value for key, value in row.items() if key not in RESERVED}


def _old(home: Path) -> Path:
    return home.with_name(f"{home.name}.old")


def _recover(home: Path) -> None:
    if not home.exists() and _old(home).exists():
        _old(home).rename(home)


def _dump(path: Path, value) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _load(path: Path, kind: type):
    try:
        value = json.loads(_bytes(path), parse_constant=_refuse)
    except ValueError as error:
        raise RecordingError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise RecordingError(f"{path.name} is not a {kind.__name__}")
    return value


def _refuse(constant: str):
    raise ValueError(f"{constant} is not a finite number")


def _sha256(path: Path) -> str:
    return hashlib.sha256(_bytes(path)).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordingError(f"{path.name} is missing") from None
    except OSError as error:
        raise RecordingError(f"{path.name} cannot be read: {error.strerror}") from None
