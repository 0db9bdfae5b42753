"""Steps taken again must equal the ledger: the promise is checked while training.

A step that was taken under the same numerics must give the same values bit for bit. Under other
numerics it is held to a tolerance, and written again, since later steps follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.errors import RecorderError
from samestep.names import Event
from samestep.telemetry.ledger import from_the_end, stays_after
from samestep.telemetry.past import Attempt
from samestep.telemetry.records import (
    STEP,
    EventRecord,
    StepRecord,
    differing_metrics,
    same_values,
)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What to do with a record.

    Attributes:
        log: it belongs into the ledger.
        again: the ledger had it already.
        differences: it breaks the promise: what differs, with both values.
    """

    log: bool
    again: bool = False
    differences: tuple[str, ...] = ()


NEW = Judgement(log=True)


@dataclass(kw_only=True)
class Redo:
    """The part of the ledger that an attempt goes through again.

    Holds the lines from the attempt's first step on, and lets go of each as it is passed: as many
    as there are steps between a checkpoint and the end of the ledger.

    Attributes:
        checked: False for `reduction: fast`, where nothing is promised.
        values_id: attempts with the same one must give the same bits.
        tolerance: for steps of attempts with other numerics.
    """

    checked: bool
    values_id: str
    tolerance: float
    _steps: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    _evaluations: dict[int, tuple[Mapping[str, float], str]] = field(default_factory=dict)

    def load(self, run: Storage, *, start_step: int, attempts: Sequence[Attempt]) -> None:
        """Reads the lines of earlier attempts from `start_step` on, where they reached it."""
        self._steps.clear()
        self._evaluations.clear()
        values_ids = {one.number: one.values_id for one in attempts if one.reach >= start_step}
        for data in _lines(run, start_step, min(values_ids)) if values_ids else ():
            stay = stays_after(data)
            if stay is not None:  # what comes behind it is another way, and no divergence
                self._steps = {step: it for step, it in self._steps.items() if step < stay}
                self._evaluations = {s: it for s, it in self._evaluations.items() if s <= stay}
            attempt = int(data.get("attempt", 0))
            if attempt not in values_ids or data["step"] < start_step:
                continue
            if data["type"] == STEP:
                line = json.dumps(data, separators=(",", ":")).encode()
                self._steps[int(data["step"])] = (line, values_ids[attempt])
            elif data["event"] == Event.EVALUATION:
                event = EventRecord.from_json(data)
                metrics = event.fields.get("metrics", {})
                self._evaluations[event.step] = (metrics, values_ids[attempt])

    def judge_step(self, record: StepRecord) -> Judgement:
        """Compares a step with its line, if there is one; changes nothing."""
        if record.step not in self._steps:
            return NEW
        line, values_id = self._steps[record.step]
        before = StepRecord.from_json(json.loads(line))
        differences = same_values(before, record)
        if not differences:
            # A digest that the ledger lacks is worth a second line.
            richer = before.state_digest is None and record.state_digest is not None
            return Judgement(log=richer, again=True)
        if self.checked and self._must_equal(values_id):
            return Judgement(log=False, again=True, differences=tuple(differences))
        apart = same_values(before, record, tolerance=self.tolerance) if self.checked else []
        return Judgement(log=not apart, again=True, differences=tuple(apart))

    def judge_evaluation(self, event: EventRecord) -> Judgement:
        """The same for an evaluation."""
        if event.step not in self._evaluations:
            return NEW
        before, values_id = self._evaluations[event.step]
        after = event.fields.get("metrics", {})
        differences = differing_metrics(before, after)
        if not differences:
            return Judgement(log=False, again=True)
        if self.checked and self._must_equal(values_id):
            return Judgement(log=False, again=True, differences=tuple(differences))
        apart = differing_metrics(before, after, tolerance=self.tolerance) if self.checked else []
        return Judgement(log=not apart, again=True, differences=tuple(apart))

    def passed(self, steps: Sequence[int], evaluations: Sequence[int] = ()) -> None:
        """Lets go of the lines of steps and of evaluations that are through."""
        for step in steps:
            self._steps.pop(step, None)
        for step in evaluations:
            self._evaluations.pop(step, None)

    def _must_equal(self, values_id: str) -> bool:
        return values_id == self.values_id


def _lines(run: Storage, start_step: int, first_attempt: int) -> list[dict[str, Any]]:
    """The end of the ledger, from the first line on that is of interest, in order of writing.

    A ledger may be long, and its end is what is taken again: it is read from there.

    Args:
        run: the run directory.
        start_step: the first step of interest.
        first_attempt: the first attempt that reached it; each attempt has its steps in order.
    """
    found: list[dict[str, Any]] = []
    for line in from_the_end(run):
        attempt = int(line.get("attempt", 0))
        is_before = line["type"] == STEP and line["step"] < start_step
        if attempt < first_attempt or (attempt == first_attempt and is_before):
            break
        found.append(line)
    return found[::-1]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far an attempt is; makes sure that its steps come in order, without holes.

    Attributes:
        start_step: the attempt's first step.
        low: the earliest step that may come next.
        high: the latest. Apart from `low` only after the recorder came back: it can't know which
            steps were taken again without being written.
        num_known: steps that the ledger holds.
    """

    start_step: int
    low: int
    high: int
    num_known: int

    def admits(self, step: int, *, attempt: int) -> bool:
        """Whether a step is the next one; False when this attempt brought it already.

        Raises:
            RecorderError: steps between were left out.
        """
        if self.start_step <= step < self.low:
            return False
        if self.low <= step <= self.high:
            return True
        expected = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        raise RecorderError(
            f"attempt {attempt} sent step {step}, expected {expected}: steps must come in order"
        )

    def missing_before(self, step: int) -> int | None:
        """The first step before `step` that the attempt has not brought; None if it has all."""
        brought = min(self.high, self.num_known)
        return None if brought >= step else brought

    def after(self, step: int) -> Position:
        """The position once a step is in."""
        return Position(
            start_step=self.start_step,
            low=step + 1,
            high=step + 1,
            num_known=max(self.num_known, step + 1),
        )
