"""A recording is read only when whole, and a failing write never harms the old one."""

import hashlib
import json
import signal
import subprocess
import sys

import pytest
import recordings
from mini_site import ROOT
from recordings import RecordingError

ROW = {"provider": "triton", "metric": "GB/s", "value": 2.0, "low": 1.0, "high": 3.0, "N": 4}
MANIFEST = {"lesson": "tiny", "code": "0", "date": "2026-01-01", "seconds": 1}
MANIFEST["gpu"] = {"name": "G", "slug": "g"}


@pytest.fixture
def home(tmp_path):
    """A good recording with the text 'old'."""
    write(tmp_path / "tiny", "old", figure(tmp_path))
    return tmp_path / "tiny"


def figure(folder):
    path = folder / "drawn.svg"
    path.write_text("<svg/>")
    return path


def write(home, text, figure, results=(ROW,)):
    recordings.write(home, MANIFEST, [text], [figure], list(results), {"ptx": text})


def test_round_trip(home):
    recording = recordings.read(home)
    assert recording.outputs == ["old"]
    assert recording.results == [ROW]
    assert recording.excerpt("ptx").read_text() == "old"
    assert recording.figure(1).read_text() == "<svg/>"


def cut(home, name):
    path = home / name
    path.write_bytes(path.read_bytes()[:-9])


def unreadable(home, name):
    """A file that is there and cannot be read, not even by root."""
    (home / name).unlink()
    (home / name).symlink_to("/proc/self/mem")


def change_manifest(home, **changes):
    manifest = json.loads((home / "manifest.json").read_text()) | changes
    kept = {key: value for key, value in manifest.items() if value is not None}
    (home / "manifest.json").write_text(json.dumps(kept))


def rewrite(home, name, value):
    """Other content with a checksum that fits, as a program might leave it."""
    text = json.dumps(value)
    (home / name).write_text(text)
    files = json.loads((home / "manifest.json").read_text())["files"]
    change_manifest(home, files=files | {name: hashlib.sha256(text.encode()).hexdigest()})


def rows(*changes):
    return lambda home: rewrite(home, "results.json", [ROW | change for change in changes])


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda home: cut(home, "results.json"), "results.json is not the file that was recorded"),
        (lambda home: cut(home, "manifest.json"), "manifest.json cannot be read"),
        (lambda home: (home / "figure-1.svg").unlink(), "figure-1.svg is missing"),
        (lambda home: (home / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda home: (home / "manifest.json").write_bytes(b"\xff\xff{}"), "cannot be read: 'utf"),
        (lambda home: unreadable(home, "manifest.json"), "manifest.json cannot be read: Input"),
        (lambda home: unreadable(home, "figure-1.svg"), "figure-1.svg cannot be read: Input"),
        (lambda home: change_manifest(home, lesson="other"), "a recording of the lesson 'other'"),
        (lambda home: change_manifest(home, date=None), "manifest.json lacks date"),
        (lambda home: change_manifest(home, date=2026), "date cannot be 2026"),
        (lambda home: change_manifest(home, gpu="G"), "gpu cannot be 'G'"),
        (lambda home: change_manifest(home, gpu={"name": "G"}), "gpu lacks slug"),
        (lambda home: change_manifest(home, seconds=float("nan")), "NaN is not a finite number"),
        (lambda home: change_manifest(home, files={}), "files lacks outputs.json, results.json"),
        (lambda home: rewrite(home, "outputs.json", [1]), "outputs.json does not hold texts only"),
        (lambda home: rewrite(home, "results.json", {}), "results.json is not a list"),
        (lambda home: rewrite(home, "results.json", [1]), "results: 1 is not a dict"),
        (rows({"value": float("nan")}), "results.json cannot be read: NaN"),
        (rows({}, {"value": 2.5}), "stands twice"),
    ],
)
def test_damage_is_named(home, damage, message):
    damage(home)
    with pytest.raises(RecordingError, match=message):
        recordings.read(home)


def test_an_edited_number_is_noticed(home):
    path = home / "results.json"
    path.write_text(path.read_text().replace("2.0", "2.5"))
    with pytest.raises(RecordingError, match="results.json is not the file that was recorded"):
        recordings.read(home)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"value": float("nan")}, "value is not a finite number"),
        ({"value": None}, "value is not a finite number"),
        ({"low": 5.0}, "not between low and high"),
        ({"metric": None}, "has no metric"),
        ({"provider": 3}, "has no provider"),
        ({"N": [4]}, "N is neither a number nor a text"),
        ({"bytes": 1.5}, "bytes is not an integer"),
        ({"dtype": "torch.float32"}, "without 'torch.'"),
        ({"dtype": None}, "dtype is neither a number nor a text"),
    ],
)
def test_results_follow_the_schema(home, tmp_path, changes, message):
    with pytest.raises(RecordingError, match=message):
        write(home, "new", figure(tmp_path), [ROW | changes])
    assert recordings.read(home).outputs == ["old"]


def test_a_case_stands_once_per_provider(home, tmp_path):
    with pytest.raises(RecordingError, match="stands twice"):
        write(home, "new", figure(tmp_path), [ROW, ROW | {"value": 2.5}])
    write(home, "new", figure(tmp_path), [ROW, ROW | {"N": 8}, ROW | {"provider": "torch"}])
    assert len(recordings.read(home).results) == 3


CHILD = """
import os, resource, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {ext!r}]
import test_recording_files as t
{before}
t.write(Path({home!r}), "new", Path({figure!r}))
"""

KILL = """
step = 0
def die(event, args):
    global step
    if event in ("open", "os.rename", "os.mkdir", "shutil.rmtree", "os.remove", "os.rmdir"):
        if {home!r} in str(args[0]):
            step += 1
            if step == {at}:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
"""

FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
"""


def child(home, before):
    paths = {"tests": str(ROOT / "tests"), "ext": str(ROOT / "docs/_ext")}
    code = CHILD.format(
        home=str(home), figure=str(home.parent / "drawn.svg"), before=before, **paths
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_killed_at_any_step(tmp_path):
    """Killed at its k-th step on the disk, for every k: the old or the new recording is whole."""
    seen = set()
    for at in range(1, 100):
        home = tmp_path / str(at) / "tiny"
        home.parent.mkdir()
        write(home, "old", figure(home.parent))
        process = child(home, KILL.format(home=str(home), at=at))
        _, errors = process.communicate()
        [text] = recordings.read(home).outputs
        seen.add(text)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
    assert process.returncode == 0 and at > 10
    assert seen == {"old", "new"}
    assert [path.name for path in home.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_disk_full(home):
    _, errors = child(home, FULL).communicate()
    assert "File too large" in errors
    assert recordings.read(home).outputs == ["old"]
    assert [path.name for path in home.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_two_write_while_one_reads(home):
    """Every recording read on the way is whole, the last one too."""
    again = "for _ in range(20): t.write(Path({0!r}), 'new', Path({1!r}))"
    again = again.format(str(home), str(home.parent / "drawn.svg"))
    writers = [child(home, again) for _ in range(2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.update(recordings.read(home).outputs)
    for writer in writers:
        assert writer.communicate()[1] == "" and writer.returncode == 0
    assert seen <= {"old", "new"}
    assert recordings.read(home).outputs == ["new"]
    assert [path.name for path in home.parent.iterdir() if path.is_dir()] == ["tiny"]
