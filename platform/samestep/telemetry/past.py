"""What a ledger tells a recorder that opens it: enough to go on where the last one stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.incidents.rollback import Rollback
from samestep.names import Event
from samestep.telemetry.ledger import TAKEN_BACK, read_ledger, stays_after
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
        ended: fields of its end (`reason`, `redone`), None while it is open.
        ended_at: seconds since the epoch, None while it is open.
    """

    number: int
    started_at: float
    fields: Mapping[str, Any]
    next_step: int
    num_written: int = 0
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
    """The sum of a ledger.

    Attributes:
        attempts: in order.
        num_steps: steps it holds: all of 0 to num_steps - 1.
        written: by sender of the last attempt, the (batch, place in it) of its last line.
        last_step: the record of the last step.
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
    last_step: StepRecord | None = None
    last_events: dict[Event, EventRecord] = field(default_factory=dict)
    num_incidents: int = 0
    rollbacks: list[Rollback] = field(default_factory=list)
    recoveries: list[EventRecord] = field(default_factory=list)
    stop_reason: str | None = None
    num_lines: int = 0
    torn: list[str] = field(default_factory=list)

    @property
    def num_redone(self) -> int:
        """Steps that were taken again, over all attempts."""
        return sum(attempt.num_redone for attempt in self.attempts)

    def values_ids(self) -> dict[int, str]:
        """The `values_id` of each attempt by its number."""
        return {attempt.number: attempt.values_id for attempt in self.attempts}


def read_past(run: Storage) -> Past:
    """Goes through a run's ledger once.

    Raises:
        StorageError: the ledger can't be read, is damaged or of another format.
    """
    past = Past()
    last_step: Mapping[str, Any] | None = None
    states: dict[Event, list[EventRecord]] = {kind: [] for kind in TAKEN_BACK}
    for data in read_ledger(run, on_torn=past.torn.append):
        past.num_lines += 1
        if data["type"] == STEP:
            step = int(data["step"])
            if step + 1 >= past.num_steps:
                past.num_steps, last_step = step + 1, data
            if past.attempts:
                past.attempts[-1].next_step = step + 1
                past.attempts[-1].num_written += 1
        else:
            event = EventRecord.from_json(data)
            _take_event(past, event)
            if event.event in states:
                states[event.event].append(event)
        stay = stays_after(data)
        if stay is not None and stay < past.num_steps:
            past.num_steps, last_step = stay, None
        if stay is not None:
            _take_back(past, states, stay)
        if "seq" in data:
            sender, batch, place = data["seq"]
            past.written[sender] = (int(batch), int(place))
    if last_step is None and past.num_steps:  # its line is one before a rollback
        last_step = next(
            line
            for line in read_ledger(run, past.num_steps - 1, on_torn=lambda _: None)
            if line["type"] == STEP and line["step"] == past.num_steps - 1
        )
    if last_step is not None:
        past.last_step = StepRecord.from_json(last_step)
    return past


def _take_back(past: Past, states: dict[Event, list[EventRecord]], stay: int) -> None:
    for kind, found in states.items():
        found[:] = [event for event in found if event.step <= stay]
        past.last_events.pop(kind, None)
        if found:
            past.last_events[kind] = found[-1]


def _take_event(past: Past, event: EventRecord) -> None:
    past.last_events[event.event] = event
    match event.event:
        case Event.ATTEMPT_STARTED:
            past.written.clear()
            past.stop_reason = None
            past.attempts.append(
                Attempt(
                    number=event.attempt,
                    started_at=event.time,
                    fields=event.fields,
                    next_step=int(event.fields["start_step"]),
                )
            )
        case Event.ATTEMPT_ENDED if past.attempts:
            past.attempts[-1].ended = event.fields
            past.attempts[-1].ended_at = event.time
        case Event.STOP_REQUESTED:
            past.stop_reason = str(event.fields.get("reason", ""))
        case Event.INCIDENT:
            past.num_incidents += 1
        case Event.ROLLED_BACK:
            past.rollbacks.append(Rollback.from_json({**event.fields, "attempt": event.attempt}))
        case Event.RECOVERED:
            past.recoveries.append(event)
        case _:
            pass
