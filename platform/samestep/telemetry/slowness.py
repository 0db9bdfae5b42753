"""A worker that is much slower than the others for long: every step waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec_incidents import Incidents
from samestep.telemetry.ranks import Ranks
from samestep.telemetry.reports import WorkerReport

CHECK_S: Final = 1.0
"""Least time between two looks: with thousands of workers each costs something."""


class Slowness:
    """Watches the workers of the present attempt by their reports.

    An incident is made once for a worker and attempt, when it was the slowest, by more than the
    ratio, at every look for the time given.

    Args:
        settings: of the job.
        monotonic: clock in seconds.
    """

    def __init__(
        self, settings: Incidents, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._ratio = settings.straggler_ratio
        self._after_s = settings.straggler_after_s
        self._monotonic = monotonic
        self._ranks = Ranks(monotonic=monotonic)
        self._looked_at = -CHECK_S
        self._suspect: tuple[int, float] | None = None
        self._told: set[tuple[int, int]] = set()

    def take(self, report: WorkerReport, *, hosts: Sequence[str], step: int) -> Incident | None:
        """Takes in a report of the present attempt; gives an incident when there is one to tell.

        Args:
            report: of a worker.
            hosts: the workers' nodes by world rank; empty where they are not known.
            step: steps taken so far.
        """
        if not self._ratio:
            return None
        self._ranks.start(report.attempt)
        self._ranks.add(report)
        now = self._monotonic()
        if now < self._looked_at + CHECK_S:
            return None
        self._looked_at = now
        found = self._ranks.straggler()
        if found is None or found.ratio < self._ratio:
            self._suspect = None
            return None
        if self._suspect is None or self._suspect[0] != found.world_rank:
            self._suspect = (found.world_rank, now)
        key = (report.attempt, found.world_rank)
        if now - self._suspect[1] < self._after_s or key in self._told:
            return None
        self._told.add(key)
        seconds = self._ranks.step_seconds()
        return Incident(
            kind=IncidentKind.STRAGGLER,
            step=step,
            attempt=report.attempt,
            world_rank=found.world_rank,
            host=hosts[found.world_rank] if found.world_rank < len(hosts) else "",
            message=(
                f"worker {found.world_rank} takes {found.ratio:.1f} times as long for a sample as "
                f"the median worker, for {now - self._suspect[1]:.0f} s now: every step waits for "
                "it. Look at its node: other processes, a throttled processor, slow storage"
            ),
            seen={
                "ratio": round(found.ratio, 3),
                "step_s": {str(rank): round(own_s, 6) for rank, own_s in seconds.items()},
            },
        )
