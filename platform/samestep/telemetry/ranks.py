"""The present workers side by side, from their reports: who is slow, who holds how much memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Final

from samestep.telemetry.reports import WorkerReport

WINDOW_S: Final = 30.0
"""How far back times reach, and after how long without a report a worker is gone."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The slowest worker, and its own time per sample over that of the median one."""

    world_rank: int
    ratio: float


@dataclass(kw_only=True)
class _Worker:
    last: WorkerReport
    arrivals: deque[tuple[float, WorkerReport]] = field(default_factory=deque)
    num_steps: int = 0
    num_samples: int = 0
    own_s: float = 0.0

    def add(self, report: WorkerReport, now: float) -> None:
        self.last = report
        self.arrivals.append((now, report))
        self._count(report, 1)

    def forget(self, before: float) -> None:
        while self.arrivals and self.arrivals[0][0] < before:
            self._count(self.arrivals.popleft()[1], -1)
        if not self.num_steps:
            self.own_s = 0.0  # what rounding left

    def _count(self, report: WorkerReport, sign: int) -> None:
        self.num_steps += sign * report.num_steps
        self.num_samples += sign * report.num_samples
        self.own_s += sign * report.own_s


class Ranks:
    """Takes in reports; for one thread at a time.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._workers: dict[int, _Worker] = {}
        self.attempt = 0
        self.num_dropped = 0

    def start(self, attempt: int) -> None:
        """Forgets the workers of earlier attempts."""
        if attempt != self.attempt:
            self.attempt, self._workers, self.num_dropped = attempt, {}, 0

    def add(self, report: WorkerReport) -> None:
        """Takes in a report; one of another attempt than the present is left out."""
        if report.attempt != self.attempt:
            return
        unseen = _Worker(last=replace(report, num_dropped=0))
        worker = self._workers.setdefault(report.world_rank, unseen)
        self.num_dropped += max(0, report.num_dropped - worker.last.num_dropped)
        worker.add(report, self._monotonic())

    def drop(self, num_reports: int) -> None:
        """Counts reports that were let go of on the way here."""
        self.num_dropped += num_reports

    def present(self) -> list[WorkerReport]:
        """The last report of each worker that still sends some."""
        self._forget()
        return [worker.last for _, worker in sorted(self._workers.items())]

    def step_seconds(self) -> dict[int, float]:
        """Each worker's own mean time of a step, by world rank."""
        self._forget()
        return {
            rank: worker.own_s / worker.num_steps
            for rank, worker in sorted(self._workers.items())
            if worker.num_steps
        }

    def straggler(self) -> Straggler | None:
        """The slowest worker by sample, so that an uneven split of shards blames nobody.

        None with fewer than two workers that computed something.
        """
        self._forget()
        by_rank = {
            rank: worker.own_s / worker.num_samples
            for rank, worker in self._workers.items()
            if worker.num_samples
        }
        if len(by_rank) < 2:
            return None
        slowest = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
        typical = median_low(by_rank.values())
        if typical <= 0:
            return None
        return Straggler(world_rank=slowest, ratio=by_rank[slowest] / typical)

    def _forget(self) -> None:
        before = self._monotonic() - WINDOW_S
        for worker in self._workers.values():
            worker.forget(before)
        self._workers = {rank: w for rank, w in self._workers.items() if w.arrivals}
