"""How long training stood still, by one clock."""

from __future__ import annotations

from samestep.cluster.process import Whereabouts
from samestep.cluster.recovery import Stopwatch


def at(attempt: int, again_s: float | None) -> Whereabouts:
    return Whereabouts(attempt=attempt, again_s=again_s)


def test_the_time_runs_from_the_fault_to_the_first_step_of_all() -> None:
    now = [100.0]
    watch = Stopwatch(lambda: now[0])
    watch.stop("crash", "lost\nmore", ago_s=0.1, workers=3, planned=False)
    watch.stop("start", "an echo of it", ago_s=None, workers=0, planned=False)
    now[0] = 101.0
    assert watch.look([at(2, 0.2), at(2, None)], 2) is None
    assert watch.look([at(2, 0.2), at(1, 0.2)], 2) is None
    found = watch.look([at(2, 0.5), at(2, 0.3)], 2)
    assert found is not None
    attempt, fields = found
    assert attempt == 2
    assert abs(fields.pop("again_s") - 0.8) < 1e-9
    assert fields == {
        "cause": "crash",
        "message": "lost",
        "planned": False,
        "detected_s": 0.1,
        "workers": [3, 2],
    }
    assert watch.look([at(2, 9.0)], 2) is None


def test_workers_that_are_not_reached_count_all_the_same() -> None:
    watch = Stopwatch(lambda: 0.0)
    watch.stop("crash", "lost", ago_s=None, workers=2, planned=False)
    found = watch.look([at(2, 0.5)], 2)
    assert found is not None
    assert found[1]["workers"] == [2, 2]
