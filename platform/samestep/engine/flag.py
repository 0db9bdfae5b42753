"""What a worker asks all of them to do after a step."""

from __future__ import annotations

from enum import IntEnum


class Flag(IntEnum):
    """Told in a step's small talk; the largest of all workers counts."""

    GO_ON = 0
    PARK = 1
    PARK_AND_SAVE = 2
    STOP = 3
