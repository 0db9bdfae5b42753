"""What a fault cost, by what the ledger tells."""

from __future__ import annotations

from typing import Any

from samestep.cluster.drilled import Blow, Watched, missed
from samestep.cluster.strikes import Fault, Strike
from samestep.names import Event
from samestep.telemetry.records import EventRecord, StepRecord


def blow(at_s: float) -> Blow:
    strike = Strike(fault=Fault.KILL_WORKER, step=1)
    return Blow(strike=strike, at_step=1, at_s=at_s, note="")


def step(number: int, at_s: float, **timing: float) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=0,
        samples=1,
        loss=1.0,
        shard_losses=[1.0],
        shard_weights=[1.0],
        grad_norm=1.0,
        lr=[0.1],
        ids="",
        timing={"at_s": at_s, **timing},
    )


def event(kind: Event, attempt: int, at_s: float, **fields: Any) -> EventRecord:
    fields = {"world_size": 2, **fields} if kind is Event.ATTEMPT_STARTED else fields
    return EventRecord(event=kind, step=0, attempt=attempt, time=at_s, fields=fields)


def watched(*records: StepRecord | EventRecord) -> Watched:
    found = Watched()
    for record in records:
        found.take(record)
    return found


def test_time_counts_from_the_fault_on_and_until_the_next() -> None:
    steps = [step(n, at_s) for n, at_s in enumerate([10.0, 11.0, 14.0, 14.5, 20.0])]
    first, second = watched(*steps).costs([blow(11.5), blow(14.75)])
    assert (first.held_up_s, second.held_up_s) == (2.5, 5.25)


def test_an_evaluation_is_not_held_against_a_fault() -> None:
    steps = [step(0, 10.0), step(1, 11.0), step(2, 14.0, evaluation_s=2.5), step(3, 15.0)]
    (cost,) = watched(*steps).costs([blow(10.25)])
    assert cost.held_up_s == 1.0


def test_without_a_step_afterwards_nothing_is_known() -> None:
    (cost,) = watched(step(0, 10.0), step(1, 11.0)).costs([blow(12.0)])
    assert cost.held_up_s is None


def test_steps_taken_again_belong_to_the_fault_that_their_attempt_began_after() -> None:
    found = watched(
        event(Event.ATTEMPT_STARTED, 1, 1.0),
        event(Event.ATTEMPT_ENDED, 1, 5.0, redone=0),
        event(Event.ATTEMPT_STARTED, 2, 5.0),
        event(Event.ATTEMPT_ENDED, 2, 9.0, redone=3),  # told when it ends, after the second fault
        event(Event.ATTEMPT_STARTED, 3, 9.0),
        event(Event.ATTEMPT_ENDED, 3, 12.0, redone=1),
    )
    first, second = found.costs([blow(4.5), blow(8.5)])
    assert (first.redone, second.redone, found.redone) == (3, 1, 4)


def test_a_group_that_grew_is_told_with_the_strike_before_it() -> None:
    sizes = {1.0: 2, 5.0: 1, 9.0: 2, 12.0: 2}
    begun = [
        event(Event.ATTEMPT_STARTED, number, at_s, world_size=size)
        for number, (at_s, size) in enumerate(sizes.items(), start=1)
    ]
    killed, joined, last = watched(*begun).costs([blow(4.5), blow(6.0), blow(11.0)])
    assert (killed.grown_s, joined.grown_s, last.grown_s) == (None, 3.0, None)


def test_a_fault_that_never_struck_is_told_and_costs_nothing() -> None:
    late = Strike(fault=Fault.KILL_WORKER, step=50)
    blows = [blow(10.5), *missed([late], at_step=36, at_s=20.0)]
    struck, never = watched(step(0, 10.0), step(1, 11.0)).costs(blows)
    assert struck.held_up_s == 0.5
    assert (never.strike, never.held_up_s, never.redone) == (late, None, 0)
    assert never.note == "did not strike: the run ended after 36 steps"
    assert (struck.missed, never.missed) == (False, True)
