"""What several tell of one cause is one incident, and what has two causes is two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.incidents.cause import AT_ONCE_S, ECHO, may_tell, tells
from samestep.incidents.record import Incident, id_of
from samestep.names import IncidentKind

CRASH = Incident(
    kind=IncidentKind.CRASH, step=7, attempt=2, message="lost", world_rank=0, host="a", time=100.0
)
HANG = replace(CRASH, kind=IncidentKind.HANG, message="no progress", time=95.0)
MEMORY = replace(CRASH, kind=IncidentKind.OUT_OF_MEMORY)
RAISED = replace(
    CRASH, kind=IncidentKind.EXCEPTION, message="worker 0 on a: on_step raised\nValueError: x"
)
ECHOED = replace(CRASH, world_rank=1, host="b", seen={ECHO: True})
STRAGGLER = replace(CRASH, kind=IncidentKind.STRAGGLER)
LATER = {"step": 20, "time": 100.0 + 2 * AT_ONCE_S}


def is_one(before: Incident, now: Incident) -> bool:
    names = [id_of(before), f"{id_of(before)}-2"]
    assert len({may_tell(name, now) for name in names}) == 1
    return may_tell(names[0], now) and tells(before, now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (HANG, CRASH),
        (HANG, replace(CRASH, step=8, world_rank=1)),
        (HANG, replace(HANG, time=97.0, world_rank=1)),
        (HANG, ECHOED),
        (MEMORY, replace(MEMORY, world_rank=1, host="b", step=8)),
        (STRAGGLER, STRAGGLER),  # told again, as the answer was lost
        (CRASH, ECHOED),
        (ECHOED, CRASH),
        (CRASH, replace(CRASH, time=130.0)),
        (RAISED, replace(RAISED, message="worker 1 on b: on_step raised\nValueError: x")),
    ],
)
def test_one_cause_is_one_incident(before: Incident, now: Incident) -> None:
    assert is_one(before, now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (CRASH, replace(CRASH, world_rank=1)),  # two processes that were killed
        (CRASH, replace(CRASH, attempt=3)),
        (CRASH, replace(CRASH, attempt=22)),
        (HANG, replace(CRASH, **LATER)),  # training got through the hang, and went on
        (HANG, replace(HANG, **LATER)),
        (CRASH, MEMORY),
        (RAISED, replace(RAISED, message="on_step raised\nValueError: y")),
        (RAISED, replace(RAISED, step=8)),
        (STRAGGLER, replace(STRAGGLER, time=200.0)),
    ],
)
def test_two_causes_are_two_incidents(before: Incident, now: Incident) -> None:
    assert not is_one(before, now)
