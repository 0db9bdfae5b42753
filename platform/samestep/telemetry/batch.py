"""A batch of records on its way into the ledger: judged first, taken only when it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samestep.errors import RecorderError
from samestep.names import Event
from samestep.telemetry.records import EVENT, STEP, EventRecord, StepRecord
from samestep.telemetry.redo import Judgement, Position, Redo


@dataclass(kw_only=True)
class Batch:
    """Judges the records of one batch without changing anything but itself.

    A sender that sends a batch again, because the answer was lost or the recorder died over it,
    sends the same records; those that reached the ledger (up to `skip_through`) are left out.

    Attributes:
        attempt: the present attempt.
        sender: who sends.
        sequence: number of the batch.
        skip_through: (batch, place in it) of the sender's last line in the ledger.
        position: the attempt's position; after `judge`, the one that the batch leads to.
        redo: the part of the ledger that is gone through again.
        time: seconds since the epoch at which it came in.
        evaluated: steps before the attempt's last evaluation; one that was brought already, by a
            worker that is gone, is left out.
        lines: to be written.
        steps: new to this attempt, for display.
        events: to be written, for display.
        again: steps that the ledger had already.
        evaluations_again: steps of evaluations that it had already.
        differences: why the attempt diverged; records behind the one that shows it are dropped.
        differing_step: the step that shows it.
    """

    attempt: int
    sender: str
    sequence: int
    skip_through: tuple[int, int]
    position: Position
    redo: Redo
    time: float
    evaluated: int = -1
    lines: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    evaluations_again: list[int] = field(default_factory=list)
    differences: tuple[str, ...] = ()
    differing_step: int = -1

    def judge(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Sorts the records into `lines`, `again` and `differences`.

        Raises:
            RecorderError: a step out of order, or a record of an unknown type.
        """
        for place, data in enumerate(records):
            if (self.sequence, place) <= self.skip_through:
                continue
            kind = data.get("type")
            if kind == STEP:
                self._step(place, StepRecord.from_json(data))
            elif kind == EVENT:
                self._event(place, EventRecord.from_json(data))
            else:
                raise RecorderError(
                    f"worker {self.sender} sent a record of type {kind!r}; allowed: step, event"
                )
            if self.differences:
                return

    def _step(self, place: int, record: StepRecord) -> None:
        if not self.position.admits(record.step, attempt=self.attempt):
            return
        record = replace(record, attempt=self.attempt, time=self.time)
        judgement = self.redo.judge_step(record)
        if self._diverged(judgement, record.step):
            return
        if judgement.log:
            self._line(place, record.to_json())
        if judgement.again:
            self.again.append(record.step)
        self.steps.append(record)
        self.position = self.position.after(record.step)

    def _event(self, place: int, event: EventRecord) -> None:
        event = replace(event, attempt=self.attempt)
        if event.event == Event.EVALUATION:
            if event.step <= self.evaluated:
                return
            judgement = self.redo.judge_evaluation(event)
            if self._diverged(judgement, event.step):
                return
            self.evaluated = event.step
            if judgement.again:
                self.evaluations_again.append(event.step)
            if not judgement.log:
                return
        self._line(place, event.to_json())
        self.events.append(event)

    def _diverged(self, judgement: Judgement, step: int) -> bool:
        self.differences, self.differing_step = judgement.differences, step
        return bool(judgement.differences)

    def _line(self, place: int, data: dict[str, Any]) -> None:
        self.lines.append({**data, "seq": [self.sender, self.sequence, place]})
