"""What a worker process keeps of a run between two attempts, so that no step is lost.

When a peer dies, the parameters of the others are untouched since the last update, which takes no
communication: the state before the step that failed is right there. A process that lives on keeps
it, with the objects that hold it: nothing is copied and nothing is built a second time. It is
sent to those that lack it when the next group has formed (`resume`, `handover`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.state import State

if TYPE_CHECKING:
    from samestep.engine.setup import Built

HELD_KEY = "held"
"""Among a held state's extras: what a checkpoint need not tell (see `Rest`)."""


class Stage(IntEnum):
    """How much of what follows an update is done; in this order."""

    UPDATED = 0
    TOLD = 1
    EVALUATED = 2
    EPOCH_TOLD = 3
    SETTLED = 4


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Where between two updates a state was taken, and what is needed to go on from there.

    Attributes:
        stage: what is done after the last update.
        begun: `before_step` of the next step was called on the model.
        values: of the last step, as plain data; None before the first of the attempt.
        evaluation: metrics after the last step; None without an evaluation there.
        is_best: that evaluation was the best so far.
        best: (steps before the best checkpoint, its score).
    """

    stage: Stage
    begun: bool
    values: dict[str, Any] | None = None
    evaluation: dict[str, float] | None = None
    is_best: bool = False
    best: tuple[int, float] | None = None

    def to_extras(self) -> dict[str, Any]:
        """As typed values."""
        return {**vars(self), "stage": int(self.stage)}

    @classmethod
    def from_extras(cls, data: Mapping[str, Any]) -> Rest:
        """Inverse of `to_extras`."""
        return cls(**{**data, "stage": Stage(data["stage"])})


@dataclass(frozen=True, kw_only=True)
class Held:
    """A whole state in this process.

    Attributes:
        run_uri: the run it belongs to.
        attempt: the attempt that it comes from.
        state: refers to the live tensors; its extras hold a `Rest`.
        built: the objects that hold it; None: they are not to be used again.
        records: of that attempt, from the first that may be missing in the ledger.
    """

    run_uri: str
    attempt: int
    state: State
    built: Built | None
    records: Iterable[Mapping[str, Any]] = ()

    @property
    def rest(self) -> Rest:
        """Where between two updates it was taken."""
        return Rest.from_extras(self.state.extras[HELD_KEY])

    @property
    def age(self) -> tuple[int, int]:
        """(steps, stage): the greater, the newer."""
        return self.state.step, int(self.rest.stage)

    def apart(self) -> Held:
        """The same without the objects, on the CPU: a device has no room for a second model."""
        tensors = {name: tensor.cpu() for name, tensor in self.state.tensors.items()}
        return replace(self, built=None, state=replace(self.state, tensors=tensors))


_held: Held | None = None


def hold(held: Held) -> None:
    """Keeps a state until `forget`; an older one is let go."""
    global _held
    _held = held


def held(run_uri: str) -> Held | None:
    """What this process keeps of a run."""
    return _held if _held is not None and _held.run_uri == run_uri else None


def forget() -> None:
    """Lets go of what is kept: it no longer is the run's newest state."""
    global _held
    _held = None
