"""The incidents of a run as its recorder enters them: the record for good, a line in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.incidents import record as incidents
from samestep.incidents.record import Incident
from samestep.names import Event, IncidentKind
from samestep.telemetry.stalls import Stalls

Log = Callable[[Event, int, Mapping[str, Any]], None]


class IncidentLog:
    """Writes incidents, those that workers tell and those that come of what several tell.

    Args:
        run: the run directory.
        log: enters an event into the ledger, given its kind, step and fields.
        clock: seconds since the epoch.
    """

    def __init__(self, run: Storage, *, log: Log, clock: Callable[[], float]) -> None:
        self._run = run
        self._log = log
        self._clock = clock
        self.stalls = Stalls()

    def write(self, incident: Incident) -> str:
        """Writes an incident; returns its id."""
        written = incidents.write(self._run, incident)
        fields = {"id": written.id, "kind": str(written.kind), "message": written.message}
        self._log(Event.INCIDENT, written.step, fields)
        return written.id

    def take(self, data: Mapping[str, Any], *, attempt: int) -> str:
        """Writes what somebody told as plain data; attempt and time may be left out."""
        given = {"attempt": attempt, **data}
        if not given.get("time"):
            given["time"] = self._clock()
        return self.write(Incident.from_json(given))

    def diverged(self, step: int, text: str, found: Sequence[str], *, attempt: int) -> None:
        """Writes that a step or a state differs from what it must equal."""
        self.write(
            Incident(
                kind=IncidentKind.DIVERGENCE,
                step=step,
                attempt=attempt,
                message=text,
                time=self._clock(),
                seen={"differences": list(found)},
            )
        )

    def settle_stalls(self, *, attempt: int, num_workers: int) -> None:
        """Writes what came of workers that stood still, if any did."""
        found = self.stalls.settle(attempt=attempt, world_size=num_workers, time_s=self._clock())
        if found is not None:
            self.write(found)
