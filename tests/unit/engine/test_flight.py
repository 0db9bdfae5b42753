"""One save behind the training, whose storage or recorder never answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep.checkpoint.image import Image
from samestep.checkpoint.job import WriteJob, Written
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.marks import Marks
from samestep.checkpoint.state import Parts, collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import InlineWriter
from samestep.checkpoint.writing import Outline
from samestep.engine.copying import Copying
from samestep.engine.flight import Cargo, Flight
from samestep.engine.pace import Pace
from samestep.telemetry.saves import Answer, Part

WAIT_S = 20.0
SOON_S = 5.0


class Hanging(InlineWriter):
    """Storage that does not answer until `gate` is set; nothing can end it."""

    def __init__(self) -> None:
        self.gate, self.writing = threading.Event(), threading.Event()

    def write(self, job: WriteJob, data: memoryview, timeout_s: float) -> Written:
        self.writing.set()
        self.gate.wait(WAIT_S)
        return super().write(job, data, timeout_s)


class Recorder:
    """Answers as the test says, and keeps the errors that it is told; hangs until `gate` is set."""

    def __init__(self, answer: Callable[[Part], Answer]) -> None:
        self.answer = answer
        self.errors: list[str | None] = []
        self.parts: list[Part] = []
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()

    def call(self, method: str, *args: Any) -> Any:
        assert method == "part"
        part = Part(**args[1])
        self.asked.set()
        self.gate.wait(WAIT_S)
        self.errors.append(part.error)
        self.parts.append(part)
        answer = self.answer(part)
        return {"state": answer.state, "message": answer.message, "digest": answer.digest}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def judged(part: Part) -> Answer:
    """What a recorder says where worker 1 lacks."""
    if part.error is not None:
        return Answer(state="failed", message=part.error)
    return Answer(state="waiting", message="for worker 1")


Fly = Callable[..., Flight]


@pytest.fixture
def writer() -> Iterator[Hanging]:
    writer = Hanging()
    yield writer
    writer.gate.set()


@pytest.fixture
def fly(tmp_path: Path) -> Iterator[Fly]:
    """Saves the state of a small net as worker 0 of two."""
    flown: list[Flight] = []

    def start(
        recorder: Recorder,
        writer: InlineWriter | None = None,
        marks: Marks | None = None,
        **fields: Any,
    ) -> Flight:
        net = nn.Linear(3, 2)
        parts = Parts(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        outline = Outline.of(collect(parts, step=4, extras={}), num_parts=2)
        copying = Copying(
            outline=outline,
            image=Image.private(outline.plan.num_bytes),
            pieces=[piece for part in outline.parts for piece in part],
            compared=[],
            number=1,
            local_rank=0,
            marks=None,
        )
        cargo = Cargo(
            copying=copying.begin(net),
            meta=CheckpointMeta(numerics={}, spec={}, created_s=0.0),
            part=Part(step=4, try_number=1, world_rank=0, num_parts=2, keep=2),
            compares=False,
            patience_s=0.0,
        )
        flight = Flight(
            replace(cargo, copying=replace(cargo.copying, marks=marks)),
            run=Storage.at(str(tmp_path / "run")),
            writer=writer or InlineWriter(),
            target=recorder,
            link=None,
            attempt=1,
            **fields,
        )
        flown.append(flight)
        return flight

    yield start
    for flight in flown:
        assert flight.wait(WAIT_S)


def test_who_waits_for_storage_that_hangs_tells_the_recorder_and_goes_on(
    fly: Fly, writer: Hanging
) -> None:
    recorder = Recorder(judged)
    flight = fly(recorder, writer)
    assert writer.writing.wait(WAIT_S)
    started = time.monotonic()
    flight.give_up(15.0, within_s=10.0)
    assert time.monotonic() - started < SOON_S
    (text,) = recorder.errors
    assert text is not None
    assert text.startswith("it was waited for 15 s and was still writing its files: its storage")
    assert flight.answer == Answer(state="failed", message=text)
    writer.gate.set()
    assert flight.wait(WAIT_S)
    assert recorder.errors == [text]  # the thread that came through after all says no more


def test_a_recorder_that_hangs_as_well_is_told_once_it_answers(fly: Fly, writer: Hanging) -> None:
    recorder = Recorder(judged)
    recorder.gate.clear()
    flight = fly(recorder, writer)
    assert writer.writing.wait(WAIT_S)
    flight.give_up(15.0, within_s=0.2)
    assert flight.answer is None
    recorder.gate.set()
    until(lambda: flight.answer is not None)
    assert recorder.errors == [flight.answer and flight.answer.message]


def test_who_lacks_only_the_part_of_another_lets_that_one_tell_first(fly: Fly) -> None:
    answers = [Answer(state="waiting", message="for worker 1")] * 4
    failed = Answer(state="failed", message="worker 1: no room")
    recorder = Recorder(lambda part: answers.pop() if answers else failed)
    flight = fly(recorder)
    until(lambda: len(recorder.errors) > 1)
    flight.give_up(15.0, within_s=WAIT_S)
    assert flight.answer == failed
    assert set(recorder.errors) == {None}


def test_who_waited_in_vain_for_another_tells_for_whom(fly: Fly) -> None:
    recorder = Recorder(judged)
    flight = fly(recorder)
    until(lambda: len(recorder.errors) > 1)
    flight.give_up(15.0, within_s=0.4)
    text = "it was waited for 15 s and was still waiting for worker 1"
    assert flight.answer == Answer(state="failed", message=text)
    assert recorder.errors[-1] == text


def test_what_a_worker_that_ends_leaves_undone_is_told_as_that(fly: Fly, tmp_path: Path) -> None:
    recorder = Recorder(judged)
    flight = fly(recorder, marks=Marks(tmp_path / "marks", 2))  # the other one never copies
    assert flight.copied.wait(WAIT_S)
    flight.leave()
    assert flight.wait(WAIT_S)
    assert [part.has_left for part in recorder.parts] == [True]
    assert flight.answer == Answer(state="failed", message="it took too long and was given up")


def test_who_waits_for_the_copy_of_another_that_failed_leaves_the_telling_to_it(
    fly: Fly, tmp_path: Path
) -> None:
    recorder = Recorder(judged)
    marks = Marks(tmp_path / "marks", 2)
    flight = fly(recorder, marks=marks)
    marks.set(1, 1, failed=True)
    assert flight.wait(WAIT_S)
    assert recorder.parts == []
    text = "another worker of its node did not copy the state"
    assert flight.answer == Answer(state="failed", message=text)


def test_a_commit_is_noticed_at_once_when_training_begins_to_wait(fly: Fly) -> None:
    answers = [Answer(state="waiting", message="for worker 1")]
    committed = Answer(state="committed", digest="d")
    recorder = Recorder(lambda part: answers.pop() if answers else committed)
    flight = fly(recorder, pace=Pace(10_000_000))  # its first pause is longer than the test
    assert recorder.asked.wait(WAIT_S)
    assert not flight.wait(0)
    assert flight.wait(WAIT_S)
    assert flight.answer == committed
