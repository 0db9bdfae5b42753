from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from samestep.names import Activity
from samestep.telemetry.timesheet import Timesheet, during, seconds_of


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Worker:
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._timesheet = Timesheet(monotonic=self.clock)

    @during(Activity.TRAINING)
    def step(self, seconds: float) -> float:
        self.clock.now += seconds
        self.wait_for_data(2.0)
        self.clock.now += seconds
        return seconds

    @during(Activity.DATA)
    def wait_for_data(self, seconds: float) -> None:
        self.clock.now += seconds

    @during(Activity.CHECKPOINT)
    def fail(self) -> None:
        self.clock.now += 5.0
        raise ValueError


def test_time_within_another_activity_is_taken_from_it_and_nothing_is_left_out() -> None:
    worker = Worker()
    worker.clock.now += 1.0
    assert worker.step(3.0) == 3.0
    worker.clock.now += 0.5
    lap = worker._timesheet.lap(waited_s=4.0)
    assert lap == {
        "training_s": 2.0,
        "data_s": 2.0,
        "communication_s": 4.0,
        "idle_s": 1.5,
        "elapsed_s": 9.5,
    }
    worker.step(1.0)
    assert worker._timesheet.lap() == {"training_s": 2.0, "data_s": 2.0, "elapsed_s": 13.5}


def test_an_error_gives_the_time_back_to_what_was_on_before() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match=r"^$"):
        worker.fail()
    worker.clock.now += 1.0
    assert worker._timesheet.lap() == {"checkpoint_s": 5.0, "idle_s": 1.0, "elapsed_s": 6.0}


def test_waiting_can_be_no_longer_than_the_training_it_was_in() -> None:
    worker = Worker()
    worker.step(1.0)
    lap = worker._timesheet.lap(waited_s=50.0)
    assert lap == {"communication_s": 2.0, "data_s": 2.0, "elapsed_s": 4.0}
    assert seconds_of(lap)[Activity.TRAINING] == 0.0


def test_a_lap_in_the_middle_of_an_activity_splits_it() -> None:
    worker = Worker()
    with worker._timesheet.on(Activity.EVALUATION):
        worker.clock.now += 1.0
        assert worker._timesheet.lap() == {"evaluation_s": 1.0, "elapsed_s": 1.0}
        worker.clock.now += 2.0
    assert worker._timesheet.lap() == {"evaluation_s": 2.0, "elapsed_s": 3.0}
