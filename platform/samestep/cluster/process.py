"""What the controller asks of this worker process, and what it tells the controller.

One object of the process: the training thread, the thread that answers the controller and a signal
handler meet in it. It outlives attempts, as the process does.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from samestep.engine.flag import Flag

LEAVE_S: Final = 20.0
"""How long a process that was told to end (SIGTERM) may take until its group has parked."""
TERMINATED: Final = 143


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a worker tells with each poll.

    Attributes:
        attempt: the run's attempt it works for; 0 before one has begun.
        step: the step it is taking.
        first_step: the first one of the attempt.
        parked_s: for how long it has waited, its state kept, for the group to be taken apart;
            None while it trains.
        parked_for: why, where nobody asked it to.
        leaving: it was told to end.
        failed_s: seconds since its training failed; None while it has not.
        again_s: seconds since the attempt's first step was through; None before.
        over: all steps of the run are taken; the rest is evaluating and saving.
        telling: its training failed by itself, and its error comes once that is written down.
    """

    attempt: int = 0
    step: int = 0
    first_step: int = 0
    parked_s: float | None = None
    parked_for: str = ""
    leaving: bool = False
    failed_s: float | None = None
    again_s: float | None = None
    over: bool = False
    telling: bool = False


class Process:
    """The state of this worker process."""

    def __init__(self) -> None:
        self._leaving = self.is_training = False
        self._reset()

    def start(self) -> None:
        """A new attempt: nothing is asked of it yet."""
        self._reset()
        self.is_training = True

    def _reset(self) -> None:
        self._flag = Flag.GO_ON
        self._released = threading.Event()
        self._parked_at: float | None = None
        self._parked_for = ""
        self._attempt = self._step = self._first_step = 0
        self._failed_at: float | None = None
        self._again_at: float | None = None
        self._telling = self._over = False

    def end(self) -> None:
        """The training thread is through with its attempt."""
        self.is_training, self._parked_at = False, None

    def ask_to_park(self, *, save: bool) -> None:
        """Parks the group after the step under way; it can't be taken back."""
        self._flag = max(self._flag, Flag.PARK_AND_SAVE if save else Flag.PARK)

    def wants(self) -> int:
        """What this worker asks for in the small talk of its next step."""
        return int(self._flag)

    def leave(self) -> None:
        """The process was told to end: parks the group, which then goes on without it.

        With a checkpoint: the others may have been told so too.
        """
        if not self.is_training:
            os._exit(TERMINATED)
        if not self._leaving:
            self._leaving = True
            threading.Thread(target=self._leave, name="samestep-leave", daemon=True).start()
        self.ask_to_park(save=True)

    def park(self, timeout_s: float, *, why: str = "") -> bool:
        """Waits until the group is taken apart; False when that takes too long.

        Args:
            timeout_s: how long to wait.
            why: what the workers decided by themselves; empty where the group was asked to park.
        """
        self._parked_for = why
        self._parked_at = time.monotonic()
        return self._released.wait(timeout_s)

    def release(self) -> None:
        """Lets a parked worker go."""
        self._released.set()

    def note_step(self, step: int, attempt: int, left: int) -> None:
        """A step is about to be taken; or none, where none are left."""
        if attempt != self._attempt:
            self._attempt, self._first_step, self._again_at = attempt, step, None
        elif self._again_at is None:
            self._again_at = time.monotonic()
        self._step, self._over = step, left == 0

    def note_failure(self) -> None:
        """Training failed just now."""
        self._failed_at = time.monotonic()

    def note_telling(self) -> None:
        """Training failed in this worker: its error comes later than those of the others."""
        self._telling = True

    def whereabouts(self) -> Whereabouts:
        """The present state."""
        now = time.monotonic()
        return Whereabouts(
            attempt=self._attempt,
            step=self._step,
            first_step=self._first_step,
            parked_s=None if self._parked_at is None else now - self._parked_at,
            parked_for=self._parked_for,
            leaving=self._leaving,
            failed_s=None if self._failed_at is None else now - self._failed_at,
            again_s=None if self._again_at is None else now - self._again_at,
            over=self._over,
            telling=self._telling,
        )

    def _leave(self) -> None:
        """Ends the process in time, whatever becomes of the group."""
        self._released.wait(LEAVE_S)
        if not self._released.is_set():
            os._exit(TERMINATED)


here = Process()


def ask_to_park(save: bool) -> None:
    """For the controller: asks this process to park its group."""
    here.ask_to_park(save=save)


def dismiss() -> None:
    """For the controller: lets this process's parked worker go, since the run ends here."""
    here.release()


def settle_bundles(timeout_s: float) -> None:
    """For the controller: waits for the incidents' bundles that this process still writes."""
    from samestep.engine.evidence import settle

    settle(timeout_s)


def set_meeting(meeting: dict[str, Any]) -> None:
    """For the controller: tells this process where its group meets."""
    global _meeting
    _meeting = meeting


def meeting() -> dict[str, Any]:
    """Where this process's group meets."""
    assert _meeting is not None, "the controller has told no meeting"
    return _meeting


_meeting: dict[str, Any] | None = None
