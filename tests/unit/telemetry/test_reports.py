from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from samestep.errors import RecorderError
from samestep.telemetry.link import Patient
from samestep.telemetry.node_load import GpuLoad, NodeSampler
from samestep.telemetry.reports import Reporter, WorkerReport, host_limit_bytes

WAIT_S = 20.0


@dataclass
class Recorder:
    """Takes reports, after it was away for some calls; says stop after some more."""

    away: int = 0
    present: int = 1_000
    found: list[WorkerReport] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def call(self, method: str, *args: Any) -> bool:
        assert method == "report"
        (data,) = args
        assert isinstance(data, Mapping)
        with self.came:
            self.came.notify_all()
            if self.away:
                self.away -= 1
                raise ConnectionError("away")
            self.found.append(WorkerReport.from_json(data))
            return len(self.found) < self.present

    def wait_for(self, num_steps: int) -> list[WorkerReport]:
        with self.came:
            told = self.came.wait_for(
                lambda: sum(report.num_steps for report in self.found) >= num_steps, WAIT_S
            )
        assert told
        return self.found


def reporter(target: Any) -> Reporter:
    return Reporter(
        target,
        attempt=3,
        world_rank=1,
        device_memory=lambda: (7, 9),
        interval_s=0.01,
    )


def test_steps_are_told_once_with_memory_and_without_waiting_for_others() -> None:
    recorder = Recorder()
    timing = {"training_s": 1.0, "data_s": 0.5, "communication_s": 4.0, "elapsed_s": 5.5}
    with reporter(recorder) as reports:
        for _ in range(3):
            reports.add(timing, num_samples=8)
        found = recorder.wait_for(3)
    assert sum(report.num_samples for report in found) == 24
    assert sum(report.own_s for report in found) == pytest.approx(4.5)
    last = found[-1]
    assert (last.attempt, last.world_rank) == (3, 1)
    assert (last.device_bytes, last.device_limit_bytes) == (7, 9)
    assert 0 < last.host_bytes < last.host_limit_bytes == host_limit_bytes()


def test_reports_to_a_recorder_that_is_away_are_dropped_at_once_and_counted() -> None:
    recorder = Recorder(away=2)
    with reporter(Patient(recorder)) as reports:
        with recorder.came:
            assert recorder.came.wait_for(lambda: not recorder.away, WAIT_S)
        reports.add({"step_s": 1.0}, num_samples=8)
        found = recorder.wait_for(1)
    assert found[-1].num_dropped == 2


def test_a_worker_of_an_earlier_attempt_falls_silent() -> None:
    recorder = Recorder(present=2)
    with reporter(recorder) as reports:
        reports._thread.join(WAIT_S)
        assert not reports._thread.is_alive()
    assert len(recorder.found) == 2


@pytest.mark.parametrize("data", [{"attempt": 1}, {"node": {"host": "a"}}])
def test_a_malformed_report_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(RecorderError, match="malformed"):
        WorkerReport.from_json(data)


def test_a_report_tells_of_the_node_when_that_is_due() -> None:
    recorder = Recorder()
    gpu = GpuLoad(index=3, memory_bytes=1, memory_limit_bytes=2, busy_percent=None)
    with Reporter(
        recorder, attempt=3, world_rank=1, gpus=lambda: [gpu], interval_s=0.01, node_every_s=0.0
    ) as reports:
        reports.add({}, num_samples=8)
        found = recorder.wait_for(1)
    node = found[-1].node
    assert node is not None
    assert (node.host, node.gpus) == (os.uname().nodename, (gpu,))
    assert 0 <= node.cpu_percent <= 100
    assert 0 < node.memory_bytes < node.memory_limit_bytes


def test_a_node_is_looked_at_no_more_often_than_is_asked_for() -> None:
    times = iter([0.0, 9.9, 10.0, 19.9, 20.0])
    sampler = NodeSampler(every_s=10.0, monotonic=times.__next__)
    assert [sampler.sample() is not None for _ in range(4)] == [False, True, False, True]
