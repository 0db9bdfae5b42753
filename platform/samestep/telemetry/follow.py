"""Following a run from its ledger alone, where its recorder can't be asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.telemetry.board import Board
from samestep.telemetry.past import read_past

REREAD_S: Final = 2.0


class Follower:
    """Gives the status of a run that another process writes, as its ledger tells it.

    Args:
        run: the run directory.
        name: of the run.
        monotonic: clock in seconds.
    """

    def __init__(
        self, run: Storage, name: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._board = Board(name)
        self._monotonic = monotonic
        self._read_at = -REREAD_S
        self._seen = 0

    def say(self, text: str) -> None:
        """Adds a message to the next status."""
        self._board.say(text)

    def status(self) -> dict[str, Any]:
        """As `Board.status`, with the messages since the last call; reads every two seconds."""
        if self._monotonic() - self._read_at >= REREAD_S:
            self._board.load(read_past(self._run))
            self._read_at = self._monotonic()
        status = self._board.status(self._seen)
        self._seen = max([self._seen, *(item["number"] for item in status["messages"])])
        return status
