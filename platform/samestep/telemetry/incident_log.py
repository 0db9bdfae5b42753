"""The incidents of a run as its recorder enters them: the record for good, a line in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.incidents import record as incidents
from samestep.incidents.cause import may_tell, tells
from samestep.incidents.record import Incident
from samestep.incidents.redaction import Redaction
from samestep.names import INCIDENT_FILE, INCIDENTS_DIR, Event, IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.stalls import Stalls

Log = Callable[[Event, int, Mapping[str, Any]], None]


class IncidentLog:
    """Writes incidents, those that workers tell and those that come of what several tell.

    What has one cause is one incident, however many tell of it (see `cause`).

    Args:
        run: the run directory.
        spec: the job; what it calls secret is not written.
        log: enters an event into the ledger, given its kind, step and fields.
        clock: seconds since the epoch.
        noted: told of each that is written.
    """

    def __init__(
        self,
        run: Storage,
        spec: JobSpec,
        *,
        log: Log,
        clock: Callable[[], float],
        noted: Callable[[Incident], None],
    ) -> None:
        self._run = run
        self._redaction = Redaction(spec)
        self._log = log
        self._clock = clock
        self._noted = noted
        self.stalls = Stalls()
        self._stalled_in = 0

    def write(self, incident: Incident) -> str:
        """Writes an incident; returns its id, or that of the one that tells of it already.

        Empty where workers stand still and one of them ended: what comes of it is written soon.
        """
        incident = self._without_secrets(incident)
        if self._is_of_a_stall(incident):
            return ""
        known = self._known(incident)
        if known is not None:
            return known
        written = incidents.write(self._run, incident)
        self._noted(written)
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

    def stalled(self, attempt: int, world_rank: int, host: str, report: Mapping[str, Any]) -> None:
        """Takes in what the watchdog of a worker of the present attempt told."""
        self._stalled_in = attempt
        self.stalls.take(world_rank, host, report)

    def settle_stalls(self, *, attempt: int, num_workers: int) -> None:
        """Writes what came of workers that stood still, if any did."""
        found = self.stalls.settle(attempt=attempt, world_size=num_workers, time_s=self._clock())
        if found is not None:
            self.write(found)

    def _is_of_a_stall(self, incident: Incident) -> bool:
        ends = incident.kind in (IncidentKind.CRASH, IncidentKind.HANG)
        return ends and self.stalls.is_open and incident.attempt == self._stalled_in

    def _known(self, incident: Incident) -> str | None:
        for name in self._run.list(INCIDENTS_DIR):
            file = f"{INCIDENTS_DIR}/{name}/{INCIDENT_FILE}"
            if not may_tell(name, incident) or not self._run.exists(file):
                continue
            if tells(incidents.read(self._run, name), incident):
                return name
        return None

    def _without_secrets(self, incident: Incident) -> Incident:
        redact = self._redaction
        return replace(
            incident,
            message=redact.text(incident.message),
            traceback=None if incident.traceback is None else redact.text(incident.traceback),
            seen=redact.plain(incident.seen),
        )
