"""Where two runs' states part: looked for backwards, from checkpoint to checkpoint.

Checkpoints that differ already show what became of the cause, not the cause. So the steps before
them are taken again as well, back to the start of the runs where it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from samestep.checkpoint.storage import Storage
from samestep.replay.bench import Place
from samestep.replay.bisect_side import Walk, forked_after, walk_to


class Cause(Enum):
    """What the states part by."""

    STEP = auto()
    """Nothing before the step: both come to it with the same state."""
    UPDATE = auto()
    """An earlier step, to which both come with the same state."""
    CHECKPOINT = auto()
    """A checkpoint that is not what the run's steps, taken again, come to."""
    START = auto()
    """The runs began with different states."""


@dataclass(frozen=True, kw_only=True)
class Stray:
    """A run that does not come to its own checkpoint again.

    Attributes:
        run: "a" or "b".
        start: steps before the state that it was taken again from.
        checkpoint: steps before the checkpoint.
    """

    run: str
    start: int
    checkpoint: int


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where to look for the tensor.

    Attributes:
        cause: what the states part by.
        step: the one that shows it: by the state before it, or by what becomes of that.
        strays: what was noticed on the way.
    """

    cause: Cause
    step: int
    strays: tuple[Stray, ...] = ()


def find_parting(
    runs: tuple[Storage, Storage],
    places: tuple[Place, Place],
    walks: tuple[Walk, Walk],
    *,
    step: int,
) -> Parting:
    """Goes back until the two have a state in common, and from there to where they part.

    Args:
        runs: the run directories.
        places: where each is taken again.
        walks: of both, to the state before `step`.
        step: the first whose records differ.

    Raises:
        CannotReplayError: the steps before some checkpoint can't be taken again.
    """
    shows, cause = step, Cause.STEP
    strays: list[Stray] = []
    begins = max(map(forked_after, runs))
    while True:
        a, b = walks
        common = sorted(a.states.keys() & b.states.keys())
        same = {taken: a.states[taken] == b.states[taken] for taken in common}
        for before, after in pairwise(common):
            if same[before] and not same[after]:
                return Parting(cause=Cause.UPDATE, step=before, strays=tuple(strays))
        first = common[0]
        if same[first]:
            return Parting(cause=cause, step=shows, strays=tuple(strays))
        if first <= begins:
            return Parting(cause=Cause.START, step=first, strays=tuple(strays))
        earlier = (
            walk_to(runs[0], places[0], until=first),
            walk_to(runs[1], places[1], until=first),
        )
        strays += [
            Stray(run=name, start=now.start, checkpoint=then.start)
            for name, then, now in zip("ab", walks, earlier, strict=True)
            if then.states[first] != now.states[first]
        ]
        # Should the two be alike throughout now, it was one of the checkpoints.
        shows, cause, walks = first, Cause.CHECKPOINT, earlier
