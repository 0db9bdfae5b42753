"""A run's workload built in this process, for taking its steps again: nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.state import restore
from samestep.engine.batch import check_batch, signature, to_device
from samestep.engine.feed import Feed
from samestep.engine.initial import load_initial
from samestep.engine.setup import Acting, Built, build, build_acting
from samestep.errors import (
    CannotReplayError,
    CheckpointError,
    NotExactError,
    UserCodeError,
    WorkloadError,
)
from samestep.exact import numerics
from samestep.exact.order import ShardPlan
from samestep.faults.progress import Progress
from samestep.replay.code import loaded
from samestep.replay.source import Source, Start
from samestep.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and with what a step is taken again.

    Attributes:
        search: folders in which the workload's module is looked for.
        device: where the shards are computed.
        progress: told where the step is.
    """

    search: Sequence[Path]
    device: torch.device
    progress: Progress


class Bench:
    """The workload of a source, with its data where that is needed.

    Torch's global settings are those of the job from here on.

    Args:
        source: where samples come from that need no data.
        spec: the source's, or a changed one.
        place: where to compute.
        has_data: call the workload's data() too.

    Attributes:
        workload: the run's.
        parts: model, optimizer and what else acts on them.
        schedule: of the learning rate.
        evaluation: None where there is none, or no data.
        built: with the data; None without.
        fingerprint: of the numerics here.

    Raises:
        CannotReplayError: workload or data are not here.
    """

    def __init__(self, source: Source, *, spec: JobSpec, place: Place, has_data: bool) -> None:
        self._source, self._spec, self._device = source, spec, place.device
        numerics.pin(spec)
        self.workload = loaded(source, spec, place.search)
        self.built, acting = self._made(has_data=has_data)
        self.parts, self.schedule = acting.parts, acting.schedule
        self.evaluation = acting.evaluation
        numerics.pin(spec)  # the workload's module may have set what torch keeps globally
        self.fingerprint = numerics.fingerprint(spec, place.device.type, self.parts.dtypes)
        self._feed = self._made_feed(self.built) if self.built is not None else None

    def plans(self, step: int) -> list[ShardPlan]:
        """All shards of a step."""
        if self.built is not None:
            return self.built.order.shards_of(step)
        return self._source.plans(step)

    def take(self, plan: ShardPlan, device: torch.device) -> Any:
        """A shard's batch on a device.

        Raises:
            UserCodeError: the dataset or collate raised.
            WorkloadError: it breaks the declared dimensions.
            CannotReplayError: it is not here.
        """
        if self._source.has_samples(plan.step):
            batch = self._source.batch(plan)
            where = f"step {plan.step}, shard {plan.shard}"
            check_batch(batch, signature(batch), self.workload.dimensions, where)
            return to_device(batch, device)
        if self._feed is None:
            raise CannotReplayError(
                f"the samples of step {plan.step} are not here: neither the bundle nor the "
                "workload's data has them"
            )
        return self._feed.take_apart(plan, device)

    def take_sample(self, plan: ShardPlan, place: int) -> Any:
        """A sample of a shard as a batch of its own, read anew; the data must be here."""
        assert self._feed is not None
        return self._feed.take_apart(sample_plan(plan, place), self._device)

    def restore(self, start: Start | None) -> None:
        """Puts a state into the parts; None: leaves them as the run began.

        Raises:
            CannotReplayError: it is of other data, or of another model.
        """
        if start is None:
            load_initial(self._spec, self.parts)
            return
        known, built = start.state.extras.get("dataset_size"), self.built
        if built is not None and known is not None and known != built.dataset_size:
            raise CannotReplayError(
                f"the training data here has {built.dataset_size} samples, the run's had {known}: "
                "restore the data that it was trained on"
            )
        try:
            restore(start.state, self.parts)
        except CheckpointError as error:
            raise CannotReplayError(
                f"the code here makes another model or optimizer than the run's did; give the "
                f"folder of its code with --code: {error}"
            ) from error

    def _made(self, *, has_data: bool) -> tuple[Built | None, Acting]:
        spec, workload, device = self._spec, self.workload, self._device
        try:
            if not has_data:
                # Its other methods may need what data() leaves behind.
                with suppress(UserCodeError):
                    return None, build_acting(spec, workload, device)
            built = build(spec, workload, device)
        except (UserCodeError, WorkloadError, NotExactError) as error:
            raise CannotReplayError(
                f"workload {spec.workload!r} can't be built here (its data may be missing, or its "
                f"code is another): {error}"
            ) from error
        return built, Acting(
            parts=built.parts,
            schedule=built.schedule,
            evaluation=built.evaluation,
            put_to_training=built.put_to_training,
        )

    def _made_feed(self, built: Built) -> Feed:
        feed = Feed(
            workload=self.workload,
            dataset=built.dataset,
            order=built.feed_order,
            turns=range(self._spec.shards),
            seed=self._spec.seed,
            start_step=0,
            end_step=built.end_step,
            loader_processes=0,
            pin_memory=False,
        )
        # What every batch of the run was compared with.
        feed.take_apart(built.order.shards_of(0)[0], self._device)
        return feed


def sample_plan(plan: ShardPlan, place: int) -> ShardPlan:
    """A shard of one sample of a shard."""
    return ShardPlan(
        step=plan.step,
        epoch=plan.epoch,
        shard=plan.shard,
        positions=plan.positions[place : place + 1],
        ids=plan.ids[place : place + 1],
    )
