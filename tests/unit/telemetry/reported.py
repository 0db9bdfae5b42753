"""A worker's report, and a clock that stands where it is put."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.telemetry.reports import WorkerReport

REPORT = WorkerReport(
    attempt=1,
    world_rank=0,
    num_steps=10,
    num_samples=40,
    own_s=2.0,
    host_bytes=100,
    host_limit_bytes=1000,
)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
