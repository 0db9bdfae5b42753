"""`reduction: fast`: stock DistributedDataParallel over the same shards, for comparison.

Nothing is promised about bits: the sums meet in an order that depends on the number of workers,
shards are averaged per worker and workers evenly, and a model with a branch that some shard does
not take fails as it does in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import DistError
from torch.nn.parallel import DistributedDataParallel

from samestep.engine.exchange import Traffic
from samestep.engine.peers import Peers
from samestep.engine.shard import ShardResult, forward_shard, in_user_code
from samestep.engine.step import Reduced, Replica, TakeBatch
from samestep.errors import PeerLostError, UserCodeError
from samestep.exact.order import ShardPlan
from samestep.exact.sums import mean_of_sums, weighted_mean
from samestep.spec import JobSpec
from samestep.workload import Loss, Workload


class _LossModule(nn.Module):
    """What DDP wraps, so that the workload sees its own model and never the wrapper."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Any], Tensor | Loss]) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss_of

    def forward(self, batch: Any) -> Any:
        if batch is None:  # an idle worker takes part in the all-reduce with zeros
            return sum(p.sum() * 0 for p in self.model.parameters() if p.requires_grad)
        return self.loss_of(batch)


@contextmanager
def _peers_lost() -> Iterator[None]:
    """DDP talks to the others within backward: what that raises is no error of the workload's."""
    try:
        yield
    except (UserCodeError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, UserCodeError) else error
        is_gloo = isinstance(cause, RuntimeError) and "/gloo/" in str(cause)
        if is_gloo or isinstance(cause, DistError):
            raise PeerLostError(f"lost another worker: {cause}") from error
        raise


class FastEngine:
    """The same interface as StepEngine, on stock DDP."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        workload: Workload,
        replica: Replica,
        peers: Peers,
        scale: Callable[[Tensor], Tensor],
        ddp_options: dict[str, Any] | None = None,
    ) -> None:
        self._spec = spec
        self._workload = workload
        self.main, self.replicas = replica, [replica]
        self._peers = peers
        self._scale = scale
        module = _LossModule(replica.model, replica.loss_of)
        device_ids = [replica.device.index] if replica.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(module, device_ids=device_ids, **(ddp_options or {}))

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
        """Forward and backward of the worker's shards under `no_sync` but for the last one."""
        mine = [plans[shard] for shard in self.main.shards if plans[shard].ids]
        for parameter in self.main.model.parameters():
            parameter.grad = None
        self.main.keeper.start_step()
        results: dict[int, ShardResult] = {}
        for number, plan in enumerate(mine):
            last = number + 1 == len(mine)
            with nullcontext() if last else self._ddp.no_sync():
                result = forward_shard(
                    self._spec,
                    self._workload,
                    self._ddp,
                    take(plan, self.main.device),
                    step=step,
                    shard=plan.shard,
                    num_samples=len(plan.ids),
                    device=self.main.device,
                )
                results[plan.shard] = result
                leaf = self._scale(result.loss / len(mine))
                with _peers_lost():
                    in_user_code(leaf.backward, f"backward of step {step}, shard {plan.shard}")
        if not mine:
            with _peers_lost():
                self._ddp(None).backward()
        shards = {
            str(shard): [result.loss_value, result.weight, result.metrics]
            for shard, result in results.items()
        }
        messages = self._peers.gather({"flag": flag, "delivered": delivered, "shards": shards})()
        return self._reduced(messages)

    def _reduced(self, messages: list[dict[str, Any]]) -> Reduced:
        losses: list[float | None] = [None] * self._spec.shards
        weights = [0.0] * self._spec.shards
        metrics: dict[str, list[tuple[float, float]]] = {}
        for rank, message in enumerate(messages):
            if "error" in message:
                raise PeerLostError(f"worker {rank} failed: {message['error']}")
            for key, (loss, weight, sums) in message["shards"].items():
                losses[int(key)], weights[int(key)] = loss, weight
                for name, (total, count) in sums.items():
                    metrics.setdefault(name, []).append((total, count))
        return Reduced(
            loss=weighted_mean(
                (loss, w) for loss, w in zip(losses, weights, strict=True) if loss is not None
            ),
            shard_losses=losses,
            shard_weights=weights,
            metrics={name: mean_of_sums(sums) for name, sums in sorted(metrics.items())},
            flag=max(message["flag"] for message in messages),
            delivered=int(messages[0]["delivered"]),
            parameters=[p for p in self.main.model.parameters() if p.grad is not None],
            traffic=Traffic(),
        )

    def rewind(self) -> bool:
        """As of StepEngine."""
        self.main.keeper.rewind()
        return True

    def sync_replicas(self) -> None:
        """There is one replica."""

    def close(self) -> None:
        """Lets the gradients go."""
        for parameter in self.main.model.parameters():
            parameter.grad = None
