"""A run followed from its ledger alone: what `samestep watch` shows, wherever the run is."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from samestep.checkpoint.storage import Storage
from samestep.names import Event
from samestep.replay.summary import status_of
from samestep.telemetry import lease as leases
from samestep.telemetry.accounting import Accounting
from samestep.telemetry.board import describe
from samestep.telemetry.identity import read_result, read_spec
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.spool import Spool

MAX_LINES: Final = 1000
MAX_POINTS: Final = 1000
MAX_EVENTS: Final = 100
RATE_WINDOW_S: Final = 30.0


@dataclass(kw_only=True)
class Curve:
    """A course over steps in a bounded number of points, each the mean of as many steps.

    Attributes:
        points: (first step, mean) of the finite values.
        num_not_finite: values that were NaN or infinite.
    """

    max_points: int = MAX_POINTS
    points: list[tuple[int, float]] = field(default_factory=list)
    num_not_finite: int = 0
    _stride: int = 1
    _pending: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Takes in the next value; None leaves the step out."""
        if value is None:
            return
        if not math.isfinite(value):
            self.num_not_finite += 1
            return
        self._pending.append((step, value))
        if len(self._pending) == self._stride:
            self.points.append(_mean(self._pending))
            self._pending = []
        if len(self.points) == self.max_points:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    def take_back(self, step: int) -> None:
        """The values of this step and of later ones do not count."""
        self.points = [point for point in self.points if point[0] < step]
        self._pending = [point for point in self._pending if point[0] < step]

    @property
    def all_points(self) -> list[tuple[int, float]]:
        """Those of the steps that are not yet as many as the others stand for, too."""
        return [*self.points, *([_mean(self._pending)] if self._pending else [])]


class Watching:
    """Reads a run's ledger on; changes nothing in the run.

    Args:
        run: the run directory.

    Attributes:
        name: of the run.
        status: starting, running, done, interrupted, failed or died, as `samestep show` has it.
        accounting: where the time went.
        losses: the course of the training loss.
        last: the last step's record.
        total_steps: steps it is to take, None until it says.
        evaluation: (steps taken, metrics) of the last evaluation.
        attempt: number of the last attempt.
        mode: its mode.
        num_workers: present workers; 0 between attempts.
        num_redone: steps taken again.
        num_incidents: incidents ever.
        last_checkpoint: (steps taken, time) of the last one.
        events: (time, text) of the last events, evaluations left out.
    """

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._spool = Spool(run)
        self._arrivals: deque[tuple[float, int]] = deque()
        read_spec(run)  # a folder that is no run is told now
        self.name = run.root.rpartition("/")[2]
        self.status = ""
        self.accounting = Accounting()
        self.losses = Curve()
        self.last: StepRecord | None = None
        self.total_steps: int | None = None
        self.evaluation: tuple[int, dict[str, float]] | None = None
        self.attempt = self.num_workers = self.num_redone = self.num_incidents = 0
        self._num_steps = 0
        self.mode = ""
        self.last_checkpoint: tuple[int, float] | None = None
        self.events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return self._num_steps

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes, unless somebody resumes the run."""
        return self.status not in ("", "starting", "running")

    def read(self) -> None:
        """Takes in what is new.

        Raises:
            StorageError: the run can't be read.
        """
        # What is written after this is read, or the run is looked at once more.
        present, result = leases.holder(self._run), read_result(self._run)
        held = present if present is not None and present.alive else None
        while True:
            lines = self._spool.read(MAX_LINES)
            for line in lines:
                self._add(line.record)
            if lines:
                self._spool.seek(lines[-1].position)
            if len(lines) < MAX_LINES:
                break
        self.status = status_of(held, result, has_begun=self.attempt > 0)

    def samples_per_s(self) -> float | None:
        """Over the last half minute of steps; None while that can't be told."""
        if len(self._arrivals) < 2:
            return None
        (first_s, _), *others = self._arrivals
        elapsed_s = others[-1][0] - first_s
        return sum(samples for _, samples in others) / elapsed_s if elapsed_s > 0 else None

    def left_s(self) -> float | None:
        """Seconds to the planned end at the present speed; None while that can't be told."""
        rate = self.samples_per_s()
        if not rate or self.total_steps is None or self.last is None:
            return None
        return max(0, self.total_steps - self.num_steps) * self.last.samples / rate

    def _add(self, record: StepRecord | EventRecord) -> None:
        self.accounting.add(record)
        if isinstance(record, StepRecord):
            self._add_step(record)
        else:
            self._add_event(record)

    def _add_step(self, record: StepRecord) -> None:
        if record.step >= self.num_steps:
            self.losses.add(record.step, record.loss)
        self.last, self._num_steps = record, record.step + 1
        if record.time is None:
            return
        if self._arrivals and self._arrivals[-1][0] == record.time:  # came with the same message
            self._arrivals[-1] = (record.time, self._arrivals[-1][1] + record.samples)
        else:
            self._arrivals.append((record.time, record.samples))
        while record.time - self._arrivals[0][0] > RATE_WINDOW_S:
            self._arrivals.popleft()

    def _add_event(self, event: EventRecord) -> None:
        fields = event.fields
        text = describe(event)
        if text and event.event is not Event.EVALUATION:  # each would push the rare ones out
            self.events.append((event.time, text))
        match event.event:
            case Event.ATTEMPT_STARTED:
                self.attempt, self.mode = event.attempt, str(fields.get("mode", ""))
                self.num_workers = int(fields.get("world_size", 0))
                self.total_steps = fields.get("total_steps")
                self._arrivals.clear()
            case Event.ATTEMPT_ENDED:
                self.num_workers = 0
                self.num_redone += int(fields.get("redone", 0))
            case Event.EVALUATION:
                self.evaluation = event.step, dict(fields.get("metrics", {}))
            case Event.CHECKPOINT_COMMITTED:
                self.last_checkpoint = event.step, event.time
            case Event.ROLLED_BACK:
                self._num_steps = min(self._num_steps, event.step)
                self.losses.take_back(event.step)
            case Event.INCIDENT:
                self.num_incidents += 1
            case _:
                pass


def _mean(points: tuple[tuple[int, float], ...] | list[tuple[int, float]]) -> tuple[int, float]:
    return points[0][0], math.fsum(value for _, value in points) / len(points)
