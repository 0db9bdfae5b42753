from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from samestep import scratch
from samestep.scratch import make_scratch_folder, scratch_folder, sweep

MAKES_ONE = """
import sys
from samestep.scratch import make_scratch_folder
folder = make_scratch_folder("test")
(folder / "file").write_text("something")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def maker() -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_there_for_the_time_of_a_block(place: Path) -> None:
    with scratch_folder("test") as folder:
        (folder / "below").mkdir()
        assert folder.parent == place
        assert folder.name.startswith("samestep-test-")
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_when_the_next_one_makes_its_own(place: Path) -> None:
    process, left = maker()
    with process:
        sweep()
        assert (left / "file").exists()  # its process lives
        process.send_signal(signal.SIGKILL)
    assert left.exists()
    own = make_scratch_folder("test")
    assert list(place.iterdir()) == [own]


def test_another_process_of_the_same_number_keeps_nothing(place: Path) -> None:
    own = make_scratch_folder("test")
    parts = own.name.split(".")
    before = place / ".".join([parts[0], str(os.getpid()), "1-x"])
    before.mkdir()
    sweep()
    assert list(place.iterdir()) == [own]


@pytest.mark.parametrize("name", ["samestep-job", "samestep-test-1.2", "other-test-1.2.3-x"])
def test_other_folders_stay(place: Path, name: str) -> None:
    (place / name).mkdir()
    sweep()
    assert (place / name).exists()


def test_folders_of_other_containers_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the folder; what processes there are in them can't be seen from here."""
    process, left = maker()
    with process:
        process.send_signal(signal.SIGKILL)
    with monkeypatch.context() as patched:
        patched.setattr(scratch, "_namespace", lambda: 1)
        sweep()
        assert left.exists()
    sweep()
    assert not left.exists()
