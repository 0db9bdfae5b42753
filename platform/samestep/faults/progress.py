"""Where a worker is in its step: marked by the training thread, looked at by its watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a step, in the order in which a worker comes through them."""

    STARTING = "starting"
    BEFORE_STEP = "before_step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"
    UPDATE = "update"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    HOOKS = "hooks"
    ENDING = "ending"


WAITS_FOR_PEERS = (Phase.EXCHANGE, Phase.CHECKPOINT, Phase.ENDING)
"""In these a worker waits for others: that it stands still does not make it the one to blame."""

_ORDER = {phase: number for number, phase in enumerate(Phase)}


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the run.

    Attributes:
        step: steps taken so far.
        phase: what the worker does.
        shard: of which it does it; -1 where that says nothing.
    """

    step: int = 0
    phase: Phase = Phase.STARTING
    shard: int = -1

    def __str__(self) -> str:
        shard = f", shard {self.shard}" if self.shard >= 0 else ""
        return f"{self.phase} of step {self.step}{shard}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts workers by how far they are; the least is the one that the others wait for."""
        return self.step, _ORDER[self.phase], self.shard


class Progress:
    """The present position, and since when.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # One tuple, so that another thread never sees a half of it.
        self._now = (Position(), monotonic())

    def at(self, phase: Phase, *, step: int, shard: int = -1) -> None:
        """Marks a new position; takes about a microsecond."""
        self._now = (Position(step=step, phase=phase, shard=shard), self._monotonic())

    @property
    def position(self) -> Position:
        """The last one marked."""
        return self._now[0]

    @property
    def still_s(self) -> float:
        """Seconds since then."""
        return self._monotonic() - self._now[1]
