"""Whether a run goes on after a failure: budgets by cause, and what makes a failure final.

A budget counts failures in a row: training that got further in between starts it anew. A failure of
the workload's own code that comes again at the same step in the same words is deterministic: no
budget is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from samestep.errors import ExitStatus
from samestep.spec_faults import Retries

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0


class Cause(StrEnum):
    """Why a worker or a group failed; the earlier in this list, the nearer to the first cause."""

    FINAL = "final"
    NO_ROOM = "no_room"
    USER = "user"
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"
    HANG = "hang"
    CORRUPTION = "corruption"
    START = "start"
    INTERNAL = "internal"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one worker met, or the controller.

    Attributes:
        cause: its kind.
        message: for the user.
        kind: name of the exception's class.
        world_rank: the worker; None: none of them.
        host: its node.
        step: the step it was taking; None where nobody could tell.
        attempt: the attempt it belongs to; 0 where nobody could tell.
        exit_status: what a command ends with if it is final.
        told: its incident is written.
        wrong_host: the node that computed wrongly, where an audit found one.
    """

    cause: Cause
    message: str
    kind: str = ""
    world_rank: int | None = None
    host: str = ""
    step: int | None = None
    attempt: int = 0
    exit_status: int = int(ExitStatus.FAILED)
    told: bool = False
    wrong_host: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do about a failure.

    Attributes:
        retry: start the group again; else the run fails.
        first: the first cause.
        message: leads with it, for the user.
        delay_s: before the group is started.
    """

    retry: bool
    first: Fault
    message: str
    delay_s: float = 0.0


class RetryPolicy:
    """Decides on failures, one after another.

    Args:
        retries: the job's budgets.
    """

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._in_a_row = {"user": 0, "infrastructure": 0}
        self._num_memory = 0
        self._furthest = -1
        self._before: tuple[int | None, str] | None = None

    def decide(self, faults: Sequence[Fault], *, step: int) -> Verdict:
        """Judges what the workers of a group (and the controller) met.

        Args:
            faults: at least one.
            step: steps of the run that are safe, as far as anybody knows.
        """
        first = min(faults, key=lambda fault: list(Cause).index(fault.cause))
        if step > self._furthest:
            self._furthest = step
            self._in_a_row = dict.fromkeys(self._in_a_row, 0)
        field = _budget_of(first)
        spent = self._spend(first, field)
        if first.cause in (Cause.FINAL, Cause.NO_ROOM):
            return Verdict(retry=False, first=first, message=first.message)
        if self._is_deterministic(first):
            return Verdict(
                retry=False,
                first=first,
                message=f"{first.message}\nThe same step failed in the same way twice, so it "
                "would again: mend the workload, then run the same command to go on",
            )
        budget = int(getattr(self._retries, field))
        if spent > budget:
            return Verdict(
                retry=False,
                first=first,
                message=f"{first.message}\n{spent} failures in a row without a step in between, "
                f"and faults.retries.{field} is {budget}",
            )
        return Verdict(retry=True, first=first, message=first.message, delay_s=self._delay_s())

    def _spend(self, first: Fault, field: str) -> int:
        """The failures in a row of what shares a budget with this one, itself included."""
        self._in_a_row[field] += 1
        if first.cause is Cause.OUT_OF_MEMORY:
            self._num_memory += 1
            if self._num_memory > self._retries.infrastructure:  # over all: a leak makes progress
                return self._num_memory
        return self._in_a_row[field]

    def _is_deterministic(self, first: Fault) -> bool:
        before = self._before
        self._before = None
        if first.cause not in (Cause.USER, Cause.OUT_OF_MEMORY) or first.step is None:
            return False
        text = first.message.strip().splitlines()
        self._before = (first.step, f"{first.kind}:{text[-1] if text else ''}")
        return before == self._before

    def _delay_s(self) -> float:
        """None after the first failure in a row, then more and more."""
        number = sum(self._in_a_row.values())
        if number < 2:
            return 0.0
        return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (number - 2)))


def _budget_of(fault: Fault) -> str:
    """The field of `faults.retries` that a failure spends.

    A worker that the node ended for lack of memory told nothing itself: what filled the node may
    be somebody else's and gone a second later.
    """
    is_own = fault.cause is Cause.OUT_OF_MEMORY and fault.told
    return "user" if is_own or fault.cause is Cause.USER else "infrastructure"
