"""How often a worker asks how its save stands: at once at first, and then ever more rarely.

All workers ask the one recorder, which takes in the run's records beside. So many workers ask
more rarely than few, for whom a commit is noticed as soon as anybody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.02
CALM_S: Final = 1.0
"""A pause while training goes on; that is the longest for up to `MAX_ASKED_PER_S` workers."""
HURRIED_S: Final = 0.5
"""While training waits, for a hundred workers or fewer."""
MAX_ASKED_PER_S: Final = 1000.0
MAX_HURRIED_PER_S: Final = 200.0
MAX_FIRST_PER_S: Final = 4000.0


class Pace:
    """The pauses of one worker; `hurry` and `end` are for another thread.

    Args:
        num_workers: that ask.
        sleep: waits for so many seconds; tests give their own. Default: until woken, at most.
    """

    def __init__(self, num_workers: int, *, sleep: Callable[[float], object] | None = None) -> None:
        self._first_s = max(FIRST_S, num_workers / MAX_FIRST_PER_S)
        self._longest_s = max(CALM_S, num_workers / MAX_ASKED_PER_S)
        self._hurried_s = min(max(HURRIED_S, num_workers / MAX_HURRIED_PER_S), self._longest_s)
        self._next_s = self._first_s
        self._woken = threading.Event()
        self._sleep = sleep or self._woken.wait
        self._hurried = self._ended = False

    def pause(self) -> bool:
        """Returns when it is time to ask again; False when nobody wants to know any more."""
        if not self._ended:
            self._sleep(self._next_s)
            self._woken.clear()
            longest_s = self._hurried_s if self._hurried else self._longest_s
            self._next_s = min(2 * self._next_s, longest_s)
        return not self._ended

    def hurry(self) -> None:
        """Training waits from now on: asks at once, and begins anew with short pauses."""
        if not self._hurried:
            self._hurried, self._next_s = True, self._first_s
            self._woken.set()

    def end(self) -> None:
        """There is no pause any more."""
        self._ended = True
        self._woken.set()
