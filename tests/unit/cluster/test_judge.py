"""What the recorder is told of a failure of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from samestep.cluster.judge import Judge
from samestep.cluster.notes import Notes
from samestep.cluster.policy import Cause, Fault
from samestep.cluster.process import Whereabouts
from samestep.incidents.cause import ECHO
from samestep.spec_faults import Retries

CRASH = Fault(cause=Cause.CRASH, message="worker 0 was lost", world_rank=0, host="a")
LOST = Fault(
    cause=Cause.LOST, message="lost worker 0", world_rank=1, host="b", step=7, attempt=2, told=True
)


class Told:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.incidents: list[dict[str, Any]] = []

    def call(self, method: str, *args: Any) -> Any:
        if method == "note_incident":
            self.incidents.append(args[0])


def told_of(*failures: Sequence[Fault]) -> list[dict[str, Any]]:
    told = Told()
    notes = Notes(told)
    judge = Judge(Retries(), notes)
    for faults in failures:
        assert judge.decide(faults, [Whereabouts(attempt=2, step=7)]).retry
    notes.close()
    return told.incidents


def test_a_lost_worker_is_told_of_once_whoever_misses_it() -> None:
    (incident,) = told_of([LOST, CRASH, replace(LOST, world_rank=2)])
    assert (incident["world_rank"], incident["host"], incident["seen"]) == (0, "a", {})
    assert (incident["step"], incident["attempt"]) == (7, 2)


def test_where_only_others_miss_a_worker_none_of_them_is_blamed() -> None:
    (incident,) = told_of([LOST, replace(LOST, world_rank=2)])
    assert (incident["kind"], incident["world_rank"], incident["host"]) == ("crash", None, "")
    assert incident["seen"] == {ECHO: True}
    assert incident["message"] == "lost worker 0"


def test_a_run_that_ends_for_want_of_room_leaves_an_incident() -> None:
    told = Told()
    notes = Notes(told)
    judge = Judge(Retries(), notes)
    judge.saw([Whereabouts(attempt=2, step=7)])
    fault = Fault(cause=Cause.NO_ROOM, message="1 of at least 2 workers have room", exit_status=2)
    verdict = judge.decide([fault], [])
    notes.close()
    assert not verdict.retry
    assert verdict.message == "1 of at least 2 workers have room"
    [incident] = told.incidents
    assert (incident["kind"], incident["attempt"], incident["step"]) == ("no_room", 2, 7)
    assert incident["message"] == verdict.message
