"""How subtree sums meet: each worker owns 1/W of every bucket and finishes the tree over it.

Phase 1 sends every owner its slice of each subtree sum while backward still runs; phase 2 hands
the finished slices round. No ring collective stands in a step: with messages between pairs every
survivor learns within milliseconds that a peer has died.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.buckets import Buckets
from samestep.errors import PeerLostError
from samestep.exact.tree import Node, finish, shard_range, subtrees

NODES_PER_BUCKET = 64
FINISHED_TAG = 1 << 20


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


def _add_into(target: Tensor) -> Any:
    """Adds left and right into `target` if it is one of them, else into the left one."""

    def add(left: Tensor, right: Tensor) -> Tensor:
        return torch.add(left, right, out=right if right is target else left)

    return add


def _divide(total: Tensor, divisor: float) -> None:
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
            [[torch.empty_like(first.active(b)) for _ in other.plan.nodes] for other in replicas[1:]]
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
            total = finish(nodes, _add_into(active), self._shards)
            if total is not active:
                active.copy_(total)
            _divide(active, divisor)


class Pairwise:
    """Messages between pairs of workers, in place, for gloo.

    Args:
        buckets: this worker's buckets.
        shards: number of leaves.
        group: process group of the workers.
    """

    def __init__(self, buckets: Buckets, shards: int, group: dist.ProcessGroup) -> None:
        self._buckets = buckets
        self._shards = shards
        self._group = group
        self._world_rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._peers = [r for r in range(self._world_size) if r != self._world_rank]
        self._nodes = {
            peer: subtrees(shard_range(shards, self._world_size, peer)) for peer in self._peers
        }
        self._staging = [
            {
                (peer, node): torch.empty(layout.numel // self._world_size, dtype=layout.dtype)
                for peer in self._peers
                for node in self._nodes[peer]
            }
            for layout in buckets.layouts
        ]
        self._order: list[int] = []
        self._received: list[dict[tuple[int, Node], Any]] = []
        self._sends: list[tuple[int, Any]] = []
        self.traffic = Traffic()

    def post(self) -> None:
        """Posts the receives of phase 1."""
        self.traffic = Traffic()
        self._order, self._sends, self._received = [], [], []
        for bucket, staging in enumerate(self._staging):
            self._received.append(
                {
                    (peer, node): self._irecv(
                        tensor, peer, bucket * NODES_PER_BUCKET + self._nodes[peer].index(node)
                    )
                    for (peer, node), tensor in staging.items()
                }
            )

    def send(self, bucket: int) -> None:
        """Phase 1 of a bucket, in order of completion."""
        self._order.append(bucket)
        for number, (_, tensor) in enumerate(self._buckets.sums(bucket)):
            for peer in self._peers:
                self._isend(self._slice(tensor, peer), peer, bucket * NODES_PER_BUCKET + number)

    def complete(self, divisor: float) -> None:
        """Finishes the own slices, then hands them round (phase 2)."""
        receives = []
        for bucket in self._order:
            nodes: dict[Node, Tensor] = {
                node: self._slice(tensor, self._world_rank)
                for node, tensor in self._buckets.sums(bucket)
            }
            for (peer, node), work in self._received[bucket].items():
                self._wait(work, peer)
                nodes[node] = self._staging[bucket][peer, node]
            active = self._buckets.active(bucket)
            own = self._slice(active, self._world_rank)
            last = self._buckets.plan.nodes[-1]
            nodes[last] = own
            total = finish(nodes, _add_into(own), self._shards)
            if total is not own:
                own.copy_(total)
            _divide(own, divisor)
            for peer in self._peers:
                self._isend(own, peer, FINISHED_TAG + bucket)
                receives.append(
                    (peer, self._irecv(self._slice(active, peer), peer, FINISHED_TAG + bucket))
                )
        for peer, work in (*receives, *self._sends):
            self._wait(work, peer)

    def _slice(self, tensor: Tensor, owner: int) -> Tensor:
        size = tensor.numel() // self._world_size
        return tensor[owner * size : (owner + 1) * size]

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.traffic.sent_bytes += tensor.nbytes
        with PeerErrors(peer):
            work = dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)
        self._sends.append((peer, work))

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        with PeerErrors(peer):
            return dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)

    def _wait(self, work: Any, peer: int) -> None:
        started = time.perf_counter()
        with PeerErrors(peer):
            work.wait()
        self.traffic.wait_s += time.perf_counter() - started


class Collective:
    """The same exchange by all-to-all and all-gather, for NCCL (which knows no tags).

    Every worker must call the same collectives in the same order, so buckets go in layout order.
    """

    def __init__(self, buckets: Buckets, shards: int, group: dist.ProcessGroup) -> None:
        self._buckets = buckets
        self._shards = shards
        self._group = group
        self._world_rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._nodes = [
            subtrees(shard_range(shards, self._world_size, rank))
            for rank in range(self._world_size)
        ]
        self._rounds = max(map(len, self._nodes))
        device = buckets.active(0).device
        # Of each round one tensor, with room for those workers that have a sum in that round.
        self._staging = [
            [
                torch.empty(
                    sum(len(nodes) > number for nodes in self._nodes)
                    * (layout.numel // self._world_size),
                    dtype=layout.dtype,
                    device=device,
                )
                for number in range(self._rounds)
            ]
            for layout in buckets.layouts
        ]
        self._ready: set[int] = set()
        self._next = 0
        self._works: dict[int, list[Any]] = {}
        self.traffic = Traffic()

    def post(self) -> None:
        """Forgets the step before."""
        self.traffic = Traffic()
        self._ready, self._next, self._works = set(), 0, {}

    def send(self, bucket: int) -> None:
        """Phase 1, held back until the buckets before it are complete too."""
        self._ready.add(bucket)
        while self._next in self._ready:
            self._works[self._next] = self._all_to_all(self._next)
            self._next += 1

    def complete(self, divisor: float) -> None:
        """Finishes the own slices, then gathers them (phase 2)."""
        gathers = []
        started = time.perf_counter()
        for bucket in range(len(self._buckets.layouts)):
            for work in self._works[bucket]:
                work.wait()
            active = self._buckets.active(bucket)
            size = active.numel() // self._world_size
            own = active[self._world_rank * size : (self._world_rank + 1) * size]
            nodes: dict[Node, Tensor] = {}
            for number, staging in enumerate(self._staging[bucket]):
                senders = [r for r, nodes_of in enumerate(self._nodes) if len(nodes_of) > number]
                for place, rank in enumerate(senders):
                    nodes[self._nodes[rank][number]] = staging[place * size : (place + 1) * size]
            total = finish(nodes, _add_into(own), self._shards)
            _divide(total, divisor)
            gathers.append(
                dist.all_gather_into_tensor(active, total, group=self._group, async_op=True)
            )
            self.traffic.sent_bytes += total.nbytes * (self._world_size - 1)
        for work in gathers:
            work.wait()
        self.traffic.wait_s += time.perf_counter() - started

    def _all_to_all(self, bucket: int) -> list[Any]:
        size = self._buckets.layouts[bucket].numel // self._world_size
        sums = self._buckets.sums(bucket)
        works = []
        for number, staging in enumerate(self._staging[bucket]):
            mine = number < len(sums)
            tensor = sums[number][1] if mine else staging[:0]
            works.append(
                dist.all_to_all_single(
                    staging,
                    tensor,
                    output_split_sizes=[size * (len(nodes) > number) for nodes in self._nodes],
                    input_split_sizes=[size * mine] * self._world_size,
                    group=self._group,
                    async_op=True,
                )
            )
            self.traffic.sent_bytes += tensor.nbytes // self._world_size * (self._world_size - 1)
        return works


class PeerErrors:
    """Turns a failed message into a PeerLostError that names the peer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLostError(f"lost worker {self._peer}: {error}") from error
