"""Keeps an eye on a run's budget from the driver: what is used up plans a stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError
from samestep.spec_budget import Budget
from samestep.telemetry.budget import Spending
from samestep.telemetry.spool import Spool

LOOK_S: Final = 2.0
MAX_LINES: Final = 10_000

logger = logging.getLogger(__name__)


class BudgetWatch:
    """Follows a run's ledger.

    Args:
        run: the run directory.
        budget: of the job.
        clock: seconds since the epoch.
    """

    def __init__(
        self, run: Storage, budget: Budget, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._budget = budget
        self._clock = clock
        self._spool = Spool(run)
        self._spending = Spending()
        self._looked_s = float("-inf")
        self._is_limited = bool(self._spending.uses(budget))

    def exhausted(self) -> str | None:
        """Why the run must stop; None while it need not. Looks every other second."""
        now_s = self._clock()
        if not self._is_limited or now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        try:
            self._read()
        except SamestepError as error:  # the ledger is away for now: looked at again
            logger.warning("the budget can't be reckoned up: %s", error)
        return self._spending.exhausted(self._budget, now_s)

    def _read(self) -> None:
        while lines := self._spool.read(MAX_LINES):
            for line in lines:
                self._spending.add(line.record)
            self._spool.seek(lines[-1].position)
