"""Checkpoints of the real engine: split, written behind the training, the same whoever writes."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from attempts import Run, Started, Train
from pool import spec_of

from samestep.checkpoint import shared_memory
from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.reading import digest_of, load_checkpoint
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError
from samestep.names import Event
from samestep.telemetry.ledger import events

WAIT_S = 120.0


def large(**fields: Any) -> dict[str, Any]:
    given = {"max_steps": 6, "checkpoint": {"every_steps": 2}, "shards": 3, **fields}
    return spec_of("Large", batch_size=6, **given)


def files_of(run: Run, step: int) -> list[str]:
    names = os.listdir(run.folder / "checkpoints" / f"step-{step:08d}")
    return sorted(name for name in names if name.startswith("state-"))


def test_the_digest_is_the_same_however_many_workers_write(train: Train) -> None:
    runs = [train(large(), f"run-{size}", size) for size in (1, 2, 3)]
    assert len({run.digest for run in runs}) == 1
    for size, run in enumerate(runs, 1):
        assert [info.step for info in list_checkpoints(run.storage)] == [2, 4, 6]
        assert files_of(run, 4) == [f"state-0001-{part:05d}.safetensors" for part in range(size)]
        assert digest_of(run.folder) == run.digest
        sizes = [
            (run.folder / "checkpoints/step-00000006" / name).stat().st_size
            for name in files_of(run, 6)
        ]
        assert max(sizes) < 1.2 * min(sizes)
        assert not shared_memory.folder_of(run.storage.uri).exists()
    digests = {load_checkpoint(run.storage, 4)[1].digest for run in runs}
    assert len(digests) == 1


def test_a_checkpoint_of_two_is_restored_by_three_and_by_one(train: Train) -> None:
    straight = train(large(), "straight", 1)
    half = large(max_steps=3)
    assert train(half, "changing", 2).result["step"] == 3
    assert train(large(max_steps=5), "changing", 3).result["step"] == 5
    assert train(large(), "changing", 1).digest == straight.digest


def test_seconds_decide_by_worker_0_alone(train: Train) -> None:
    spec = large(checkpoint={"every_steps": 0, "every_seconds": 1e-6, "keep": 9}, max_steps=4)
    run = train(spec, "run", 2)
    # The first step begins after the time is up, so each step is followed by a save.
    assert [info.step for info in list_checkpoints(run.storage)] == [1, 2, 3, 4]


def test_a_save_that_fails_costs_nothing_but_itself(train: Train, tmp_path: Path) -> None:
    calm = train(large(), "calm", 2)
    blocked = tmp_path / "run" / "checkpoints" / "step-00000002"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder should be")
    run = train(large(), "run", 2)
    assert run.digest == calm.digest
    assert [info.step for info in list_checkpoints(run.storage) if info.whole] == [4, 6]
    (incident,) = events(run.storage, Event.INCIDENT)
    assert "storage-step-00000002" in incident.fields["id"]
    assert "the checkpoint at step 2 could not be saved: worker" in incident.fields["message"]


@pytest.mark.parametrize(("hanging", "like"), [("Hanging", "Base"), ("HangingLarge", "Large")])
def test_a_save_whose_storage_hangs_is_an_incident_that_names_the_worker_and_training_goes_on(
    train: Train, hanging: str, like: str
) -> None:
    spec = large(faults={"hang_timeout_s": 12})
    calm = train({**spec, "workload": f"cases:{like}"}, "calm", 2)
    run = train({**spec, "workload": f"slow_cases:{hanging}"}, "run", 2)
    assert run.digest == calm.digest
    assert [info.step for info in list_checkpoints(run.storage) if info.whole] == [4, 6]
    (incident,) = events(run.storage, Event.INCIDENT)
    assert "storage-step-00000002" in incident.fields["id"]
    # Worker 1 tells of its files, unless it is so late that worker 0 tells for whom it waits.
    text = r": it was waited for 6 s and was still (writing its files: |waiting for worker 1)"
    assert re.search(text, incident.fields["message"])


def test_an_end_that_can_not_be_saved_says_so(train: Train, tmp_path: Path) -> None:
    there = Storage.at(str(tmp_path / "run"))
    spec = {**large(args={"folder": str(tmp_path / "run")}), "workload": "cases:Blocking"}
    run = train(spec, "run", 2)
    assert run.verdict["kind"] == "StorageError:2"
    assert "the last checkpoint, at step 6, could not be saved" in run.verdict["message"]
    assert there.read("checkpoints/step-00000006/manifest.json") == b"of something else"
    assert [info.step for info in list_checkpoints(there) if info.created_s] == [2, 4]
    assert len(events(there, Event.INCIDENT)) == 2  # the outage, and the end of the run


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_state_that_differs_between_workers_is_not_committed(
    train: Train, world_size: int
) -> None:
    fields = {"digest_every": 0, "checkpoint": {"every_steps": 1}, "shards": 3, "max_steps": 9}
    run = train(spec_of("odd:Odd", args={"fault": "weights diverge"}, **fields), "run", world_size)
    assert run.verdict["kind"] == "DivergenceError:1"
    text = "the state after 3 steps differs between workers; odd ones out: worker "
    assert text in run.verdict["message"]
    assert [info.step for info in list_checkpoints(run.storage) if info.whole] == [1, 2]
    (incident,) = events(run.storage, Event.INCIDENT)
    assert "divergence-step-00000003" in incident.fields["id"]


PHASES = {
    "copy": lambda run, memory: set(memory.glob("*-checkpoint")),
    "write": lambda run, memory: set(run.glob("checkpoints/step-*/.state-*")),
    "commit": lambda run, memory: set(run.glob("checkpoints/step-*/values.json")),
    "end": lambda run, memory: set(run.glob("checkpoints/step-*/manifest.json")),
}


@pytest.mark.timeout(300)
def test_kills_in_each_phase_of_a_save_leave_whole_checkpoints_or_none(
    train: Train, tmp_path: Path
) -> None:
    calm = train(large(max_steps=18), "calm", 1)
    checkpoint = {"every_steps": 2, "keep": 50}
    spec = large(max_steps=18, mode="local", storage=str(tmp_path / "runs"), checkpoint=checkpoint)
    run = tmp_path / "runs" / "run"
    memory = shared_memory.folder_of(str(run))
    for phase, seen in PHASES.items():
        before = seen(run, memory)
        with Started(spec) as process:
            deadline, pause = time.monotonic() + WAIT_S, threading.Event()
            while not seen(run, memory) - before:
                assert process.is_alive(), f"it ended before phase {phase} was seen"
                assert time.monotonic() < deadline, f"phase {phase} was not reached"
                # A phase may last milliseconds; until there is a run there is none.
                pause.wait(0 if run.exists() else 0.05)
        for info in list_checkpoints(Storage.at(str(run))):
            if info.whole:
                load_checkpoint(Storage.at(str(run)), info.step)
            else:
                with pytest.raises(CheckpointError, match="it was never finished"):
                    load_checkpoint(Storage.at(str(run)), info.step)
    with Started(spec) as process:
        assert process.digest() == calm.digest
    assert all(info.whole for info in list_checkpoints(Storage.at(str(run))))
    assert not memory.exists()
