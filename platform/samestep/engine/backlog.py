"""Ledger records of an attempt that are not known to be in the ledger yet, on every worker.

Worker 0 alone sends them while all is well. The reduced values are the same everywhere, so every
worker makes the same records in the same order; when worker 0 dies with some of them unsent, any
other can make them good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samestep.telemetry.record_queue import IN_MEMORY, RecordQueue


class Backlog:
    """Keeps the records from the first one that may be missing in the ledger."""

    def __init__(self) -> None:
        # The link of worker 0, which sends them, says when they are too many.
        self._records = RecordQueue(max_bytes=None)
        self._num_added = self._num_dropped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes the next record of the attempt."""
        self._records.append(record)
        self._num_added += 1

    def is_long(self, num_delivered: int) -> bool:
        """Whether more than memory is meant to hold came after the first `num_delivered`."""
        return self._num_added - num_delivered > IN_MEMORY

    def trim(self, num_delivered: int) -> None:
        """Lets go of the attempt's first `num_delivered` records: they are in the ledger."""
        if num_delivered > self._num_dropped:
            self._records.drop(num_delivered - self._num_dropped)
            self._num_dropped = num_delivered

    @property
    def records(self) -> Iterable[Mapping[str, Any]]:
        """What is left, in order; read from files where it lies there."""
        return self._records
