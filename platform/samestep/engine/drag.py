"""What the steps after a snapshot take longer than others.

A copy holds training up for as long as it takes, which is easily seen. Hashing it goes on behind
the next steps, which then share cores and memory with it where there are none to spare.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

STEPS_AFTER: Final = 2
"""So many are looked at: the one in whose exchange hashing begins, and the one beside it."""
NUM_USUAL: Final = 32
NUM_DRAGS: Final = 25
DOUBT: Final = 3.0
"""Of a median of so many noisy times this share of their usual deviation is not believed."""


class Drag:
    """Measured from one exchange to the next, the only points at which all workers are together."""

    def __init__(self) -> None:
        self._usual_s: deque[float] = deque(maxlen=NUM_USUAL)
        self._drags_s: deque[float] = deque(maxlen=NUM_DRAGS)
        self._at_s: float | None = None
        self._pause_s = 0.0
        self._num_left = 0
        self._after_s = 0.0
        self._is_first = True

    @property
    def seconds(self) -> float:
        """Of a usual snapshot: the median of the last ones, less what may be chance; 0 at first.

        Steps differ by more than a hundredth anyhow, and few snapshots are taken: what is believed
        too soon makes them rare, and many steps are then lost with all workers.
        """
        if not self._drags_s:
            return 0.0
        usual_s = statistics.median(self._usual_s)
        deviation_s = statistics.median(abs(lap_s - usual_s) for lap_s in self._usual_s)
        doubt_s = DOUBT * deviation_s / math.sqrt(len(self._drags_s))
        return max(0.0, statistics.median(self._drags_s) - doubt_s)

    def exchanged(self, at_s: float) -> None:
        """Every worker has come to the exchange of another step, by this one's clock."""
        before_s, self._at_s = self._at_s, at_s
        pause_s, self._pause_s = self._pause_s, 0.0
        if before_s is None:
            return
        lap_s = at_s - before_s - pause_s
        if not self._num_left:
            self._usual_s.append(lap_s)
            return
        self._after_s += lap_s
        self._num_left -= 1
        if self._num_left or not self._usual_s:
            return
        # Behind the first one the memory for the second image is got besides.
        if not self._is_first:
            usual_s = statistics.median(self._usual_s)
            self._drags_s.append(self._after_s - STEPS_AFTER * usual_s)
        self._is_first = False

    def taken(self, pause_s: float) -> None:
        """A snapshot was taken since the last exchange, which held training up for so long."""
        self._pause_s += pause_s
        self._num_left, self._after_s = STEPS_AFTER, 0.0
