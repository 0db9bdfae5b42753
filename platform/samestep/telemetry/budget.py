"""What a run has used of its budget, by its ledger alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from samestep.errors import ExitStatus
from samestep.names import Event, RunState
from samestep.spec_budget import Budget
from samestep.telemetry.accounting import NOTICED_LATE
from samestep.telemetry.records import EventRecord, StepRecord

HOUR_S: Final = 3600.0
PREFIX: Final = "budget."
"""Before the reason of a stop that a budget is the cause of."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """How much of one limit is used, both in the limit's unit."""

    used: float
    limit: float

    @property
    def ratio(self) -> float:
        """Share of the limit; more than 1 where it was passed."""
        return self.used / self.limit


def ended_by_budget(result: Mapping[str, Any], stop_reason: str | None) -> Mapping[str, Any]:
    """The result of a run that stopped as planned, where its budget was the reason."""
    is_stop = result["status"] == RunState.INTERRUPTED and stop_reason is not None
    if not is_stop or not str(stop_reason).startswith(PREFIX):
        return result
    return {
        **result,
        "status": str(RunState.BUDGET_EXHAUSTED),
        "reason": "budget",
        "exit_status": int(ExitStatus.BUDGET_EXHAUSTED),
        "message": stop_reason,
    }


class Spending:
    """Adds up the time of attempts, in the order of the ledger; for one thread at a time.

    An attempt's time goes from its start to its end; of one that died, to the last line that came
    of it.
    """

    def __init__(self) -> None:
        self._wall_s = self._worker_s = 0.0
        self._began_s: float | None = None
        self._workers = 0
        self._last_s = 0.0

    def add(self, record: StepRecord | EventRecord) -> None:
        """Takes in the next line."""
        if isinstance(record, StepRecord):
            self._last_s = max(self._last_s, record.time or 0.0)
            return
        match record.event:
            case Event.ATTEMPT_STARTED:
                self._settle(self._last_s)
                self._began_s = self._last_s = record.time
                self._workers = int(record.fields.get("world_size", 1))
            case Event.ATTEMPT_ENDED | Event.FINISHED:
                self._settle(self._last_s if record.fields.get(NOTICED_LATE) else record.time)
            case _:
                self._last_s = max(self._last_s, record.time)

    def uses(self, budget: Budget, now_s: float | None = None) -> dict[str, Use]:
        """What is used of each limit that there is, by its name.

        Args:
            budget: of the job.
            now_s: seconds since the epoch, for the attempt that is under way; None: up to the
                last line.
        """
        end_s = self._last_s if now_s is None else max(now_s, self._last_s)
        open_s = 0.0 if self._began_s is None else max(0.0, end_s - self._began_s)
        worker_hours = (self._worker_s + open_s * self._workers) / HOUR_S
        used: Mapping[str, tuple[float, float | None]] = {
            "wall_hours": ((self._wall_s + open_s) / HOUR_S, budget.wall_hours),
            "worker_hours": (worker_hours, budget.worker_hours),
            "cost": (worker_hours * (budget.cost_per_worker_hour or 0.0), budget.cost),
        }
        return {
            name: Use(used=value, limit=limit)
            for name, (value, limit) in used.items()
            if limit is not None
        }

    def exhausted(self, budget: Budget, now_s: float | None = None) -> str | None:
        """Which limit is used up, in words; None while none is."""
        for name, use in self.uses(budget, now_s).items():
            if use.used >= use.limit:
                return (
                    f"{PREFIX}{name} is used up ({use.used:.4g} of {use.limit:g}); raise it and "
                    "run the same command to go on"
                )
        return None

    def _settle(self, end_s: float) -> None:
        if self._began_s is None:
            return
        seconds = max(0.0, end_s - self._began_s)
        self._wall_s += seconds
        self._worker_s += seconds * self._workers
        self._began_s = None
