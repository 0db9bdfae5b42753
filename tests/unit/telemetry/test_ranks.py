from __future__ import annotations

from dataclasses import replace

import pytest
from reported import REPORT, Clock

from samestep.telemetry.ranks import WINDOW_S, Ranks, Straggler


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ranks(clock: Clock) -> Ranks:
    made = Ranks(monotonic=clock)
    made.start(1)
    return made


def test_the_slowest_worker_is_compared_with_the_median_one(ranks: Ranks) -> None:
    assert ranks.straggler() is None
    for world_rank, own_s in enumerate([2.0, 2.0, 8.0]):
        ranks.add(replace(REPORT, world_rank=world_rank, own_s=own_s))
    assert ranks.straggler() == Straggler(world_rank=2, ratio=4.0)
    assert ranks.step_seconds() == {0: 0.2, 1: 0.2, 2: 0.8}


def test_one_worker_alone_is_no_straggler(ranks: Ranks) -> None:
    ranks.add(REPORT)
    assert ranks.straggler() is None


def test_a_worker_with_more_shards_is_not_blamed_for_them(ranks: Ranks) -> None:
    ranks.add(REPORT)
    ranks.add(replace(REPORT, world_rank=1, num_samples=80, own_s=4.0))
    straggler = ranks.straggler()
    assert straggler is not None
    assert straggler.ratio == 1.0


def test_a_worker_that_is_silent_is_gone_after_the_window(ranks: Ranks, clock: Clock) -> None:
    ranks.add(REPORT)
    ranks.add(replace(REPORT, world_rank=1))
    clock.now = WINDOW_S - 1
    ranks.add(REPORT)
    clock.now = WINDOW_S + 1
    assert [report.world_rank for report in ranks.present()] == [0]
    assert ranks.straggler() is None


def test_a_new_attempt_starts_without_the_workers_of_the_one_before(ranks: Ranks) -> None:
    ranks.add(replace(REPORT, num_dropped=2))
    ranks.start(2)
    ranks.add(REPORT)  # a late one
    assert ranks.present() == []
    assert ranks.num_dropped == 0
    ranks.add(replace(REPORT, attempt=2, world_rank=3))
    assert [report.world_rank for report in ranks.present()] == [3]


def test_dropped_reports_are_counted_once(ranks: Ranks) -> None:
    ranks.add(REPORT)
    ranks.add(replace(REPORT, num_dropped=2))
    ranks.add(replace(REPORT, num_dropped=2))
    ranks.drop(3)
    assert ranks.num_dropped == 5
