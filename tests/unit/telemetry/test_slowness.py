from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reported import REPORT, Clock

from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec_incidents import Incidents
from samestep.telemetry.slowness import Slowness


class Group:
    """Three workers that report every second; one of them may be slow."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.slowness = Slowness(Incidents(**settings), monotonic=self.clock)

    def report(self, num_seconds: int, *, slow: int = 1, times: float = 4.0) -> list[Incident]:
        found = []
        for _ in range(num_seconds):
            self.clock.now += 1.0
            for rank in range(3):
                own_s = REPORT.own_s * (times if rank == slow else 1.0)
                report = replace(REPORT, world_rank=rank, own_s=own_s)
                incident = self.slowness.take(report, hosts=["a", "b", "c"], step=7)
                found += [incident] if incident is not None else []
        return found


@pytest.fixture
def group() -> Group:
    return Group(straggler_ratio=3.0, straggler_after_s=20.0)


def test_a_worker_that_stays_slow_is_told_of_once_with_its_node(group: Group) -> None:
    assert group.report(20) == []
    (incident,) = group.report(60)
    assert incident.kind is IncidentKind.STRAGGLER
    assert (incident.world_rank, incident.host, incident.step) == (1, "b", 7)
    assert incident.seen == {"ratio": 4.0, "step_s": {"0": 0.2, "1": 0.8, "2": 0.2}}
    assert incident.message.startswith("worker 1 takes 4.0 times as long for a sample as the")


def test_one_that_recovers_in_time_is_not(group: Group) -> None:
    assert group.report(10) == []
    assert group.report(40, times=1.0) == []
    assert group.report(15) == []


def test_another_one_is_counted_from_its_own_beginning(group: Group) -> None:
    (first,) = group.report(30, slow=1)
    (second,) = group.report(90, slow=2)
    assert (first.world_rank, second.world_rank) == (1, 2)


def test_it_can_be_turned_off() -> None:
    assert Group(straggler_ratio=0.0).report(100) == []
