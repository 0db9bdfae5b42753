"""How an attempt ends, as one worker sees it."""

from __future__ import annotations

from enum import IntEnum


class Ending(IntEnum):
    """FAILED: the recorder knows why. AS_PLANNED: done or interrupted.

    PARKED: the state is kept for the next group. ROLLED_BACK: the run goes on from before some
    steps, as the recorder knows by now, in another attempt that whoever runs this one starts.
    """

    FAILED = 0
    AS_PLANNED = 1
    PARKED = 2
    ROLLED_BACK = 3
