"""Splits a worker's time among its activities, without gaps: at each moment one of them is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from samestep.names import Activity

ELAPSED: Final = "elapsed_s"
SAVE: Final = "save_s"
"""In the timing of the step behind it: for how long a checkpoint held training up."""
SNAPSHOT: Final = "snapshot_s"
"""Likewise, of a snapshot."""
SNAPSHOT_AT: Final = "snapshot_at_s"
"""When the state of a snapshot was copied that has become whole since the last step."""
AUDIT: Final = "audit_s"
"""What the step's audit took."""
DIGITS: Final = 6

P = ParamSpec("P")
R = TypeVar("R")


class Timesheet:
    """For the training thread alone.

    Args:
        monotonic: clock in seconds.

    Attributes:
        num_samples: whoever takes samples counts them here; `lap` does not touch it.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._monotonic = monotonic
        self._began = self._since = monotonic()
        self._activity = Activity.IDLE
        self._seconds = dict.fromkeys(Activity, 0.0)
        self.num_samples = 0

    @contextmanager
    def on(self, activity: Activity) -> Iterator[None]:
        """Counts the time in here as the activity's; those inside it take theirs from it."""
        before = self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def lap(self, *, waited_s: float = 0.0) -> dict[str, float]:
        """The seconds since the last lap, as a step's record has them.

        Args:
            waited_s: so much of the training was waiting for other workers.

        Returns:
            `<activity>_s` for each that took time, and `elapsed_s`: seconds since the beginning.
        """
        self._switch(self._activity)
        seconds, self._seconds = self._seconds, dict.fromkeys(Activity, 0.0)
        waited_s = min(waited_s, seconds[Activity.TRAINING])
        seconds[Activity.TRAINING] -= waited_s
        seconds[Activity.COMMUNICATION] += waited_s
        told = {key(a): round(value, DIGITS) for a, value in seconds.items() if value > 0}
        return {**told, ELAPSED: round(self._since - self._began, DIGITS)}

    def _switch(self, activity: Activity) -> Activity:
        now = self._monotonic()
        self._seconds[self._activity] += now - self._since
        self._since = now
        before, self._activity = self._activity, activity
        return before


class HasTimesheet(Protocol):
    """Whose methods may be counted by `during`."""

    _timesheet: Timesheet


S = TypeVar("S", bound=HasTimesheet)


def during(
    activity: Activity,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Counts the time of a method as an activity's."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def counted(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._timesheet.on(activity):
                return method(self, *args, **kwargs)

        return counted

    return decorate


def key(activity: Activity) -> str:
    """The name of an activity's seconds in a step's timing."""
    return f"{activity}_s"


def seconds_of(timing: Mapping[str, float]) -> dict[Activity, float]:
    """The seconds of each activity in a step's timing.

    Records of a version that had no timesheet tell the step and its waits only.
    """
    if ELAPSED in timing:
        return {a: max(0.0, float(timing.get(key(a), 0.0))) for a in Activity}
    found = dict.fromkeys(Activity, 0.0)
    left = max(0.0, float(timing.get("step_s", 0.0)))
    for activity, name in (
        (Activity.DATA, "data_wait_s"),
        (Activity.COMMUNICATION, "exchange_wait_s"),
    ):
        found[activity] = min(left, max(0.0, float(timing.get(name, 0.0))))
        left -= found[activity]
    found[Activity.TRAINING] = left
    return found
