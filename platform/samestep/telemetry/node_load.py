"""How busy a worker's node is: samples for display, taken a few times a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

EVERY_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """A GPU at a moment, whoever uses it.

    Attributes:
        index: as its machine counts.
        memory_bytes: in use.
        memory_limit_bytes: all there is.
        busy_percent: share of the last second in which a kernel ran; None where that can't be told.
    """

    index: int
    memory_bytes: int
    memory_limit_bytes: int
    busy_percent: float | None


@dataclass(frozen=True, kw_only=True)
class NodeLoad:
    """A node at a moment.

    Attributes:
        host: its name.
        cpu_percent: share of all cores that was busy since the sample before.
        memory_bytes: in use, of the whole machine.
        memory_limit_bytes: all there is in the machine.
        gpus: those that the worker computes on.
    """

    host: str
    cpu_percent: float
    memory_bytes: int
    memory_limit_bytes: int
    gpus: Sequence[GpuLoad] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeLoad:
        """From what `dataclasses.asdict` gave."""
        return cls(**{**data, "gpus": tuple(GpuLoad(**gpu) for gpu in data["gpus"])})


class NodeSampler:
    """Looks at the node it is on, at most every so many seconds.

    Args:
        gpus: gives the GPUs that this process computes on.
        every_s: least time between two samples.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        gpus: Callable[[], Sequence[GpuLoad]] = tuple,
        *,
        every_s: float = EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._every_s = every_s
        self._monotonic = monotonic
        self._host = os.uname().nodename
        self._looked_at = monotonic()
        self._busy_s, self._all_s = _cpu_seconds()

    def sample(self) -> NodeLoad | None:
        """The node since the sample before; None where one is not due yet."""
        now = self._monotonic()
        if now < self._looked_at + self._every_s:
            return None
        self._looked_at = now
        busy_s, all_s = _cpu_seconds()
        share = (busy_s - self._busy_s) / max(all_s - self._all_s, 1e-9)
        self._busy_s, self._all_s = busy_s, all_s
        memory = psutil.virtual_memory()
        return NodeLoad(
            host=self._host,
            cpu_percent=100.0 * min(1.0, max(0.0, share)),
            memory_bytes=int(memory.used),
            memory_limit_bytes=int(memory.total),
            gpus=tuple(self._gpus()),
        )


def _cpu_seconds() -> tuple[float, float]:
    """Seconds of all cores since the machine's start: busy, and in all."""
    times = psutil.cpu_times()
    # On Linux the time of guests is in that of the user already.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total
