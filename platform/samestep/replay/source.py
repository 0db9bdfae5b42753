"""Where a replay takes everything from: a run's directory, or a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from samestep.checkpoint.state import State
from samestep.engine.survivor import Rest
from samestep.exact.order import ShardPlan
from samestep.incidents.record import Incident
from samestep.spec import JobSpec
from samestep.telemetry.records import StepRecord


@dataclass(frozen=True, kw_only=True)
class Start:
    """A state to take steps from.

    Attributes:
        state: after `state.step` steps, on the CPU.
        rest: where between two updates it was taken.
    """

    state: State
    rest: Rest


class Source(Protocol):
    """What is known of a run around one of its steps.

    Attributes:
        spec: the run's job.
        numerics: fingerprint of the attempt that took the step (see `exact.numerics`).
        step: the step to take again, counted from 0.
        incident: what happened at it; None where it is any step of a run.
        provenance: git revision, package versions, python, host, search folders: for messages
            only, never trusted.
    """

    @property
    def spec(self) -> JobSpec: ...  # noqa: D102 - told above
    @property
    def numerics(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def incident(self) -> Incident | None: ...  # noqa: D102
    @property
    def provenance(self) -> Mapping[str, Any]: ...  # noqa: D102

    def start(self) -> Start:
        """The newest state at or before the step.

        Raises:
            CannotReplayError: there is none.
            CheckpointError: it is damaged.
        """

    def plans(self, step: int) -> list[ShardPlan]:
        """All shards of a step, in order.

        Raises:
            CannotReplayError: they are not known.
        """

    def has_samples(self, step: int) -> bool:
        """Whether `batch` gives the shards of a step without the run's dataset."""

    def batch(self, plan: ShardPlan) -> Any:
        """A shard's batch as `collate` made it, on the CPU.

        Raises:
            CannotReplayError: it is not here; says what is missing.
        """

    def records(self) -> Mapping[int, StepRecord]:
        """What was written down of steps, from the start on; the step itself where it is known."""
