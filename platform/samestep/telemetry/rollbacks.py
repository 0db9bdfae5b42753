"""A run's rollbacks, as its recorder enters them: before anybody goes on, and for good.

The line in the ledger is the decision; that the checkpoints of the steps taken back go away
follows from it, and is made up for where the recorder died in between.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from samestep.checkpoint.retention import take_back
from samestep.checkpoint.storage import Storage
from samestep.errors import PeerLostError
from samestep.incidents.rollback import Rollback
from samestep.names import Event
from samestep.telemetry.incident_log import Log

logger = logging.getLogger(__name__)


class Rollbacks:
    """Those of one run.

    Args:
        run: the run directory.
        log: enters an event into the ledger, given its kind, step and fields.
        past: those that the ledger holds.
    """

    def __init__(self, run: Storage, *, log: Log, past: Sequence[Rollback]) -> None:
        self._run = run
        self._log = log
        self._all = list(past)

    def has_ended(self, attempt: int) -> bool:
        """Whether an attempt ended by going back: nothing of it is taken in any more."""
        return bool(self._all) and self._all[-1].attempt == attempt

    def enter(self, rollback: Rollback) -> None:
        """Makes a decision real; repeating it is harmless.

        Raises:
            StorageError: it is not known whether it is in the ledger; enter it again.
        """
        if not self.has_ended(rollback.attempt):
            fields = {**rollback.to_json(), "branch": len(self._all) + 1}
            self._log(Event.ROLLED_BACK, rollback.to, fields)
            self._all.append(rollback)
        self.settle(rollback.attempt)

    def settle(self, attempt: int) -> None:
        """Takes away the checkpoints that the rollback which ended an attempt took back, if any.

        Raises:
            StorageError: one can't be deleted.
        """
        if self.has_ended(attempt):
            gone = take_back(self._run, self._all[-1].to)
            if gone:
                logger.info("run=%s checkpoints taken back: %s", self._run.uri, gone)

    def resume(self, past: Sequence[Rollback], *, last_attempt: int, num_known: int) -> None:
        """Before another attempt begins: what a decision brings with it is done.

        Args:
            past: all that the ledger holds, whatever was known here of a write that failed.
            last_attempt: the one before.
            num_known: how many the workers knew of when they met.

        Raises:
            PeerLostError: they did not know the last one, and must meet again.
            StorageError: a checkpoint that was taken back can't be deleted.
        """
        self._all = list(past)
        self.settle(last_attempt)
        if num_known != len(self._all):
            raise PeerLostError(
                f"the run went back meanwhile: it has {len(self._all)} rollbacks, and the workers "
                f"met when it had {num_known}; they start again"
            )
