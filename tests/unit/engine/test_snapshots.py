"""Snapshots of a run that trains: when they are taken, what they leave, and what they need."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from attempts import Started, Train
from pool import spec_of
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from samestep import StorageError, parse_spec
from samestep.checkpoint import shared_memory, snapshot
from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.image import Image, Plan
from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import Parts, collect, flatten, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.engine.node import Node, require_room
from samestep.engine.peers import Peers
from samestep.engine.snapshots import Snapshots
from samestep.telemetry.timesheet import AUDIT, SAVE, SNAPSHOT, SNAPSHOT_AT

WAIT_S = 120.0


@pytest.mark.timeout(300)
def test_what_a_killed_run_leaves_is_the_state_of_a_step_and_goes_with_its_end(
    train: Train, tmp_path: Path
) -> None:
    fields = {"batch_size": 6, "shards": 3, "max_steps": 2000}
    checkpoint = {"every_steps": 0, "snapshot_every": 3}
    job = spec_of("Mlp", **fields, mode="local", storage=str(tmp_path), checkpoint=checkpoint)
    uri = str(tmp_path / "run")
    with Started(job) as process:
        deadline, pause = time.monotonic() + WAIT_S, threading.Event()
        while (snapshot.newest(uri) or 0) < 6:
            assert process.is_alive(), "it ended before there was a snapshot"
            assert time.monotonic() < deadline, "no snapshot of step 6"
            pause.wait(0.01)
    step = snapshot.newest(uri)
    assert step is not None
    assert step % 3 == 0
    left = snapshot.load(uri, step)
    assert len(os.listdir(shared_memory.folder_of(uri))) <= 2 * snapshot.NUM_IMAGES
    calm = train({**job, "max_steps": step, "mode": "auto"}, "calm")
    assert state_sha256(left.state) == calm.digest
    short = {**job, "max_steps": step + 1}
    with Started(short) as process:
        assert process.digest() == train(short, "longer").digest
    assert not shared_memory.folder_of(uri).exists()


@pytest.mark.parametrize("every", [0, 2, "auto"])
def test_bits_do_not_depend_on_snapshots(train: Train, every: int | str) -> None:
    checkpoint = {"every_steps": 3, "snapshot_every": every}
    runs = [
        train(spec_of("Conv", max_steps=8, checkpoint=checkpoint), f"run-{size}", size)
        for size in (1, 2)
    ]
    reference = train(spec_of("Conv", max_steps=8, checkpoint={"every_steps": 0}), "reference")
    assert {run.digest for run in runs} == {reference.digest}
    for run in runs:
        assert not shared_memory.folder_of(run.storage.uri).exists()
        steps = [info.step for info in list_checkpoints(run.storage)]
        assert steps == [3, 6, 8]
        load_checkpoint(Storage.at(str(run.folder)), 6)


def test_a_step_tells_what_was_kept_before_it_and_nothing_where_nothing_was(train: Train) -> None:
    checkpoint = {"every_steps": 3, "snapshot_every": 2}
    job = spec_of("Conv", max_steps=9, checkpoint=checkpoint, incidents={"audit_every": 4})
    for size in (1, 2):
        began_s = time.time()
        timings = [record.timing for record in train(job, f"run-{size}", size).steps()]
        told = {
            name: [step for step, timing in enumerate(timings) if name in timing]
            for name in (SAVE, SNAPSHOT, AUDIT)
        }
        assert told == {SAVE: [3, 6], SNAPSHOT: [2, 4, 6, 8], AUDIT: [3, 7]}
        moments = [timing[SNAPSHOT_AT] for timing in timings if SNAPSHOT_AT in timing]
        assert moments == sorted(moments)
        assert all(began_s < moment < time.time() for moment in moments)
        assert all(timing[name] > 0 for timing in timings for name in told if name in timing)


def parts_of(optimizer: str = "sgd") -> Parts:
    model = nn.Linear(1000, 100, bias=False)
    made = {
        "sgd": lambda: SGD(model.parameters(), lr=0.1),
        "momentum": lambda: SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: AdamW(model.parameters()),
        "rmsprop": lambda: RMSprop(model.parameters()),
        "rmsprop, all": lambda: RMSprop(model.parameters(), momentum=0.9, centered=True),
    }
    return Parts(model=model, optimizer=made[optimizer]())


class Clock:
    """Moves on by what a step or a copy takes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("longer_s", [0.0, 0.05])
def test_the_interval_is_such_that_copies_and_what_they_slow_take_less_than_a_hundredth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer_s: float
) -> None:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", str(tmp_path))
    clock = Clock()
    parts = parts_of()

    def records() -> list[dict[str, Any]]:
        clock.now_s += 0.05  # a copy takes this long
        return [{"step": 1}]

    snapshots = Snapshots(
        spec=parse_spec({"workload": "a:B", "batch_size": 1, "epochs": 1}),
        parts=parts,
        records=records,
        peers=Peers(None),
        node=Node(local_rank=0, local_size=1),
        run_uri="/a/run",
        attempt=1,
        first_step=10,
        monotonic=clock,
    )
    taken = []
    for step in itertools.count(11):
        clock.now_s += 0.25  # a step takes this long
        if taken and step == taken[-1] + 2:
            clock.now_s += longer_s  # and one that shares its time with hashing
        snapshots.after_exchange()
        if snapshots.is_due(step):
            snapshots.take(step, extras={})
            taken.append(step)
        if len(taken) == 8:
            break
    snapshots.close()
    *first, fourth, fifth, sixth, seventh, last = (
        later - one for one, later in itertools.pairwise([10, *taken])
    )
    assert first == [3, 3, 3]  # until the cost is known
    for apart in (fourth, fifth, sixth, seventh, last):
        # The clock's steps are all alike, but for those few that are not believed at first.
        assert 0.0055 < (0.05 + longer_s) / (apart * 0.25) < 0.0075
    assert snapshots.cost_s == pytest.approx(0.05)
    assert snapshots.whole_at_s is not None
    assert snapshot.newest("/a/run") == taken[-2]  # the last one is not known to be whole yet
    assert snapshot.load("/a/run", taken[-2]).records == [{"step": 1}]


@pytest.mark.parametrize(("first_step", "due"), [(0, [5, 10]), (7, [10, 15]), (10, [11, 15])])
def test_a_restart_does_not_stretch_the_interval_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int, due: list[int]
) -> None:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", str(tmp_path))
    job = {"workload": "a:B", "batch_size": 1, "epochs": 1, "checkpoint": {"snapshot_every": 5}}
    snapshots = Snapshots(
        spec=parse_spec(job),
        parts=parts_of(),
        records=list,
        peers=Peers(None),
        node=Node(local_rank=0, local_size=1),
        run_uri="/a/run",
        attempt=2,
        first_step=first_step,
    )
    taken = []
    for step in range(first_step + 1, 16):
        snapshots.after_exchange()
        if snapshots.is_due(step):
            snapshots.take(step, extras={})
            taken.append(step)
    snapshots.close()
    assert taken[:2] == due


def test_there_are_never_more_than_three_images_and_always_a_whole_one_over_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", str(tmp_path))
    parts, folder, waiting = parts_of(), shared_memory.folder_of("/a/run"), threading.Event()
    plan = Plan.of(flatten(collect(parts, step=1, extras={}))[0])

    def images() -> set[str]:
        names = set(os.listdir(folder))
        return {name for name in names if not name.endswith((snapshot.HEADER_SUFFIX, ".tmp"))}

    def until(expected: set[str]) -> None:
        deadline = time.monotonic() + 20.0
        while images() != expected:
            assert len(images()) <= snapshot.NUM_IMAGES, images()
            assert time.monotonic() < deadline, (images(), expected)
            waiting.wait(0.005)

    old: set[str] = set()
    for attempt in (1, 2):
        own = [f"00000{attempt}-{name}" for name in ("checkpoint", "snapshot-0", "snapshot-1")]
        first = 10 * attempt + 1
        snapshots = Snapshots(
            spec=parse_spec(
                {"workload": "a:B", "batch_size": 1, "max_steps": 90}
                | {"checkpoint": {"snapshot_every": 2}}
            ),
            parts=parts,
            records=tuple,
            peers=Peers(None),
            node=Node(local_rank=0, local_size=1),
            run_uri="/a/run",
            attempt=attempt,
            first_step=first,
        )
        # As `Saving` gets the one of checkpoints.
        Image.shared(shared_memory.make_folder("/a/run") / own[0], plan.num_bytes)
        snapshots.warm(plan)
        until({*own[:2], *old})
        for step in range(first + 1, first + 8):
            snapshots.after_exchange()
            if step > first + 1 and step % 2:  # the first is whole: the second has its memory
                until(set(own))
            assert len(images()) <= snapshot.NUM_IMAGES
            assert (snapshot.newest("/a/run") is not None) == (attempt == 2 or step > first + 1)
            if snapshots.is_due(step):
                snapshots.take(step, extras={})
        snapshots.close()
        newest = snapshot.newest("/a/run")
        assert newest == first + 5
        # Killed: everything stays, and the next attempt gives all but the newest back.
        old = {own[1]}


@pytest.mark.parametrize(
    ("optimizer", "copies", "needed"),
    [
        *(("sgd", 1, "0.4"), ("momentum", 1, "0.8"), ("adamw", 1, "1.2"), ("adamw", 3, "3.6")),
        *(("rmsprop", 1, "0.8"), ("rmsprop", 3, "2.4"), ("rmsprop, all", 1, "1.6")),
    ],
)
def test_too_little_shared_memory_is_refused_with_the_size_needed(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, copies: int, needed: str
) -> None:
    monkeypatch.setenv("SAMESTEP_SHARED_MEMORY", "/proc")  # which has no room at all
    with pytest.raises(StorageError) as caught:
        require_room(parts_of(optimizer), Peers(None), "/a/run", snapshots=copies == 3)
    text = str(caught.value)
    assert f"worker 0 has 0.0 MB of shared memory left in /proc; {needed} MB are needed" in text
    assert ("set checkpoint.snapshot_every: 0" in text) == (copies == 3)
