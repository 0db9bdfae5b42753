"""The engines that are measured, each with a model of its own and the same batches in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import Model
from plain import PlainDdp
from torch import nn

from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.peers import Peers
from samestep.engine.setup import Built, before_step, build, make_replicas
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.update import Updated, apply_update
from samestep.exact.order import ShardPlan
from samestep.spec import JobSpec

CPU = torch.device("cpu")

# Steps whose batches are made beforehand; all engines go round them. Fewer than an epoch has, so
# that none is a short one.
NUM_BATCHES = 4

Step = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An engine.

    Attributes:
        step: takes the step of a number, update included.
        model: what it trains.
        takes_part: this worker has something to do in it.
        every: it takes part in one round of so many,
        turn: in those whose number leaves this remainder.
        settle: called behind its step, beside the clock.
    """

    name: str
    step: Step
    model: nn.Module | None
    takes_part: bool = True
    every: int = 1
    turn: int = 0
    settle: Callable[[], object] = lambda: None


class Batches:
    """The first batches of a job by step and shard, all of them in memory."""

    def __init__(self, model: Model, spec: JobSpec, devices: tuple[torch.device, ...]) -> None:
        built = build(spec, model.workload(spec), CPU)
        feed = Feed(
            workload=built.workload,
            dataset=built.dataset,
            order=built.feed_order,
            turns=[],
            seed=spec.seed,
            start_step=0,
            end_step=0,
            loader_processes=0,
            pin_memory=False,
        )
        self._made: dict[tuple[int, int, torch.device], Any] = {}
        for step in range(NUM_BATCHES):
            for plan in built.order.shards_of(step):
                for device in devices:
                    self._made[step, plan.shard, device] = feed.take_apart(plan, device)
        feed.close()

    def take(self, plan: ShardPlan, device: torch.device) -> Any:
        """As the feed hands a batch to the engine."""
        return self._made[plan.step, plan.shard, device]


class Samestep:
    """The exact engine or the fast one, driven as the training loop does, but for the recorder."""

    def __init__(
        self,
        model: Model,
        spec: JobSpec,
        batches: Batches,
        group: dist.ProcessGroup | None,
        *,
        is_fast: bool = False,
        devices: tuple[torch.device, ...] = (CPU,),
    ) -> None:
        self.spec = spec
        self.batches = batches
        self.built: Built = build(spec, model.workload(spec), devices[0])
        peers = Peers(group)
        replicas = make_replicas(spec, self.built, list(devices), peers)
        self.engine: StepEngine | FastEngine
        if is_fast:
            self.engine = FastEngine(
                spec=spec,
                workload=self.built.workload,
                replica=replicas[0],
                peers=peers,
                scale=self.built.parts.scaled,
            )
        else:
            self.engine = StepEngine(
                spec=spec,
                workload=self.built.workload,
                replicas=replicas,
                peers=peers,
                group=group,
            )

    def step(self, number: int, before_update: Callable[[], None] = lambda: None) -> Reduced:
        """Takes a step; calls `before_update` where the training loop waits for a copy."""
        reduced = self.compute(number, self.plans(number))
        before_update()
        self.update(number, reduced)
        return reduced

    def plans(self, number: int) -> list[ShardPlan]:
        """The shards of a step."""
        return self.built.order.shards_of(number % NUM_BATCHES)

    def compute(self, number: int, plans: list[ShardPlan], delivered: int = 0) -> Reduced:
        """A step up to its update; `delivered` as the engine takes it."""
        before_step(self.spec, self.built.workload, self.engine.replicas, number)
        return self.engine.compute(number, plans, self.batches.take, 0, delivered)

    def update(self, number: int, reduced: Reduced, **options: Any) -> Updated:
        """The update of a step; options are those of `apply_update`."""
        device = self.engine.main.device
        parts, parameters = self.built.parts, reduced.parameters
        updated = apply_update(self.spec, parts, parameters, step=number, device=device, **options)
        self.engine.sync_replicas()
        return updated


def plain_ddp(
    model: Model, spec: JobSpec, batches: Batches, shards: range, **options: Any
) -> tuple[Step, nn.Module]:
    """A plain script's step over the same batches.

    Args:
        model: what to train.
        spec: its job.
        batches: of all shards.
        shards: this worker's, one micro-batch each.
        **options: `set_to_none`, and those of DistributedDataParallel.
    """
    built = build(spec, model.workload(spec), CPU)
    script = PlainDdp(
        built.parts.model,
        model.plain_loss,
        built.parts.optimizer,
        built.parts.scheduler,
        clip_norm=spec.clip_norm,
        **options,
    )
    made = [
        [batches.take(plan, CPU) for plan in built.order.shards_of(step) if plan.shard in shards]
        for step in range(NUM_BATCHES)
    ]

    def step(number: int) -> None:
        # A plain script leaves this off.
        torch.use_deterministic_algorithms(False)
        script.step(made[number % NUM_BATCHES])
        torch.use_deterministic_algorithms(True)

    return step, built.parts.model
