"""What is left announced by runs whose processes were killed, and who takes it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.checkpoint.storage import Storage
from samestep.telemetry import lease as leases
from samestep.telemetry.targets import announce, announced, withdraw_all_left, withdraw_left


@pytest.fixture
def place(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "runs"))


def elsewhere(run: Storage) -> None:
    """Makes the run's lease one of a process on another machine."""
    leases.acquire(run).release()
    (file,) = run.list()
    written = json.loads(run.read(file)) | {"machine": "another", "released": False}
    run.write(file, json.dumps(written).encode())


def test_only_what_is_certain_to_be_over_is_taken_back(place: Storage) -> None:
    for name in ("alive", "over", "elsewhere", "gone"):
        announce(place.child(name), "127.0.0.1:4711")
    alive = leases.acquire(place.child("alive"))
    leases.acquire(place.child("over")).release()
    elsewhere(place.child("elsewhere"))
    try:
        withdraw_all_left(place)
        assert sorted(announced(place)) == ["alive", "elsewhere"]
        withdraw_left(place.child("alive"))
        assert sorted(announced(place)) == ["alive", "elsewhere"]
        present = leases.holder(place.child("over"))
        assert present is not None
        assert not present.alive
        assert not place.exists("gone")
    finally:
        alive.release()


def test_a_folder_without_announcements_and_one_that_is_not_there_are_left_as_they_are(
    place: Storage,
) -> None:
    withdraw_all_left(place)
    assert not place.exists()
    leases.acquire(place.child("a")).release()
    before = place.child("a").list()
    withdraw_all_left(place)
    withdraw_left(place.child("a"))
    assert place.list() == ["a"]
    assert place.child("a").list() == before
