from __future__ import annotations

from typing import Any

from samestep.names import IncidentKind
from samestep.telemetry.stalls import SETTLE_S, Stalls


def report(step: int, phase: int, place: str, shard: int = -1) -> dict[str, Any]:
    return {"order": [step, phase, shard], "place": place, "still_s": 9.6, "stacks": f"in {place}"}


def test_the_worker_that_is_behind_gets_the_blame_whoever_told_first() -> None:
    stalls = Stalls()
    stalls.take(0, "a", report(7, 5, "exchange of step 7"))
    stalls.take(1, "b", report(7, 3, "forward of step 7, shard 2", 2))
    assert stalls.is_due(2)
    incident = stalls.settle(attempt=3, world_size=2, time_s=5.0)
    assert incident is not None
    assert (incident.kind, incident.step, incident.attempt) == (IncidentKind.HANG, 7, 3)
    assert (incident.world_rank, incident.host) == (1, "b")
    assert incident.message == (
        "worker 1 on b made no progress for 10 s in forward of step 7, shard 2; waiting: worker 0 "
        "on a in exchange of step 7"
    )
    assert incident.traceback == "in forward of step 7, shard 2"
    assert incident.seen["workers"]["0"]["stacks"] == "in exchange of step 7"
    assert stalls.settle(attempt=3, world_size=2, time_s=6.0) is None


def test_a_worker_that_says_nothing_is_to_blame_once_the_others_had_time() -> None:
    now = [0.0]
    stalls = Stalls(lambda: now[0])
    assert not stalls.is_due(3)
    stalls.take(0, "a", report(2, 5, "exchange of step 2"))
    stalls.take(2, "c", report(2, 5, "exchange of step 2"))
    assert not stalls.is_due(3)
    now[0] = SETTLE_S + 0.1
    assert stalls.is_due(3)
    incident = stalls.settle(attempt=1, world_size=3, time_s=0.0)
    assert incident is not None
    assert (incident.world_rank, incident.seen["silent"]) == (1, [1])
    assert "worker 1 said nothing for 10 s" in incident.message
    assert "worker 0 on a in exchange of step 2; worker 2 on c" in incident.message


def test_a_worker_that_waits_for_nobody_is_to_blame_before_one_that_tells_too_late() -> None:
    """On a busy machine a watchdog may be slow; whoever stands in a forward holds up the rest."""
    stalls = Stalls()
    stalls.take(0, "a", {**report(7, 5, "exchange of step 7"), "ends": False})
    stalls.take(2, "c", {**report(7, 3, "forward of step 7, shard 2", 2), "ends": True})
    incident = stalls.settle(attempt=1, world_size=3, time_s=0.0)
    assert incident is not None
    assert (incident.world_rank, incident.host, incident.seen["silent"]) == (2, "c", [1])
    assert incident.message == (
        "worker 2 on c made no progress for 10 s in forward of step 7, shard 2; waiting: worker 0 "
        "on a in exchange of step 7"
    )
    assert incident.traceback == "in forward of step 7, shard 2"
