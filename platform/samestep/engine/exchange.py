"""How subtree sums meet: each worker owns 1/W of every bucket and finishes the tree over it.

Phase 1 sends every owner its slice of each subtree sum while backward still runs; phase 2 hands
the finished slices round. No ring collective stands in a step: with messages between pairs every
survivor learns within milliseconds that a peer has died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.buckets import Buckets
from samestep.errors import PeerLostError
from samestep.exact.tree import Node, finish


@dataclass
class Traffic:
    """What the gradient exchange of one step sent and waited for."""

    sent_bytes: int = 0
    wait_s: float = 0.0


class Exchange(Protocol):
    """Completes the sums of all replicas of a step."""

    traffic: Traffic

    def post(self) -> None:
        """Before the last backward: makes ready to receive."""

    def send(self, bucket: int) -> None:
        """The subtree sums of a bucket are final; may be called from within backward."""

    def complete(self, divisor: float) -> None:
        """After backward: the sum over all shards, over `divisor`, in every active buffer."""


def add_into(target: Tensor) -> Any:
    """Adds left and right into `target` if it is one of them, else into the left one."""

    def add(left: Tensor, right: Tensor) -> Tensor:
        return torch.add(left, right, out=right if right is target else left)

    return add


def divide(total: Tensor, divisor: float) -> None:
    """Divides in place."""
    # By a 0-dim tensor: by a number, CUDA multiplies by the reciprocal.
    if divisor != 1.0:
        total.div_(torch.tensor(divisor, dtype=total.dtype, device=total.device))


class OneProcess:
    """One worker: one replica, or one per device of mode dataparallel.

    Args:
        replicas: the buckets of each replica, in the order of their shards; the first one
            takes the result.
        shards: number of leaves.
    """

    def __init__(self, replicas: Sequence[Buckets], shards: int) -> None:
        self._replicas = replicas
        self._shards = shards
        self.traffic = Traffic()
        self._staging = [
            [
                [torch.empty_like(first.active(b)) for _ in other.plan.nodes]
                for other in replicas[1:]
            ]
            for first in replicas[:1]
            for b in range(len(first.layouts))
        ]

    def post(self) -> None:
        """Nothing is received."""
        self.traffic = Traffic()

    def send(self, bucket: int) -> None:
        """Nothing is sent."""

    def complete(self, divisor: float) -> None:
        """Finishes the tree over the replicas' subtree sums, on the first one's device."""
        first = self._replicas[0]
        for bucket in range(len(first.layouts)):
            nodes: dict[Node, Tensor] = dict(first.sums(bucket))
            for other, staging in zip(self._replicas[1:], self._staging[bucket], strict=True):
                for (node, tensor), place in zip(other.sums(bucket), staging, strict=True):
                    nodes[node] = place.copy_(tensor)
                    self.traffic.sent_bytes += tensor.nbytes
            active = first.active(bucket)
            total = finish(nodes, add_into(active), self._shards)
            if total is not active:
                active.copy_(total)
            divide(active, divisor)


class PeerErrors:
    """Turns a failed message into a PeerLostError that names the peer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLostError(f"lost worker {self._peer}: {error}") from error


def message_limit(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a gloo group, which whoever waits for a message must give.

    By itself gloo waits for a message as long as the group was given to form, whatever timeout
    it has got since (torch 2.13; collectives keep to the new one).
    """
    limit: timedelta = backend_of(group, torch.device("cpu")).options._timeout
    return limit


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What does the waiting: TORCH_DISTRIBUTED_DEBUG=DETAIL puts another backend around it."""
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
