"""How busy nodes are, as MLflow shows it: its own names for a run on several nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from samestep.names import Series
from samestep.telemetry.mlflow_client import Point
from samestep.telemetry.node_load import NodeLoad
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.tracking_names import tracked_name

SLOT_S: Final = 10.0


class SystemMetrics:
    """Makes points of workers' reports: one of a kind in 10 seconds, whoever tells.

    A point's step is the number of the slot since the run began in MLflow, so it goes on over
    attempts, and needs nothing to be kept.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def points(self, found: Sequence[WorkerReport], *, now_ms: int, start_ms: int) -> list[Point]:
        """The points of some reports.

        Args:
            found: reports of any workers.
            now_ms: milliseconds since the epoch.
            start_ms: when the run began in MLflow.
        """
        slot = max(0, int((now_ms - start_ms) / (1000 * SLOT_S)))
        points = []
        for report in found:
            for name, value in named_values(report.node) if report.node is not None else ():
                if self._slots.get(name) != slot:
                    self._slots[name] = slot
                    points.append(Point(name=name, value=value, step=slot, time_ms=now_ms))
        return points


def named_values(node: NodeLoad) -> Iterator[tuple[str, float]]:
    """What there is to say of a node as (name, value)."""
    values = {
        "cpu_utilization_percentage": node.cpu_percent,
        "system_memory_usage_megabytes": node.memory_bytes / 1e6,
        "system_memory_usage_percentage": 100 * node.memory_bytes / node.memory_limit_bytes,
    }
    for gpu in node.gpus:
        start = f"gpu_{gpu.index}"
        values[f"{start}_memory_usage_megabytes"] = gpu.memory_bytes / 1e6
        values[f"{start}_memory_usage_percentage"] = 100 * gpu.memory_bytes / gpu.memory_limit_bytes
        if gpu.busy_percent is not None:
            values[f"{start}_utilization_percentage"] = gpu.busy_percent
    for name, value in values.items():
        yield tracked_name(f"{Series.SYSTEM_PREFIX}{node.host}/{name}"), round(value, 1)
