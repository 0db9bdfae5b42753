from __future__ import annotations

from samestep.faults.progress import WAITS_FOR_PEERS, Phase, Position, Progress


def test_a_position_says_where_it_is() -> None:
    assert str(Position(step=7, phase=Phase.FORWARD, shard=2)) == "forward of step 7, shard 2"
    assert str(Position(step=7, phase=Phase.UPDATE)) == "update of step 7"


def test_whoever_is_behind_sorts_first() -> None:
    forward = Position(step=3, phase=Phase.FORWARD, shard=1)
    waiting = Position(step=3, phase=Phase.EXCHANGE)
    further = Position(step=4, phase=Phase.BEFORE_STEP)
    found = sorted([further, waiting, forward], key=lambda position: position.order)
    assert found == [forward, waiting, further]
    assert Phase.FORWARD not in WAITS_FOR_PEERS


def test_time_counts_from_the_last_mark() -> None:
    now = [100.0]
    progress = Progress(lambda: now[0])
    now[0] = 103.0
    assert (progress.position, progress.still_s) == (Position(), 3.0)
    progress.at(Phase.DATA, step=5, shard=1)
    now[0] = 103.5
    assert progress.position == Position(step=5, phase=Phase.DATA, shard=1)
    assert progress.still_s == 0.5
