"""How long a run stood still, from a fault or a decision to the next new step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.cluster.process import Whereabouts


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Why training stands still, and since when.

    Attributes:
        cause: a word: of `policy.Cause`, or what was planned (grow, shrink, drain, leave).
        message: what happened, its first line.
        since: seconds by the clock of `Stopwatch`.
        detected_s: from the fault to its being noticed; None where it was planned, or nobody who
            lives was near.
        workers: before.
        planned: it was decided, not suffered.
    """

    cause: str
    message: str
    since: float
    detected_s: float | None
    workers: int
    planned: bool


class Stopwatch:
    """Measures standstills by the controller's clock alone.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standstill: Standstill | None = None

    def stop(
        self, cause: str, message: str, *, ago_s: float | None, workers: int, planned: bool
    ) -> None:
        """Training stands still; what stopped it first counts.

        Args:
            cause: see `Standstill`.
            message: what happened.
            ago_s: seconds since the fault, by those who noticed it first; None: not known.
            workers: in the group until now.
            planned: it was decided here.
        """
        if self._standstill is None:
            self._standstill = Standstill(
                cause=cause,
                message=(message.splitlines() or [""])[0],
                since=self._clock() - (ago_s or 0.0),
                detected_s=None if planned else ago_s,
                workers=workers,
                planned=planned,
            )

    def look(
        self, everyone: Sequence[Whereabouts], num_workers: int
    ) -> tuple[int, dict[str, Any]] | None:
        """Once a step is through everywhere: (attempt, fields of the event); else None.

        Args:
            everyone: what the workers told that were reached: a step through with them is through.
            num_workers: in the group now.
        """
        if self._standstill is None or not everyone:
            return None
        attempts = {there.attempt for there in everyone}
        ages = [there.again_s for there in everyone if there.again_s is not None]
        if len(ages) < len(everyone) or len(attempts) > 1:
            return None
        was, self._standstill = self._standstill, None
        fields = {
            "cause": was.cause,
            "message": was.message,
            "planned": was.planned,
            "detected_s": was.detected_s,
            "again_s": self._clock() - min(ages) - was.since,
            "workers": [was.workers, num_workers],
        }
        return attempts.pop(), fields
