"""Ledger records of an attempt that are not known to be in the ledger yet, on every worker.

Worker 0 alone sends them while all is well. The reduced values are the same everywhere, so every
worker makes the same records in the same order; when worker 0 dies with some of them unsent, any
other can make them good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


class Backlog:
    """Keeps the records from the first one that may be missing in the ledger."""

    def __init__(self) -> None:
        self._records: deque[Mapping[str, Any]] = deque()
        self._num_dropped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes the next record of the attempt."""
        self._records.append(record)

    def trim(self, num_delivered: int) -> None:
        """Lets go of the attempt's first `num_delivered` records: they are in the ledger."""
        while self._records and self._num_dropped < num_delivered:
            self._records.popleft()
            self._num_dropped += 1

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """What is left, in order."""
        return list(self._records)
