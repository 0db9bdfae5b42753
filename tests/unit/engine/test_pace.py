"""How often a worker asks how its save stands."""

from __future__ import annotations

import threading
from itertools import accumulate

import pytest

from samestep.engine.pace import Pace

WAIT_S = 20.0


def pauses(num_workers: int, *, num: int = 10, hurried_after: int = 99) -> list[float]:
    slept: list[float] = []
    pace = Pace(num_workers, sleep=slept.append)
    for number in range(num):
        if number == hurried_after:
            pace.hurry()
        assert pace.pause()
    return slept


def test_few_workers_ask_at_once_and_then_once_a_second() -> None:
    assert pauses(4) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("num_workers", [100, 1_000, 2_000, 10_000])
def test_however_many_workers_ask_the_recorder_answers_a_thousand_a_second(
    num_workers: int,
) -> None:
    asked_at = list(accumulate(pauses(num_workers, num=30)))
    num_in_last = sum(at > asked_at[-1] - 10.0 for at in asked_at)
    assert num_workers * num_in_last / 10.0 <= 1_000
    assert sum(at <= 1.0 for at in asked_at) * num_workers <= 4_000


def test_a_few_workers_that_training_waits_for_ask_as_often_as_they_may() -> None:
    slept = pauses(4, num=18, hurried_after=9)
    assert slept[8:] == [1.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]
    assert pauses(2_000, num=18, hurried_after=9)[8:] == [2.0, 0.5, 1.0, *[2.0] * 7]


@pytest.mark.parametrize(("how", "goes_on"), [("hurry", True), ("end", False)])
def test_a_pause_is_cut_short_when_training_waits_and_when_nobody_wants_to_know(
    how: str, goes_on: bool
) -> None:
    pace, found = Pace(1_000_000), []
    thread = threading.Thread(target=lambda: found.append(pace.pause()), daemon=True)
    thread.start()
    getattr(pace, how)()
    thread.join(WAIT_S)
    assert found == [goes_on]
