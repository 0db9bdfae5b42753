"""Snapshots: a state in shared memory, found by run, verified, and given back."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from samestep.checkpoint import shared_memory, snapshot
from samestep.checkpoint.image import Image, Plan
from samestep.checkpoint.split import split
from samestep.checkpoint.state import State, flatten, state_sha256
from samestep.errors import CheckpointError, StorageError
from samestep.exact.digest import live_digest

RUN = "/somewhere/runs/one"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", str(tmp_path))
    return tmp_path


def state_of(step: int) -> State:
    torch.manual_seed(step)
    tensors = {
        "model/w": torch.randn(30, 7).t(),
        "model/none": torch.zeros(0, 3),
        "model/step": torch.tensor(step),
        "buffer/half": torch.randn(9).bfloat16(),
    }
    return State(step=step, tensors=tensors, values={"extras": {"kept": torch.arange(3)}})


def take(step: int, *, attempt: int = 1, name: str = "snapshot-0", records: int = 0) -> Path:
    tensors, values_json = flatten(state_of(step))
    plan = Plan.of(tensors)
    path = snapshot.image_path(shared_memory.make_folder(RUN), attempt, name)
    snapshot.drop_header(path)
    image = Image.shared(path, plan.num_bytes)
    image.fill(plan, tensors, split(plan.sized(), 1)[0])
    assert snapshot.image_digest(image, plan) == live_digest(tensors)
    numbered = [{"step": n} for n in range(records)]
    snapshot.write_header(image, plan, step=step, values_json=values_json, records=numbered)
    return path


def test_a_state_comes_back_bit_for_bit_with_strides_and_records() -> None:
    take(7, records=2)
    assert snapshot.newest(RUN) == 7
    loaded = snapshot.load(RUN, 7)
    assert state_sha256(loaded.state) == state_sha256(state_of(7))
    assert loaded.state.tensors["model/w"].stride() == (1, 7)
    assert loaded.records == [{"step": 0}, {"step": 1}]


def test_the_newest_counts_and_other_runs_do_not() -> None:
    take(7)
    take(9, name="snapshot-1")
    assert snapshot.newest(RUN) == 9
    assert snapshot.newest(RUN + "-2") is None
    with pytest.raises(CheckpointError, match="no snapshot of step 8"):
        snapshot.load(RUN, 8)


def test_an_image_about_to_be_overwritten_is_no_snapshot() -> None:
    path = take(7)
    take(9, name="snapshot-1")
    snapshot.drop_header(path)
    assert snapshot.newest(RUN) == 9


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "header"])
def test_what_does_not_fit_its_digest_is_refused(damage: str) -> None:
    path = take(7)
    if damage == "bit":
        data = bytearray(path.read_bytes())
        data[140] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        os.truncate(path, 64)
    elif damage == "gone":
        path.unlink()
    else:
        Path(f"{path}.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"can't be used|no snapshot of step 7"):
        snapshot.load(RUN, 7)


def test_an_attempt_keeps_the_newest_of_those_before_until_it_has_its_own(memory: Path) -> None:
    take(5)
    take(7, name="snapshot-1")
    take(6, attempt=2, name="checkpoint")
    snapshot.begin_attempt(RUN, 2)
    folder = shared_memory.folder_of(RUN)
    assert sorted(os.listdir(folder)) == ["000001-snapshot-1", "000001-snapshot-1.json"]
    take(8, attempt=2)
    snapshot.drop_others(RUN, 2)
    assert sorted(os.listdir(folder)) == ["000002-snapshot-0", "000002-snapshot-0.json"]


def test_a_run_is_removed_and_what_others_left_long_ago_too(memory: Path) -> None:
    take(7)
    old = memory / "samestep-other-0123456789abcdef"
    old.mkdir()
    (old / "000001-snapshot-0").write_bytes(b"left")
    long_ago = time.time() - 2 * shared_memory.STALE_S
    recent = memory / "samestep-recent-0123456789abcdef"
    recent.mkdir()
    for path in (old / "000001-snapshot-0", old):
        os.utime(path, (long_ago, long_ago))
    shared_memory.make_folder(RUN)
    assert not old.exists()
    assert recent.exists()
    shared_memory.remove(RUN)
    shared_memory.remove(RUN)
    assert snapshot.newest(RUN) is None


def test_a_folder_that_can_not_be_made_is_told_with_the_setting(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", str(memory / "nowhere"))
    with pytest.raises(StorageError, match="set SAMESTEP_SHARED_MEMORY to another folder"):
        shared_memory.make_folder(RUN)


def test_a_folder_that_goes_while_it_is_looked_for_is_no_error_and_a_file_is_one(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = memory / "there"
    folder.mkdir()
    mkdir = os.mkdir

    def goes(path: str | Path, *args: int) -> None:
        try:
            mkdir(path, *args)
        finally:
            folder.rmdir()

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", goes)
        shared_memory.ensure(folder)
    assert not folder.exists()
    folder.write_text("in the way")
    with pytest.raises(FileExistsError):
        shared_memory.ensure(folder)


def test_images_are_made_although_a_worker_that_fails_takes_the_folder_away() -> None:
    over = threading.Event()

    def fail_again_and_again() -> None:
        while not over.is_set():
            shared_memory.remove(RUN)

    thread = threading.Thread(target=fail_again_and_again, daemon=True)
    thread.start()
    try:
        for number in range(300):
            path = snapshot.image_path(shared_memory.make_folder(RUN), number, "snapshot-0")
            assert Image.shared(path, 64).data.nbytes == 64
    finally:
        over.set()
        thread.join()
