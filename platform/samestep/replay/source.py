"""Where a replay takes everything from: a run's directory, or a bundle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from samestep.checkpoint.state import State
from samestep.engine.survivor import Rest, Stage
from samestep.exact.order import ShardPlan
from samestep.incidents.record import Incident
from samestep.spec import JobSpec
from samestep.telemetry.records import EventRecord, StepRecord


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

    def start(self) -> Start | None:
        """The newest state at or before the step; None: the run's first, as the workload builds it.

        Raises:
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
        """A shard's batch as `collate` made it, on the CPU; new objects at each call.

        Raises:
            CannotReplayError: it is not here; says what is missing.
        """

    def records(self) -> Mapping[int, StepRecord]:
        """What was written down of steps, from the start on; the step itself where it is known."""


@runtime_checkable
class Rebuilding(Protocol):
    """A source whose batches may hold classes of the workload's modules.

    Attributes:
        modules: names of those modules, once they are loaded.
    """

    modules: Collection[str]


@runtime_checkable
class Eventful(Protocol):
    """A source that knows what else happened to the run around the step."""

    def events(self) -> Sequence[EventRecord]:
        """In the order of writing."""


class Altered:
    """A source of which something is another.

    Args:
        source: the run or bundle.
        spec: the job; None: the source's.
        state: right before the source's step, `before_step` of which was called: what was reached
            by taking steps from the source's own; None: the source's.
        more_records: of steps that the source knows nothing of.
    """

    def __init__(
        self,
        source: Source,
        *,
        spec: JobSpec | None = None,
        state: State | None = None,
        more_records: Mapping[int, StepRecord] = MappingProxyType({}),
    ) -> None:
        self._source, self._state, self._more_records = source, state, more_records
        self.spec, self.numerics, self.step = spec or source.spec, source.numerics, source.step
        self.incident, self.provenance = source.incident, source.provenance

    def start(self) -> Start | None:
        """The state that was given, else the source's."""
        if self._state is None:
            return self._source.start()
        return Start(state=self._state, rest=Rest(stage=Stage.SETTLED, begun=True))

    def plans(self, step: int) -> list[ShardPlan]:
        """As the source has them."""
        return self._source.plans(step)

    def has_samples(self, step: int) -> bool:
        """As the source has them."""
        return self._source.has_samples(step)

    def batch(self, plan: ShardPlan) -> Any:
        """As the source has it."""
        return self._source.batch(plan)

    def records(self) -> Mapping[int, StepRecord]:
        """As the source has them, and those that were given beside."""
        return {**self._more_records, **self._source.records()}

    @property
    def modules(self) -> Collection[str]:
        """As the source has them; none where it rebuilds nothing."""
        return self._source.modules if isinstance(self._source, Rebuilding) else ()

    @modules.setter
    def modules(self, names: Collection[str]) -> None:
        if isinstance(self._source, Rebuilding):
            self._source.modules = names

    def events(self) -> Sequence[EventRecord]:
        """As the source has them; none where it knows none."""
        return self._source.events() if isinstance(self._source, Eventful) else ()
