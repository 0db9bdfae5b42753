"""What the steps after a snapshot take longer, from the times of exchanges alone."""

from __future__ import annotations

import pytest

from samestep.engine.drag import Drag


def drive(drag: Drag, laps_s: list[float], *, at_s: float, pause_s: float = 0.0) -> float:
    """Exchanges after so many seconds each; the first one has waited for a copy besides."""
    for lap_s in laps_s:
        at_s += lap_s + pause_s
        pause_s = 0.0
        drag.exchanged(at_s)
    return at_s


def test_it_is_the_time_of_two_steps_over_the_usual_and_the_copy_is_no_part_of_it() -> None:
    drag = Drag()
    at_s = drive(drag, [0.0, *[0.1] * 4], at_s=5.0)
    for longer_s in (9.0, 0.04):  # behind the first one memory is got
        drag.taken(0.3)
        at_s = drive(drag, [0.11, 0.09 + longer_s, *[0.1] * 5], at_s=at_s, pause_s=0.3)
    assert drag.seconds == pytest.approx(0.04)


def test_one_slow_step_among_them_does_not_count() -> None:
    drag = Drag()
    at_s = drive(drag, [0.0, *[0.1] * 4], at_s=0.0)
    for longer_s in (0.0, 0.02, 7.0, 0.03, 0.02, 0.01):  # the third one met an evaluation
        drag.taken(0.0)
        at_s = drive(drag, [0.1, 0.1 + longer_s, 0.1, 8.0, 0.1], at_s=at_s)
    assert drag.seconds == pytest.approx(0.02)


@pytest.mark.parametrize("laps_s", [[], [0.0], [0.0, 0.1]])
def test_before_any_is_known_there_is_none(laps_s: list[float]) -> None:
    drag = Drag()
    at_s = drive(drag, laps_s, at_s=0.0)
    assert drag.seconds == 0.0
    drag.taken(0.1)
    drive(drag, [0.1, 0.1], at_s=at_s)
    assert drag.seconds == 0.0


def test_steps_that_happen_to_be_fast_make_no_snapshot_cheaper_than_its_copy() -> None:
    drag = Drag()
    at_s = drive(drag, [0.0, *[0.1] * 4], at_s=0.0)
    for _ in range(3):
        drag.taken(0.0)
        at_s = drive(drag, [0.05, 0.05, 0.1], at_s=at_s)
    assert drag.seconds == 0.0


def test_what_may_be_chance_is_not_believed_before_it_has_come_often() -> None:
    drag = Drag()
    noisy = [0.09, 0.11, 0.1, 0.12, 0.08]  # the usual deviation from 0.1 is 0.01
    at_s = drive(drag, [0.0, *noisy], at_s=0.0)
    told = []
    for _ in range(26):
        drag.taken(0.0)
        at_s = drive(drag, [0.1, 0.12, *noisy], at_s=at_s)
        told.append(drag.seconds)
    assert told[:3] == [0.0] * 3  # the first one does not count, and then 0.02 may be chance
    assert told == sorted(told)
    assert told[-1] == pytest.approx(0.02 - 0.03 / 5)
