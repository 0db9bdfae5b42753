from __future__ import annotations

import itertools
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.checkpoint.storage import Storage
from samestep.errors import RecorderError
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.link import InProcess, Link, Target
from samestep.telemetry.record_queue import RecordQueue
from samestep.telemetry.recorder import Recorder

MakeStep = Callable[..., Any]
FAST_S = 0.01
PATIENCE_S = 20.0


class Lossy:
    """Does every call, and loses every other answer; refuses some calls before that too."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.num_calls = 0
        self.num_lost = 0

    def call(self, method: str, *args: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % 5 == 0:
            raise ConnectionError("no route")
        answer = self._target.call(method, *args)
        if self.num_calls % 2 == 0:
            self.num_lost += 1
            raise TimeoutError("the answer was lost")
        return answer


class Mortal:
    """Reaches a recorder that dies after every third call, and is made anew at the next."""

    def __init__(self, make: Callable[[], Recorder]) -> None:
        self._make = make
        self.recorder: Recorder | None = make()
        self.num_deaths = 0
        self._num_calls = 0

    def call(self, method: str, *args: Any) -> Any:
        if self.recorder is None:
            self.recorder = self._make()
        self._num_calls += 1
        answer = getattr(self.recorder, method)(*args)
        if self._num_calls % 3 == 0:
            self.recorder = None
            self.num_deaths += 1
            raise ConnectionError("the recorder died")
        return answer


class Gate:
    """Holds every call back until it is opened."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[int] = []

    def call(self, method: str, *args: Any) -> Any:
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        self.batches.append(len(args[3]))
        return self._target.call(method, *args)


class Away:
    def __init__(self) -> None:
        self.called = threading.Event()

    def call(self, method: str, *args: Any) -> Any:
        self.called.set()
        raise ConnectionError("nobody there")


@pytest.fixture
def make_recorder(run: Storage) -> Callable[[], Recorder]:
    job = dump_spec(parse_spec({"workload": "a:A", "batch_size": 8, "max_steps": 100}))
    return lambda: Recorder(run.uri, run="r", spec_yaml=job, lease=False)


@pytest.fixture
def recorder(make_recorder: Callable[[], Recorder]) -> Recorder:
    made = make_recorder()
    made.begin_attempt({"start_step": 0, "mode": "local", "world_size": 1})
    return made


@pytest.fixture
def connect() -> Iterator[Callable[..., Link]]:
    """Makes links of attempt 1 that ask often, and closes them at the end."""
    links: list[Link] = []

    def make(target: Target, **options: Any) -> Link:
        link = Link(target, 1, "0", **{"interval_s": FAST_S, "timeout_s": PATIENCE_S, **options})
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()


def until(condition: Callable[[], bool]) -> None:
    waiting, end = threading.Event(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        waiting.wait(FAST_S)


def logged(run: Storage) -> list[int]:
    return [data["step"] for data in read_ledger(run) if data["type"] == "step"]


def test_what_is_recorded_is_in_the_ledger_after_a_flush(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    link = connect(InProcess(recorder), interval_s=3600.0)
    for step in range(5):
        link.record(make_step(step).to_json())
    link.flush()
    assert logged(run) == [0, 1, 2, 3, 4]
    link.flush()


def test_records_are_delivered_without_a_flush(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    connect(InProcess(recorder)).record(make_step(0).to_json())
    until(lambda: logged(run) == [0])


def test_with_lost_answers_every_record_arrives_once_and_in_order(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    target = Lossy(InProcess(recorder))
    link = connect(target)
    for step in range(20):
        link.record(make_step(step).to_json())
        if step % 4 == 0:
            link.flush()
    link.flush()
    assert logged(run) == list(range(20))
    assert target.num_lost >= 2
    assert recorder.status()["redone"] == 0


def test_a_recorder_that_dies_again_and_again_misses_nothing(
    run: Storage,
    make_recorder: Callable[[], Recorder],
    connect: Callable[..., Link],
    make_step: MakeStep,
) -> None:
    target = Mortal(make_recorder)
    assert target.recorder is not None
    target.recorder.begin_attempt({"start_step": 0, "mode": "local", "world_size": 1})
    link = connect(target)
    for step in range(30):
        link.record(make_step(step).to_json())
        if step % 3 == 0:
            link.flush()
    link.flush()
    assert logged(run) == list(range(30))
    assert target.num_deaths >= 3


def test_recording_never_waits_for_the_recorder(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    gate = Gate(InProcess(recorder))
    link = connect(gate)
    assert gate.entered.wait(PATIENCE_S)
    for step in range(100):
        link.record(make_step(step).to_json())
    gate.open.set()
    link.flush()
    assert logged(run) == list(range(100))
    assert max(gate.batches) == 100


def spooled_files() -> int:
    """Open files of this process that have no name: what queues spool into."""
    folder, found = Path("/proc/self/fd"), 0
    for entry in folder.iterdir():
        with suppress(OSError):
            found += os.readlink(entry).startswith(f"{tempfile.gettempdir()}/")
    return found


def test_what_memory_can_not_hold_goes_to_a_file_and_the_trainer_never_waits(
    run: Storage,
    recorder: Recorder,
    connect: Callable[..., Link],
    make_step: MakeStep,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = spooled_files()
    gate = Gate(InProcess(recorder))
    link = connect(gate, queue=RecordQueue(in_memory=3, chunk_bytes=500))
    assert gate.entered.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING):
        for step in range(50):
            link.record(make_step(step).to_json())
    assert caplog.text.count("3 records wait") + caplog.text.count("4 records wait") == 1
    assert spooled_files() > before
    assert logged(run) == []
    gate.open.set()
    link.flush()
    assert logged(run) == list(range(50))
    assert spooled_files() == before


def test_a_spool_that_is_not_delivered_goes_with_the_link(
    connect: Callable[..., Link], make_step: MakeStep
) -> None:
    before = spooled_files()
    link = connect(Away(), queue=RecordQueue(in_memory=1))
    for step in range(10):
        link.record(make_step(step).to_json())
    assert spooled_files() == before + 1
    link.close()
    assert spooled_files() == before


def test_with_the_disk_full_as_well_recording_is_an_error_that_says_so(
    connect: Callable[..., Link], make_step: MakeStep
) -> None:
    link = connect(Away(), queue=RecordQueue(in_memory=1, max_bytes=5000))

    def train() -> None:
        for step in range(100):
            link.record(make_step(step).to_json())

    with pytest.raises(RecorderError, match=r"records wait for the recorder, .* more than 5000"):
        train()


class Scripted:
    """Takes batches in, as a script of "ok", "lost" (the answer) and "away" has it; then all."""

    def __init__(self, script: Sequence[str]) -> None:
        self._script = deque(script)
        self._acknowledged = 0
        self.taken: list[int] = []

    def call(self, method: str, *args: Any) -> Any:
        _, _, sequence, records = args
        what = self._script.popleft() if self._script else "ok"
        if what == "away":
            raise ConnectionError("nobody there")
        if sequence == self._acknowledged + 1:
            self.taken += [record["number"] for record in records]
            self._acknowledged = sequence
        if what == "lost":
            raise TimeoutError("the answer was lost")
        return {"acknowledged": self._acknowledged}


@settings(max_examples=8, deadline=None)
@given(
    script=st.lists(st.sampled_from(["ok", "lost", "away"]), max_size=3),
    bursts=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
    in_memory=st.integers(1, 8),
    chunk_bytes=st.integers(1, 200),
)
def test_whatever_is_lost_away_or_spooled_every_record_arrives_once_and_in_order(
    script: list[str], bursts: list[tuple[int, bool]], in_memory: int, chunk_bytes: int
) -> None:
    target = Scripted(script)
    queue = RecordQueue(in_memory=in_memory, chunk_bytes=chunk_bytes)
    link, number = (
        Link(target, 1, "0", interval_s=0.001, timeout_s=5.0, queue=queue),
        itertools.count(),
    )
    num_recorded = 0
    for size, flushes in bursts:
        for _ in range(size):
            link.record({"number": next(number)})
        num_recorded += size
        if flushes:
            link.flush()
            assert target.taken == list(range(num_recorded))
    link.flush()
    link.close()
    assert target.taken == list(range(num_recorded))


def test_a_flush_gives_up_in_time_and_says_what_is_missing(
    connect: Callable[..., Link], make_step: MakeStep
) -> None:
    target = Away()
    link = connect(target)
    link.record(make_step(0).to_json())
    assert target.called.wait(PATIENCE_S)
    with pytest.raises(RecorderError, match=r"1 records of attempt 1 are not in the ledger"):
        link.flush(0.2)


def test_a_stop_reaches_a_worker_that_has_nothing_to_say(
    recorder: Recorder, connect: Callable[..., Link]
) -> None:
    target = InProcess(recorder)
    link = connect(target)
    assert not link.stop_requested
    target.call("request_stop", "SIGTERM")
    until(lambda: link.stop_requested)


def test_a_worker_of_an_earlier_attempt_learns_that_it_must_end(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    target = InProcess(recorder)
    link = connect(target)
    target.call("begin_attempt", {"start_step": 0, "mode": "local", "world_size": 1})
    until(lambda: link.refused)
    link.record(make_step(0).to_json())
    with pytest.raises(RecorderError, match="attempt 1 is refused"):
        link.flush()
    assert logged(run) == []


def test_a_divergence_reaches_the_worker(
    recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    target = InProcess(recorder)
    target.call("push", 1, "0", 1, [make_step(0).to_json()])
    target.call("begin_attempt", {"start_step": 0, "mode": "local", "world_size": 1})
    link = Link(target, 2, "0", interval_s=FAST_S)
    try:
        link.record(make_step(0, loss=7.0).to_json())
        link.flush()
        assert link.divergence is not None
        assert "loss" in link.divergence
    finally:
        link.close()


def test_a_refusal_of_the_records_is_raised_and_not_tried_again(
    recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    link = connect(InProcess(recorder))
    link.record(make_step(5).to_json())
    with pytest.raises(RecorderError, match="sent step 5, expected 0"):
        link.flush()
    with pytest.raises(RecorderError, match="sent step 5, expected 0"):
        link.record(make_step(6).to_json())


def test_batches_that_were_lost_for_good_are_an_error(
    recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    class Skipping:
        def call(self, method: str, *args: Any) -> Any:
            attempt, sender, sequence, records = args
            return recorder.push(attempt, sender, sequence and sequence + 1, records)

    link = connect(Skipping())
    link.record(make_step(0).to_json())
    with pytest.raises(RecorderError, match="expects batch 1"):
        link.flush()


def test_closing_delivers_what_waits(
    run: Storage, recorder: Recorder, connect: Callable[..., Link], make_step: MakeStep
) -> None:
    link = connect(InProcess(recorder), interval_s=3600.0)
    link.record(make_step(0).to_json())
    link.close()
    assert logged(run) == [0]
    with pytest.raises(RecorderError, match="the link is closed"):
        link.record(make_step(1).to_json())


def test_closing_with_the_recorder_away_says_what_is_left(
    connect: Callable[..., Link], make_step: MakeStep, caplog: pytest.LogCaptureFixture
) -> None:
    link = connect(Away())
    link.record(make_step(0).to_json())
    with caplog.at_level(logging.WARNING):
        link.close()
    assert "closes with 1 records undelivered" in caplog.text
