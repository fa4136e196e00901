"""A recording is read only when whole, and a failing write never harms the old one."""

import json
import signal
import subprocess
import sys

import pytest
import recordings
from mini_site import ROOT
from recordings import RecordingError

ROW = {"provider": "triton", "metric": "GB/s", "value": 2.0, "low": 1.0, "high": 3.0, "N": 4}
MANIFEST = {"lesson": "tiny", "code": "0", "gpu": {"name": "G"}, "date": "2026-01-01", "seconds": 1}


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


def damage_json(home):
    path = home / "results.json"
    path.write_text(path.read_text()[:20])


def damage_manifest(home):
    path = home / "manifest.json"
    path.write_text(path.read_text()[:-9])


def drop_figure(home):
    (home / "figure-1.svg").unlink()


def drop_manifest(home):
    (home / "manifest.json").unlink()


def edit_number(home):
    path = home / "results.json"
    path.write_text(path.read_text().replace("2.0", "2.5"))


def other_lesson(home):
    change_manifest(home, lesson="other")


def no_date(home):
    manifest = json.loads((home / "manifest.json").read_text())
    del manifest["date"]
    (home / "manifest.json").write_text(json.dumps(manifest))


def change_manifest(home, **changes):
    manifest = json.loads((home / "manifest.json").read_text()) | changes
    (home / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_json, "results.json is not the file that was recorded"),
        (damage_manifest, "manifest.json cannot be read"),
        (drop_figure, "figure-1.svg is missing"),
        (drop_manifest, "manifest.json is missing"),
        (edit_number, "results.json is not the file that was recorded"),
        (other_lesson, "a recording of the lesson 'other'"),
        (no_date, "manifest.json lacks date"),
    ],
)
def test_damage_is_named(home, damage, message):
    damage(home)
    with pytest.raises(RecordingError, match=message):
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
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_killed_at_any_step(tmp_path):
    """Killed at its k-th step on the disk, for every k: the old or the new recording is whole."""
    seen = set()
    for at in range(1, 100):
        home = tmp_path / str(at) / "tiny"
        home.parent.mkdir()
        write(home, "old", figure(home.parent))
        result = child(home, KILL.format(home=str(home), at=at))
        [text] = recordings.read(home).outputs
        seen.add(text)
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
    assert result.returncode == 0 and at > 10
    assert seen == {"old", "new"}
    assert [path.name for path in home.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_disk_full(home):
    result = child(home, FULL)
    assert "File too large" in result.stderr
    assert recordings.read(home).outputs == ["old"]
    assert [path.name for path in home.parent.iterdir() if path.is_dir()] == ["tiny"]
