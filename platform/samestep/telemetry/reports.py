"""What every worker tells of itself about once a second: samples for display, never kept.

They go past the ledger to whoever shows the run. Nobody waits for them: while the recorder is away
they are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from samestep.errors import RecorderError
from samestep.names import THREAD_REPORTS, Activity
from samestep.telemetry.link import Patient, Target
from samestep.telemetry.node_load import EVERY_S, GpuLoad, NodeLoad, NodeSampler
from samestep.telemetry.timesheet import seconds_of

INTERVAL_S: Final = 1.0
JOIN_S: Final = 5.0
NO_DEVICE: Final = (0, 0)
CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
WAITING: Final = (Activity.COMMUNICATION, Activity.IDLE, Activity.CHECKPOINT, Activity.EVALUATION)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker did since its last report, and what it holds now.

    Attributes:
        attempt: the worker's attempt.
        world_rank: which worker.
        num_steps: steps it took part in.
        num_samples: samples of the shards that it computed itself.
        own_s: seconds of these steps in which it waited for no other worker.
        host_bytes: resident memory of its process.
        host_limit_bytes: memory that its container or machine has.
        device_bytes: the most that was allocated on its device; 0 without one.
        device_limit_bytes: the device's memory; 0 without one.
        num_dropped: reports of this attempt that never arrived.
        node: the worker's node, in some of its reports.
    """

    attempt: int
    world_rank: int
    num_steps: int
    num_samples: int
    own_s: float
    host_bytes: int
    host_limit_bytes: int
    device_bytes: int = 0
    device_limit_bytes: int = 0
    num_dropped: int = 0
    node: NodeLoad | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerReport:
        """Inverse of `to_json`.

        Raises:
            RecorderError: a field is missing, unknown or of another kind.
        """
        node = data.get("node")
        try:
            return cls(**{**data, "node": None if node is None else NodeLoad.from_json(node)})
        except (TypeError, KeyError) as error:
            raise RecorderError(f"a worker's report is malformed: {error}") from error


class Reporter:
    """Sends a worker's reports from a thread of its own, while it is entered.

    Args:
        target: the recorder.
        attempt: the worker's attempt.
        world_rank: which worker.
        device_memory: gives (most allocated, limit) of the device in bytes.
        gpus: gives what the GPUs that the worker computes on are doing.
        interval_s: between two reports.
        node_every_s: between two that tell of the node.
    """

    def __init__(
        self,
        target: Target,
        *,
        attempt: int,
        world_rank: int,
        device_memory: Callable[[], tuple[int, int]] = lambda: NO_DEVICE,
        gpus: Callable[[], Sequence[GpuLoad]] = tuple,
        interval_s: float = INTERVAL_S,
        node_every_s: float = EVERY_S,
    ) -> None:
        self._target = target.once if isinstance(target, Patient) else target
        self._attempt = attempt
        self._world_rank = world_rank
        self._device_memory = device_memory
        self._interval_s = interval_s
        self._node = NodeSampler(gpus, every_s=node_every_s)
        self._lock = threading.Lock()
        self._num_steps = self._num_samples = self._num_dropped = 0
        self._own_s = 0.0
        self._host_limit_bytes = host_limit_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_REPORTS, daemon=True)

    def add(self, timing: Mapping[str, float], *, num_samples: int) -> None:
        """Takes in a step's timing; never waits."""
        seconds = seconds_of(timing)
        own_s = sum(value for activity, value in seconds.items() if activity not in WAITING)
        with self._lock:
            self._num_steps += 1
            self._num_samples += num_samples
            self._own_s += own_s

    def __enter__(self) -> Reporter:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():  # a recorder that does not answer; it ends with its answer
            logger.warning(
                "attempt=%d the reports of worker %d are left behind in a call of the recorder",
                self._attempt,
                self._world_rank,
            )

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                if not self._target.call("report", self._take().to_json()):
                    return  # the attempt is no longer the present one
            except Exception as error:  # whatever a recorder that is away raises: for display only
                logger.debug("attempt=%d report dropped: %r", self._attempt, error)
                with self._lock:
                    self._num_dropped += 1

    def _take(self) -> WorkerReport:
        device_bytes, device_limit_bytes = self._device_memory()
        node = self._node.sample()
        with self._lock:
            report = WorkerReport(
                attempt=self._attempt,
                world_rank=self._world_rank,
                num_steps=self._num_steps,
                num_samples=self._num_samples,
                own_s=self._own_s,
                host_bytes=int(psutil.Process().memory_info().rss),
                host_limit_bytes=self._host_limit_bytes,
                device_bytes=device_bytes,
                device_limit_bytes=device_limit_bytes,
                num_dropped=self._num_dropped,
                node=node,
            )
            self._num_steps = self._num_samples = 0
            self._own_s = 0.0
        return report


def host_limit_bytes() -> int:
    """Memory that this process may use: its container's where that is less than the machine's."""
    total = int(psutil.virtual_memory().total)
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit():
            return min(total, int(text))
    return total
