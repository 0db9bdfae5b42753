"""States that an attempt could start from, and the choice among them, the same on every worker.

After a rollback a state counts only where the steps that were left out before it are just those
that are to be left out by now: any such state is on the run's way, and no other is. So nothing has
to be undone in the states themselves, wherever copies of them lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from samestep.checkpoint.state import State
from samestep.engine.detection import STATE_KEY
from samestep.engine.survivor import Held, Stage
from samestep.exact.ranges import NONE, StepRanges
from samestep.incidents.rollback import Rollback, left_out


class Source(StrEnum):
    """Where a state comes from; of equally new ones the first is taken."""

    SURVIVOR = "survivor"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A state that a worker could give.

    Attributes:
        kind: where it lies.
        step: steps taken before it.
        stage: what is done after the last of them.
        attempt: the attempt it comes from; 0 where that does not matter.
        left_out: steps left out before it; of a checkpoint that is seen when it is read.
    """

    kind: Source
    step: int
    stage: int = Stage.SETTLED
    attempt: int = 0
    left_out: StepRanges = NONE

    @classmethod
    def of(cls, held: Held, kind: Source) -> Offer:
        """Of a state in this process, or in the node's shared memory."""
        step, stage = held.age
        before = left_out_before(held.state)
        return cls(kind=kind, step=step, stage=stage, attempt=held.attempt, left_out=before)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Offer:
        """Inverse of `to_json`."""
        told = {"kind": Source(data["kind"]), "left_out": StepRanges.of(data["left_out"])}
        return cls(**{**data, **told})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "left_out": self.left_out.to_json()}

    @property
    def rank(self) -> tuple[int, int, int]:
        """The greatest is taken."""
        return self.step, self.stage, -list(Source).index(self.kind)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What all workers start from.

    Attributes:
        offer: the state; None: there is none, the run starts at step 0.
        holders: ranks of the workers that offer it.
    """

    offer: Offer | None
    holders: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[int, int, int]:
        """Of the state; less than any where there is none."""
        return self.offer.rank if self.offer is not None else (-1, 0, 0)


def choose(offers: Sequence[Sequence[Offer]]) -> Choice:
    """The newest state of all that the workers (by rank) offer."""
    everything = [offer for mine in offers for offer in mine]
    if not everything:
        return Choice(offer=None)
    best = max(everything, key=lambda offer: offer.rank)
    holders = [
        rank for rank, mine in enumerate(offers) if any(offer.rank == best.rank for offer in mine)
    ]
    return Choice(offer=best, holders=tuple(holders))


class Way:
    """Which states are on the way of a run.

    Args:
        told: ranges of steps that the job leaves out.
        rollbacks: of the run so far, in order.
    """

    def __init__(self, told: Sequence[Sequence[int]], rollbacks: Sequence[Rollback]) -> None:
        self.left_out = left_out(told, rollbacks)
        self.rollbacks = rollbacks

    def holds(self, offer: Offer, attempt: int) -> bool:
        """Whether a state may be started from.

        Args:
            offer: the state.
            attempt: the present one, of which no new one has begun yet.
        """
        last = self.rollbacks[-1] if self.rollbacks else None
        if last is not None and last.attempt == attempt:
            if offer.kind is Source.CHECKPOINT:
                return offer.step <= last.to
            if offer.attempt == attempt:
                return False  # its last records are not wanted any more: a checkpoint's are in
        return offer.kind is Source.CHECKPOINT or self.fits(offer.step, offer.left_out)

    def fits(self, step: int, left_out: StepRanges) -> bool:
        """Whether the steps left out before a state are those that are to be left out."""
        return left_out == self.left_out.before(step)


def left_out_before(state: State) -> StepRanges:
    """The steps before a state that were left out, as it says."""
    return StepRanges.of(state.extras.get(STATE_KEY, {}).get("left_out", ()))
