"""The exchange by messages between pairs of workers, for gloo."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.buckets import Buckets
from samestep.engine.exchange import PeerErrors, Traffic, add_into, divide, message_limit
from samestep.exact.tree import Node, finish, shard_range, subtrees

NODES_PER_BUCKET = 64
FINISHED_TAG = 1 << 20
# A slice is added up and divided in parts that stay in the processor's cache in between.
PART_BYTES = 1 << 20


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
        self._limit = message_limit(group)
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
        self._sums: list[dict[tuple[int, Node], Any]] = []
        self._finished: list[tuple[int, Any]] = []
        self._sends: list[tuple[int, Any]] = []
        self.traffic = Traffic()

    def post(self) -> None:
        """Posts the receives of phase 1."""
        self.traffic = Traffic()
        self._order, self._sends, self._finished = [], [], []
        self._sums = [
            {
                (peer, node): self._irecv(
                    tensor, peer, bucket * NODES_PER_BUCKET + self._nodes[peer].index(node)
                )
                for (peer, node), tensor in staging.items()
            }
            for bucket, staging in enumerate(self._staging)
        ]

    def send(self, bucket: int) -> None:
        """Phase 1 of a bucket, in order of completion; posts the receives of its phase 2.

        A peer's slice comes back only after the peer has got this worker's sums of it, so it may
        be received where they are sent from.
        """
        self._order.append(bucket)
        for number, (_, tensor) in enumerate(self._buckets.sums(bucket)):
            for peer in self._peers:
                self._isend(self._slice(tensor, peer), peer, bucket * NODES_PER_BUCKET + number)
        for peer in self._peers:
            place = self._slice(self._buckets.active(bucket), peer)
            self._finished.append((peer, self._irecv(place, peer, FINISHED_TAG + bucket)))

    def complete(self, divisor: float) -> None:
        """Finishes the own slices, then hands them round (phase 2)."""
        for bucket in self._order:
            for (peer, _), work in self._sums[bucket].items():
                self._wait(work, peer)
            own = self._finish(bucket, divisor)
            for peer in self._peers:
                self._isend(own, peer, FINISHED_TAG + bucket)
        for peer, work in (*self._finished, *self._sends):
            self._wait(work, peer)

    def _finish(self, bucket: int, divisor: float) -> Tensor:
        """The mean over all shards of the own slice, in the active buffer."""
        nodes: dict[Node, Tensor] = {
            node: self._slice(tensor, self._world_rank)
            for node, tensor in self._buckets.sums(bucket)
        }
        own = nodes[self._buckets.plan.nodes[-1]]
        nodes |= {node: tensor for (_, node), tensor in self._staging[bucket].items()}
        step = PART_BYTES // own.dtype.itemsize
        for start in range(0, len(own), step):
            parts = {node: tensor[start : start + step] for node, tensor in nodes.items()}
            target = parts[self._buckets.plan.nodes[-1]]
            total = finish(parts, add_into(target), self._shards)
            if total is not target:
                target.copy_(total)
            divide(target, divisor)
        return own

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
            work.wait(self._limit)
        self.traffic.wait_s += time.perf_counter() - started
