"""A run's directory as the source of a replay: checkpoints, ledger, and the workload's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from samestep.checkpoint.reading import load_checkpoint, newest_whole
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.engine.survivor import Rest, Stage
from samestep.errors import CannotReplayError, InputError
from samestep.exact.order import Order, ShardPlan
from samestep.incidents.record import Incident
from samestep.names import Event
from samestep.replay.source import Start
from samestep.spec import JobSpec
from samestep.spec_incidents import ROLLBACK
from samestep.telemetry.identity import read_numerics, read_spec
from samestep.telemetry.ledger import events, read_ledger, steps
from samestep.telemetry.records import STEP, EventRecord, StepRecord


class RunSource:
    """Any step of a run, from the nearest whole checkpoint at or before it.

    Where there is none, from step 0: what the workload builds there is a function of the seed.

    Args:
        run: the run directory.
        step: the step to take again.
        incident: what happened at it, if it is an incident's.
        from_step: start from the checkpoint after so many steps.

    Raises:
        InputError: the run has not come so far, or the checkpoint lies behind the step.
    """

    def __init__(
        self,
        run: Storage,
        *,
        step: int,
        incident: Incident | None = None,
        from_step: int | None = None,
    ) -> None:
        self.run, self.step, self.incident = run, step, incident
        self.spec: JobSpec = read_spec(run)
        self._from_step = from_step
        if from_step is not None and from_step > step:
            raise InputError(
                f"the checkpoint after {from_step} steps lies behind step {step}: take one after "
                "at most as many steps as there are before the step"
            )
        num_steps = max(self._ledger, default=-1) + 1
        if step > num_steps or (step == num_steps and incident is None):
            raise InputError(
                f"{run.uri} has no step {step}: its ledger holds {num_steps} steps, counted from 0"
            )

    @cached_property
    def numerics(self) -> Mapping[str, Any]:
        """Those of the attempt that took the step: the run's first, as changed since."""
        attempt = self._attempt
        found = read_numerics(self.run) or {}
        for event in events(self.run, Event.NUMERICS_CHANGED):
            if attempt is None or event.attempt <= attempt:
                found = event.fields.get("numerics", found)
        return found

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        """Where the attempt that took the step found its workload, and on which hosts it ran."""
        fields = self._started.fields if self._started is not None else {}
        return {
            "search": list(fields.get("search", [])),
            "hosts": sorted(set(fields.get("hosts", []))),
            "world_size": fields.get("world_size"),
            "mode": fields.get("mode"),
        }

    def start(self) -> Start | None:
        """The newest whole checkpoint at or before the step, or the one asked for."""
        state = self._state()
        if state is None:
            return None
        # A checkpoint at step 0 was taken after before_step(0).
        return Start(state=state, rest=Rest(stage=Stage.SETTLED, begun=state.step == 0))

    def plans(self, step: int) -> list[ShardPlan]:
        """All shards of a step, where the workload gives no order of its own."""
        fields = self._started.fields if self._started is not None else {}
        if "dataset_size" not in fields or fields.get("custom_order", False):
            raise CannotReplayError(
                f"which samples step {step} takes is told by the workload's own order, which needs "
                "its data"
            )
        order = Order(
            dataset_size=int(fields["dataset_size"]),
            batch_size=self.spec.batch_size,
            shards=self.spec.shards,
            drop_last=self.spec.drop_last,
            seed=self.spec.seed,
        )
        return order.shards_of(step)

    def has_samples(self, step: int) -> bool:
        """A run's directory holds no samples."""
        return False

    def batch(self, plan: ShardPlan) -> Any:
        """A run's directory holds no samples."""
        raise CannotReplayError(
            f"the samples of step {plan.step}, shard {plan.shard} are not in {self.run.uri}: they "
            "come from the workload's data"
        )

    def records(self) -> Mapping[int, StepRecord]:
        """The ledger's lines, each in its last version."""
        return self._ledger

    def events(self) -> Sequence[EventRecord]:
        """The ledger's."""
        return events(self.run)

    @cached_property
    def _ledger(self) -> dict[int, StepRecord]:
        if not self._went_back:
            return steps(self.run)
        assert self.incident is not None
        lines = [line for line in read_ledger(self.run) if line["type"] == STEP]
        then = [line for line in lines if int(line.get("attempt", 0)) <= self.incident.attempt]
        found = {int(line["step"]): line for line in then}
        return {step: StepRecord.from_json(found[step]) for step in sorted(found)}

    @property
    def _went_back(self) -> bool:
        """After the incident the run took other steps of these numbers than those before it."""
        return self.incident is not None and self.incident.seen.get("policy") == ROLLBACK

    @cached_property
    def _attempt(self) -> int | None:
        if self.incident is not None and self.incident.attempt:
            return self.incident.attempt
        record = self._ledger.get(self.step)
        return record.attempt if record is not None else None

    @cached_property
    def _started(self) -> EventRecord | None:
        found = events(self.run, Event.ATTEMPT_STARTED)
        own = [event for event in found if event.attempt == self._attempt]
        return (own or found)[-1] if found else None

    def _state(self) -> State | None:
        if self._from_step is not None:
            return load_checkpoint(self.run, self._from_step)[0]
        found, _ = newest_whole(self.run, at_most_step=self.step)
        while found is not None and self._is_later(found.manifest.meta.created_s):
            found, _ = newest_whole(self.run, at_most_step=found.step - 1)
        return found.state if found is not None else None

    def _is_later(self, created_s: float) -> bool:
        return self._went_back and self.incident is not None and created_s > self.incident.time
