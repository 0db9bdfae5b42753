"""The exchange by collectives, for NCCL."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.buckets import Buckets
from samestep.engine.exchange import Traffic, add_into, divide
from samestep.exact.tree import Node, finish, shard_range, subtrees


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
            total = finish(nodes, add_into(own), self._shards)
            divide(total, divisor)
            gathers.append(dist.all_gather_single(active, total, group=self._group, async_op=True))
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
