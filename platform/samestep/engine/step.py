"""The one step function: shards forward and backward, small talk, the reduction.

A mode only decides which replicas a process has and how sums meet; everything else is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.engine import auditor
from samestep.engine.buckets import Buckets, layout_buckets, trainable, trainable_digest
from samestep.engine.buffers import BufferKeeper
from samestep.engine.collective import Collective
from samestep.engine.exchange import Exchange, OneProcess, Traffic
from samestep.engine.pairwise import Pairwise
from samestep.engine.peers import Peers
from samestep.engine.shard import ShardResult, forward_shard, in_user_code
from samestep.errors import (
    DivergenceError,
    NotExactError,
    PeerLostError,
    WorkloadError,
)
from samestep.exact.digest import ids_digest, live_digest
from samestep.exact.order import ShardPlan
from samestep.exact.sums import exact_sum, mean_of_sums, weighted_mean
from samestep.exact.tree import local_plan, shard_range
from samestep.faults.progress import Phase, Progress
from samestep.spec import JobSpec
from samestep.workload import Loss, Workload

TakeBatch = Callable[[ShardPlan, torch.device], Any]


@dataclass(kw_only=True)
class Replica:
    """A model on one device and the contiguous shards it computes."""

    device: torch.device
    model: nn.Module
    shards: range
    loss_of: Callable[[Any], Tensor | Loss]
    keeper: BufferKeeper
    buckets: Buckets = field(init=False)


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a step came to, the same on every worker.

    Attributes:
        loss: weighted mean of the shards' losses, float64; NaN if no shard had weight.
        shard_losses: by shard; None where absent.
        shard_weights: by shard; 0 where absent.
        metrics: means over the step by name.
        flag: the largest flag any worker gave.
        delivered: what worker 0 told (see `compute`).
        parameters: those that have a gradient, on this process's first replica.
        traffic: what this worker's exchange did.
        audit_s: seconds that an audit took; None where there was none.
    """

    loss: float
    shard_losses: list[float | None]
    shard_weights: list[float]
    metrics: dict[str, float]
    flag: int
    delivered: int
    parameters: list[nn.Parameter]
    traffic: Traffic
    audit_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """No shard had weight: there is nothing to update by."""
        return not any(self.shard_weights)


class StepEngine:
    """Computes and reduces gradients.

    Args:
        spec: the job.
        workload: the user's.
        replicas: one, or one per device in mode dataparallel (then there are no peers).
        peers: the other workers.
        group: process group for gradients; None for one worker.
        scale: applied to each shard's weighted loss before backward (loss scaling).
        progress: told where the step is.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        workload: Workload,
        replicas: list[Replica],
        peers: Peers,
        group: dist.ProcessGroup | None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.spec = spec
        self._workload = workload
        self.replicas = replicas
        self.peers = peers
        self._group = group
        self._scale = scale
        self._delivered = 0
        self.nominal_weight = float(-(-spec.batch_size // spec.shards))
        self.exchange: Exchange
        self._build()

    @property
    def main(self) -> Replica:
        """The replica whose state is the run's."""
        return self.replicas[0]

    def close(self) -> None:
        """Takes hooks and gradients off the models, and lets go of the process group.

        Nothing is left that refers in a circle: the group's sockets close, and so free the other
        workers, as soon as the last frame is gone that holds it.
        """
        for replica in self.replicas:
            replica.buckets.close()
        vars(self).pop("exchange", None)

    def compute(
        self,
        step: int,
        plans: list[ShardPlan],
        take: TakeBatch,
        flag: int,
        delivered: int = 0,
        *,
        take_apart: TakeBatch | None = None,
    ) -> Reduced:
        """Forward and backward of this process's shards, and the reduction over all.

        Afterwards the main replica's parameters have the step's gradients (None where no shard
        had one) and its buffers are those after the step; nothing is updated yet.

        Args:
            step: global step.
            plans: of all shards.
            take: loads a shard's batch.
            flag: what this worker asks for; the largest of all counts.
            delivered: records of the attempt that worker 0 knows to be in the ledger.
            take_apart: loads a batch beside the order, for the audit; None: `take` can.

        Raises:
            CorruptionError: an audit found that a machine computed wrongly.
        """
        take_apart = take_apart or take
        self._delivered = delivered
        if self.follow_trainable():
            # Buckets of other sizes would break the connection: nobody sends one before all have
            # the same. A worker that froze nothing meets this message in its own small talk.
            self._checked(self.peers.gather(self._message(plans, flag, {}))(), step)
        audit, audited = auditor.plan(self, step, plans), dict[str, str]()
        began_s = time.perf_counter()
        if audit is not None and audit.auditor[0] == self.peers.world_rank:
            # Before the step's own shards: the buffers are free, so no others are needed.
            try:
                audited = dict(auditor.compute_apart(self, audit, plans, take_apart))
            except Exception as error:
                self.peers.gather({"error": f"{type(error).__name__}: {error}"})()
                raise
        computed_s = time.perf_counter() - began_s
        self.exchange.post()
        versions = [_versions(replica.model) for replica in self.replicas]
        for replica in self.replicas:
            replica.buckets.start_step()
            replica.keeper.start_step()
        results: dict[int, ShardResult] = {}
        rounds = max(len(replica.shards) for replica in self.replicas)
        turns = [
            (replica, replica.shards[turn])
            for turn in range(rounds)
            for replica in self.replicas
            if turn < len(replica.shards)
        ]
        talk: Callable[[], list[Any]] | None = None
        for number, (replica, shard) in enumerate(turns):
            result = None
            replica.buckets.start_shard()
            try:
                if plans[shard].ids:
                    result = self.forward(replica, plans[shard], take, results)
            except Exception as error:
                # The others are waiting for the small talk: they learn of it there.
                self.peers.gather({"error": f"{type(error).__name__}: {error}"})()
                raise
            if number + 1 == len(turns):
                talk = self.peers.gather(self._message(plans, flag, results))
            if result is not None and result.weight > 0:
                self.backward(replica, result, step, shard)
            replica.buckets.end_shard()
        for replica, before in zip(self.replicas, versions, strict=True):
            _refuse_changed(replica.model, before, step)
            replica.buckets.flush()
        assert talk is not None
        self.progress.at(Phase.EXCHANGE, step=step)
        reduced = self._reduce(step, self._checked(talk(), step))
        if audit is None:
            return reduced
        audit_s = auditor.compare(self, audit, audited, plans, take_apart, computed_s=computed_s)
        return replace(reduced, audit_s=audit_s)

    def forward(
        self,
        replica: Replica,
        plan: ShardPlan,
        take: TakeBatch,
        results: dict[int, ShardResult],
    ) -> ShardResult:
        """Forward of one shard, and what is kept of its buffers; `results` are those before it."""
        self.progress.at(Phase.DATA, step=plan.step, shard=plan.shard)
        batch = take(plan, replica.device)
        self.progress.at(Phase.FORWARD, step=plan.step, shard=plan.shard)
        replica.keeper.start_shard()
        result = forward_shard(
            self.spec,
            self._workload,
            replica.loss_of,
            batch,
            step=plan.step,
            shard=plan.shard,
            num_samples=len(plan.ids),
            device=replica.device,
        )
        if self._flags(replica.model) != self._trainable_flags:
            raise WorkloadError(
                f"requires_grad of a parameter changed during the forward of step {plan.step}, "
                f"shard {plan.shard}: freeze and unfreeze in before_step(model, step), so that "
                "every worker does it at the same step"
            )
        first_here = not any(results[s].weight > 0 for s in replica.shards if s in results)
        if result.weight > 0 and first_here:
            replica.keeper.keep()
        results[plan.shard] = result
        return result

    def backward(
        self, replica: Replica, result: ShardResult, step: int, shard: int, *, dry: bool = False
    ) -> None:
        """Backward of a shard into the buckets; `dry` completes none of them."""
        self.progress.at(Phase.BACKWARD, step=step, shard=shard)
        # Equal shards multiply by exactly 1, and fp16 does not overflow.
        leaf = self._scale(result.loss * (result.weight / self.nominal_weight))
        in_user_code(
            lambda: replica.buckets.backward(leaf, dry=dry),
            f"backward of step {step}, shard {shard}",
        )

    def _message(
        self, plans: list[ShardPlan], flag: int, results: dict[int, ShardResult]
    ) -> dict[str, Any]:
        return {
            "trainable": self._digest,
            "samples": ids_digest([plan.ids for plan in plans]),
            "flag": flag,
            "delivered": self._delivered,
            "shards": {
                str(shard): [result.loss_value, result.weight, result.metrics]
                for shard, result in results.items()
            },
        }

    def _checked(self, messages: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        for rank, message in enumerate(messages):
            if "error" in message:
                raise PeerLostError(f"worker {rank} failed at step {step}: {message['error']}")
        sets = {message["trainable"] for message in messages}
        if len(sets) > 1:
            raise WorkloadError(
                f"the parameters that require a gradient differ between workers at step {step}: "
                + ", ".join(f"worker {r}: {m['trainable']}" for r, m in enumerate(messages))
                + "; freeze and unfreeze as a function of the step alone (before_step)"
            )
        if len({message["samples"] for message in messages}) > 1:
            raise DivergenceError(
                f"the samples of step {step} differ between workers: order() or the size of data() "
                "is not the same in every process (it may depend on time, hash order or the "
                "environment)"
            )
        return messages

    def _reduce(self, step: int, messages: list[dict[str, Any]]) -> Reduced:
        spec = self.spec
        losses: list[float | None] = [None] * spec.shards
        weights = [0.0] * spec.shards
        metrics: dict[str, list[tuple[float, float]]] = {}
        for message in messages:
            for key, (loss, weight, sums) in message["shards"].items():
                if weight > 0:
                    losses[int(key)], weights[int(key)] = loss, weight
                    for name, (total, count) in sums.items():
                        metrics.setdefault(name, []).append((total, count))
        total = exact_sum(weights)
        self.exchange.complete(total / self.nominal_weight if total else 1.0)
        self._settle_buffers(weights)
        parameters = self.main.buckets.publish() if total else []
        return Reduced(
            loss=weighted_mean(
                (loss, w) for loss, w in zip(losses, weights, strict=True) if loss is not None
            ),
            shard_losses=losses,
            shard_weights=weights,
            metrics={name: mean_of_sums(sums) for name, sums in sorted(metrics.items())},
            flag=max(message["flag"] for message in messages),
            delivered=int(messages[0]["delivered"]),
            parameters=parameters,
            traffic=self.exchange.traffic,
        )

    def _settle_buffers(self, weights: list[float]) -> None:
        for replica in self.replicas:
            replica.keeper.restore_modes()
        first = next((shard for shard, weight in enumerate(weights) if weight > 0), None)
        if first is None:
            for replica in self.replicas:
                replica.keeper.rewind()
            return
        owner = next(
            rank
            for rank in range(self.peers.world_size)
            if first in shard_range(self.spec.shards, self.peers.world_size, rank)
        )
        for replica in self.replicas[1:]:
            if first in replica.shards:
                self.main.keeper.take_over(replica.keeper)
        self.main.keeper.end_step(self.peers, owner)

    def follow_trainable(self) -> bool:
        """Makes the buckets anew where parameters were frozen or unfrozen; whether that was so."""
        if self._flags() == self._trainable_flags:
            return False
        for replica in self.replicas[1:]:
            _copy_flags(self.main.model, replica.model)
        self.close()
        self._build()
        return True

    def rewind(self) -> bool:
        """After a failure within `compute`: makes the main replica's state that before the step.

        Parameters are as they were; buffers are put back. Returns whether the state is whole.
        """
        self.main.keeper.rewind()
        return True

    def sync_replicas(self) -> None:
        """After the update: every other replica takes the main one's parameters and buffers."""
        source = self.main.model
        for replica in self.replicas[1:]:
            with torch.no_grad():
                for ours, theirs in zip(
                    source.parameters(), replica.model.parameters(), strict=True
                ):
                    theirs.copy_(ours, non_blocking=True)
                for ours_b, theirs_b in zip(
                    self.main.keeper.live, replica.keeper.live, strict=True
                ):
                    assert ours_b is not None
                    assert theirs_b is not None
                    theirs_b.copy_(ours_b, non_blocking=True)

    def probe(self, plan: ShardPlan, take: TakeBatch) -> list[tuple[str, ShardResult]]:
        """Computes one shard on every replica, and leaves no trace: the canary.

        Returns:
            Per replica a digest of loss and gradients, and the shard's result.
        """
        found = []
        for replica in self.replicas:
            replica.buckets.start_step()
            replica.keeper.start_step()
            replica.buckets.start_shard()
            before = live_digest(dict(replica.model.named_parameters()))
            try:
                result = self.forward(replica, plan, take, {})
                in_user_code(
                    lambda r=replica, leaf=result.loss: r.buckets.backward(leaf, dry=True),  # type: ignore[misc]
                    "backward of the canary (step 0, shard 0)",
                )
            finally:
                replica.keeper.rewind()
            if live_digest(dict(replica.model.named_parameters())) != before:
                raise NotExactError(
                    "parameters changed during forward or backward, before the update of the "
                    "step: update them in the optimizer only"
                )
            digest = live_digest(
                {**replica.buckets.digest_source(), "loss": result.loss.detach().reshape(1)}
            )
            found.append((digest, result))
        return found

    @property
    def layout_digest(self) -> str:
        """Hash of the trainable parameters and of what the buckets hold of them."""
        return self._digest

    def _flags(self, model: nn.Module | None = None) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in (model or self.main.model).parameters())

    def _build(self) -> None:
        spec, world_size = self.spec, self.peers.world_size
        reduce_dtype = torch.float32 if spec.reduce_dtype else None
        self._trainable_flags = self._flags()
        for replica in self.replicas:
            parameters = trainable(replica.model)
            if not parameters:
                raise WorkloadError(
                    "no parameter requires a gradient any more: nothing to train; unfreeze one "
                    "in before_step, or end the run before"
                )
            layouts = layout_buckets(parameters, world_size=world_size, reduce_dtype=reduce_dtype)
            converts = reduce_dtype is not None and any(
                p.dtype != reduce_dtype for _, p in parameters
            )
            self.pairs_in_place = not converts
            replica.buckets = Buckets(
                parameters,
                layouts,
                local_plan(replica.shards, pairs_in_place=not converts),
                lambda bucket: self.exchange.send(bucket),
            )
        self._digest = trainable_digest(self.main.buckets.parameters)
        if self._group is None:
            self.exchange = OneProcess([r.buckets for r in self.replicas], spec.shards)
        elif self.main.device.type == "cpu":
            self.exchange = Pairwise(self.main.buckets, spec.shards, self._group)
        else:
            self.exchange = Collective(self.main.buckets, spec.shards, self._group)


def _copy_flags(source: nn.Module, target: nn.Module) -> None:
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)


def _versions(model: nn.Module) -> list[int]:
    """Autograd's count of in-place changes of each parameter: cheap, where a digest is not."""
    return [parameter._version for parameter in model.parameters()]


def _refuse_changed(model: nn.Module, before: list[int], step: int) -> None:
    """Only the shards of this worker would have seen the change.

    Raises:
        NotExactError: names the parameters that changed since `before`.
    """
    if _versions(model) == before:
        return
    names = [
        name
        for (name, parameter), version in zip(model.named_parameters(), before, strict=True)
        if parameter._version != version
    ]
    raise NotExactError(
        f"forward or backward of step {step} changed parameters in place ({', '.join(names)}), "
        "before the update and on this worker's shards only: change them in the optimizer, or in "
        "before_step(model, step)"
    )
