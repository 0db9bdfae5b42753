"""What a run of a drill came to: how it ended, and what each fault cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.cluster.strikes import Strike
from samestep.names import Activity, Event
from samestep.telemetry.records import EventRecord, StepRecord


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault that struck, and what it cost.

    Attributes:
        strike: what it was to be.
        at_step: steps taken when it struck.
        held_up_s: the longest time without a new step, from then to the next strike; evaluations
            are not in it.
        redone: steps taken again by attempts that began from then to the next strike.
        grown_s: until an attempt with more workers began, before the next strike; None: none did.
        note: whom it hit; where it could not strike, why.
        missed: it could not strike.
        state_lives: when it had struck a worker still held the state, so that nothing of what it
            had taken need be taken again.
    """

    strike: Strike
    at_step: int
    held_up_s: float | None
    redone: int
    grown_s: float | None = None
    note: str = ""
    missed: bool = False
    state_lives: bool = True


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """One run of a drill.

    Attributes:
        name: of the run.
        status: as its result says.
        digest: of its last checkpoint.
        same: its digest is the undisturbed run's.
        steps: in the ledger.
        redone: steps taken again, over all attempts.
        attempts: how many there were.
        wall_s: from the first start of its driver to the last end.
        struck: the faults in order.
        message: why it failed.
    """

    name: str
    status: str
    digest: str
    same: bool
    steps: int
    redone: int
    attempts: int
    wall_s: float
    struck: tuple[Struck, ...]
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A fault at the time it struck.

    Attributes:
        strike: what it was to be.
        at_step: steps taken then.
        at_s: seconds since the epoch.
        note: whom it hit; where it could not strike, why.
        missed: it could not strike.
        state_lives: when it had struck a worker still held the state.
    """

    strike: Strike
    at_step: int
    at_s: float
    note: str
    missed: bool = False
    state_lives: bool = True


def missed(strikes: Sequence[Strike], *, at_step: int, at_s: float) -> list[Blow]:
    """Faults that were due only after the run had ended: told, not passed over."""
    note = f"did not strike: the run ended after {at_step} steps"
    return [
        Blow(strike=strike, at_step=at_step, at_s=at_s, note=note, missed=True)
        for strike in strikes
    ]


@dataclass(kw_only=True)
class Watched:
    """What the ledger of a run has said so far."""

    num_steps: int = 0
    redone: int = 0
    attempts: list[Mapping[str, Any]] = field(default_factory=list)
    step_times: list[tuple[float, float]] = field(default_factory=list)
    begun_at: dict[int, float] = field(default_factory=dict)
    redone_by: dict[int, int] = field(default_factory=dict)

    def take(self, record: StepRecord | EventRecord) -> None:
        """Takes in what the ledger says next."""
        if isinstance(record, StepRecord):
            self.num_steps = max(self.num_steps, record.step + 1)
            at_s = record.timing.get("at_s", record.time or 0.0)
            self.step_times.append((at_s, record.timing.get(f"{Activity.EVALUATION}_s", 0.0)))
        elif record.event is Event.ATTEMPT_STARTED:
            self.attempts.append(record.fields)
            self.begun_at[record.attempt] = record.time
        elif record.event is Event.ATTEMPT_ENDED:
            redone = int(record.fields.get("redone", 0))
            self.redone += redone
            self.redone_by[record.attempt] = redone

    def costs(self, blows: Sequence[Blow]) -> list[Struck]:
        """What each fault cost, until the next one."""
        times = sorted(self.step_times)
        found = []
        for number, blow in enumerate(blows):
            rest = blows[number + 1 :]
            until = rest[0].at_s if rest else float("inf")
            gaps = [
                max(0.0, at_s - max(before_s, blow.at_s) - evaluation_s)
                for (before_s, _), (at_s, evaluation_s) in itertools.pairwise(times)
                if blow.at_s < at_s <= until
            ]
            redone = sum(
                self.redone_by.get(attempt, 0)
                for attempt, begun_s in self.begun_at.items()
                if blow.at_s < begun_s <= until
            )
            found.append(
                Struck(
                    strike=blow.strike,
                    at_step=blow.at_step,
                    held_up_s=max(gaps) if gaps else None,
                    redone=redone,
                    grown_s=self._grown_s(blow.at_s, until),
                    note=blow.note,
                    missed=blow.missed,
                    state_lives=blow.state_lives,
                )
            )
        return found

    def _grown_s(self, from_s: float, until_s: float) -> float | None:
        sizes = [int(fields["world_size"]) for fields in self.attempts]
        begun = zip(self.begun_at.values(), sizes, strict=True)
        for (_, before), (begun_s, size) in itertools.pairwise(begun):
            if size > before and from_s < begun_s <= until_s:
                return begun_s - from_s
        return None


def told(result: RoundResult) -> str:
    """A round in a line."""
    return (
        f"{result.name}: {result.status}, {result.steps} steps, {result.attempts} attempts, "
        f"{result.redone} redone, {result.wall_s:.1f} s, {result.digest[:12]}"
        + (f": {result.message}" if result.message else "")
    )
