"""Workers that stood still, and which of them the others were waiting for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from samestep.incidents.record import Incident
from samestep.names import IncidentKind

SETTLE_S: Final = 3.0


@dataclass(frozen=True, kw_only=True)
class StalledWorker:
    """What a worker's watchdog told.

    Attributes:
        world_rank: of the worker.
        host: its machine.
        order: sorts workers by how far they are.
        place: the same for people.
        still_s: seconds without progress.
        stacks: of its threads.
        ends: its process ends for it: where it stands it waits for no other worker.
    """

    world_rank: int
    host: str
    order: tuple[int, int, int]
    place: str
    still_s: float
    stacks: str
    ends: bool = False

    @property
    def step(self) -> int:
        """Steps it had taken."""
        return self.order[0]


class Stalls:
    """Gathers what the watchdogs of one attempt tell, and makes one incident of it.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._first_at: float | None = None
        self._workers: dict[int, StalledWorker] = {}

    def take(self, world_rank: int, host: str, report: Mapping[str, Any]) -> None:
        """Takes in a worker's report: `order`, `place`, `still_s`, `stacks` and `ends`."""
        if self._first_at is None:
            self._first_at = self._monotonic()
        step, phase, shard = report["order"]
        self._workers[world_rank] = StalledWorker(
            world_rank=world_rank,
            host=host,
            order=(int(step), int(phase), int(shard)),
            place=str(report["place"]),
            still_s=float(report["still_s"]),
            stacks=str(report["stacks"]),
            ends=bool(report.get("ends")),
        )

    @property
    def is_open(self) -> bool:
        """Somebody told, and what came of it is not settled yet."""
        return self._first_at is not None

    def is_due(self, world_size: int) -> bool:
        """All workers told, or those that did had time enough."""
        if self._first_at is None:
            return False
        return len(self._workers) >= world_size or self._monotonic() - self._first_at > SETTLE_S

    def settle(self, *, attempt: int, world_size: int, time_s: float) -> Incident | None:
        """The incident, and a new start; None when nobody stood still.

        To blame is who stands where nobody waits for another. Else it is a worker that did not even
        tell: it is stopped, cut off, or holds the interpreter lock. Else the one that is behind.
        """
        told, self._workers, self._first_at = self._workers, {}, None
        if not told:
            return None
        silent = [rank for rank in range(world_size) if rank not in told]
        own = [worker for worker in told.values() if worker.ends]
        behind = min(own or told.values(), key=lambda worker: (worker.order, worker.world_rank))
        is_silent = bool(silent) and not own
        rest = [w for w in told.values() if is_silent or w.world_rank != behind.world_rank]
        waiting = "; ".join(f"worker {w.world_rank} on {w.host} in {w.place}" for w in rest)
        if is_silent:
            ranks = ", ".join(map(str, silent))
            message = (
                f"worker {ranks} said nothing for {behind.still_s:.0f} s (stopped, cut off, or "
                f"holding the interpreter lock) while others stood in: {waiting}"
            )
        else:
            message = (
                f"worker {behind.world_rank} on {behind.host} made no progress for "
                f"{behind.still_s:.0f} s in {behind.place}"
                + (f"; waiting: {waiting}" if waiting else "")
            )
        return Incident(
            kind=IncidentKind.HANG,
            step=behind.step,
            attempt=attempt,
            world_rank=silent[0] if is_silent else behind.world_rank,
            host="" if is_silent else behind.host,
            message=message,
            time=time_s,
            traceback="" if is_silent else behind.stacks,
            seen={
                "silent": silent,
                "workers": {
                    str(w.world_rank): {"place": w.place, "still_s": w.still_s, "stacks": w.stacks}
                    for w in told.values()
                },
            },
        )
