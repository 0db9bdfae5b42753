"""What a ledger tells a recorder that opens it: enough to go on where the last one stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.incidents.rollback import Rollback
from samestep.names import Event
from samestep.telemetry.ledger import TAKEN_BACK, from_the_end, read_ledger, stays_after
from samestep.telemetry.records import STEP, EventRecord, StepRecord


@dataclass(kw_only=True)
class Attempt:
    """One attempt as the ledger has it.

    Attributes:
        number: counted from 1.
        started_at: seconds since the epoch.
        fields: what `begin_attempt` was told, and `known_steps`: steps in the ledger then.
        next_step: one after the last step it wrote; its first step when it wrote none.
        num_written: step lines it wrote.
        reach: the last step of its lines that a later attempt may bring again; -1 without any.
        ended: fields of its end (`reason`, `redone`), None while it is open.
        ended_at: seconds since the epoch, None while it is open.
    """

    number: int
    started_at: float
    fields: Mapping[str, Any]
    next_step: int
    num_written: int = 0
    reach: int = -1
    ended: Mapping[str, Any] | None = None
    ended_at: float | None = None

    @property
    def start_step(self) -> int:
        """The first step it took."""
        return int(self.fields["start_step"])

    @property
    def numerics_id(self) -> str:
        """Names the binding part of the numerics it ran under."""
        return str(self.fields.get("numerics_id", ""))

    @property
    def values_id(self) -> str:
        """Attempts with the same one must give the same bits."""
        return str(self.fields.get("values_id", ""))

    @property
    def num_redone(self) -> int:
        """Steps it took that the ledger had already; exact once it ended in good order."""
        if self.ended is not None and "redone" in self.ended:
            return int(self.ended["redone"])
        known = int(self.fields["known_steps"])
        return known - self.start_step if self.next_step > known else 0


@dataclass(kw_only=True)
class Past:
    """The sum of a ledger, kept up by `take` line by line.

    Attributes:
        attempts: in order.
        num_steps: steps it holds: all of 0 to num_steps - 1.
        written: by sender of the last attempt, the (batch, place in it) of its last line.
        last_events: the last event of each kind.
        num_incidents: incidents ever recorded.
        rollbacks: in order.
        recoveries: how training went on after faults and resizes, in order.
        stop_reason: a stop was asked for in the last attempt.
        num_lines: lines it holds, those taken back included.
        torn: descriptions of half-written last lines.
    """

    attempts: list[Attempt] = field(default_factory=list)
    num_steps: int = 0
    written: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_events: dict[Event, EventRecord] = field(default_factory=dict)
    num_incidents: int = 0
    rollbacks: list[Rollback] = field(default_factory=list)
    recoveries: list[EventRecord] = field(default_factory=list)
    stop_reason: str | None = None
    num_lines: int = 0
    torn: list[str] = field(default_factory=list)
    _last_line: Mapping[str, Any] | None = None
    _states: dict[Event, list[EventRecord]] = field(
        default_factory=lambda: {kind: [] for kind in TAKEN_BACK}
    )

    @property
    def num_redone(self) -> int:
        """Steps that were taken again, over all attempts."""
        return sum(attempt.num_redone for attempt in self.attempts)

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step; after a rollback `find_last_step` must look for it."""
        return StepRecord.from_json(self._last_line) if self._last_line is not None else None

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes in the next line of the ledger."""
        self.num_lines += 1
        if line["type"] == STEP:
            self._take_step(line)
        else:
            self._take_event(EventRecord.from_json(line))
        stay = stays_after(line)
        if stay is not None:
            self._take_back(stay)
        if "seq" in line:
            sender, batch, place = line["seq"]
            self.written[sender] = (int(batch), int(place))

    def find_last_step(self, run: Storage) -> None:
        """Looks for the last step's line where it is one before a rollback."""
        if self._last_line is None and self.num_steps:
            last = self.num_steps - 1
            self._last_line = next(
                line for line in from_the_end(run) if line["type"] == STEP and line["step"] == last
            )

    def _take_step(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        if step + 1 >= self.num_steps:
            self.num_steps, self._last_line = step + 1, line
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.next_step = step + 1
            attempt.num_written += 1
            attempt.reach = max(attempt.reach, step)

    def _take_event(self, event: EventRecord) -> None:
        self.last_events[event.event] = event
        if event.event in self._states:
            self._states[event.event].append(event)
        match event.event:
            case Event.ATTEMPT_STARTED:
                self.written.clear()
                self.stop_reason = None
                self.attempts.append(
                    Attempt(
                        number=event.attempt,
                        started_at=event.time,
                        fields=event.fields,
                        next_step=int(event.fields["start_step"]),
                    )
                )
            case Event.ATTEMPT_ENDED if self.attempts:
                self.attempts[-1].ended = event.fields
                self.attempts[-1].ended_at = event.time
            case Event.EVALUATION if self.attempts:
                self.attempts[-1].reach = max(self.attempts[-1].reach, event.step)
            case Event.STOP_REQUESTED:
                self.stop_reason = str(event.fields.get("reason", ""))
            case Event.INCIDENT:
                self.num_incidents += 1
            case Event.ROLLED_BACK:
                rollback = Rollback.from_json({**event.fields, "attempt": event.attempt})
                self.rollbacks.append(rollback)
            case Event.RECOVERED:
                self.recoveries.append(event)
            case _:
                pass

    def _take_back(self, stay: int) -> None:
        """Only the first `stay` steps are left."""
        if stay < self.num_steps:
            self.num_steps, self._last_line = stay, None
        for attempt in self.attempts:
            attempt.reach = min(attempt.reach, stay)
        for kind, found in self._states.items():
            found[:] = [event for event in found if event.step <= stay]
            self.last_events.pop(kind, None)
            if found:
                self.last_events[kind] = found[-1]


def read_past(run: Storage) -> Past:
    """Goes through a run's ledger once.

    Raises:
        StorageError: the ledger can't be read, is damaged or of another format.
    """
    past = Past()
    for line in read_ledger(run, on_torn=past.torn.append):
        past.take(line)
    past.find_last_step(run)
    return past
