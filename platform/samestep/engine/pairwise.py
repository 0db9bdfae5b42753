"""The exchange by messages between pairs of workers, for gloo."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.buckets import Buckets
from samestep.engine.exchange import PeerErrors, Traffic, add_into, divide
from samestep.exact.tree import Node, finish, shard_range, subtrees

NODES_PER_PIECE = 64
FINISHED_TAG = 1 << 20
# Slices travel in pieces, so that one is added up while the next one is on its way, and is still in
# the processor's cache when it is divided and sent on.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of every worker's slice of a bucket.

    Attributes:
        number: over all buckets; tags are made of it.
        start: first element, counted from the start of a slice.
        stop: one past the last.
    """

    number: int
    start: int
    stop: int


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
        self._pieces = _cut(buckets, self._world_size)
        self._staging = [
            {
                (peer, node): torch.empty(layout.numel // self._world_size, dtype=layout.dtype)
                for peer in self._peers
                for node in self._nodes[peer]
            }
            for layout in buckets.layouts
        ]
        self._order: list[int] = []
        self._sums: dict[tuple[int, int, Node], Any] = {}
        self._finished: list[tuple[int, Any]] = []
        self._sends: list[tuple[int, Any]] = []
        self.traffic = Traffic()

    def post(self) -> None:
        """Posts the receives of phase 1."""
        self.traffic = Traffic()
        self._order, self._sends, self._finished = [], [], []
        self._sums = {
            (piece.number, peer, node): self._irecv(
                tensor[piece.start : piece.stop],
                peer,
                piece.number * NODES_PER_PIECE + self._nodes[peer].index(node),
            )
            for pieces, staging in zip(self._pieces, self._staging, strict=True)
            for piece in pieces
            for (peer, node), tensor in staging.items()
        }

    def send(self, bucket: int) -> None:
        """Phase 1 of a bucket, in order of completion; posts the receives of its phase 2.

        A peer's slice comes back only after the peer has got this worker's sums of it, so it may
        be received where they are sent from.
        """
        self._order.append(bucket)
        active = self._buckets.active(bucket)
        for piece in self._pieces[bucket]:
            for number, (_, tensor) in enumerate(self._buckets.sums(bucket)):
                for peer in self._peers:
                    tag = piece.number * NODES_PER_PIECE + number
                    self._isend(self._part(tensor, peer, piece), peer, tag)
        for piece in self._pieces[bucket]:
            for peer in self._peers:
                place = self._part(active, peer, piece)
                work = self._irecv(place, peer, FINISHED_TAG + piece.number)
                self._finished.append((peer, work))

    def complete(self, divisor: float) -> None:
        """Finishes the own slices, then hands them round (phase 2)."""
        for bucket in self._order:
            for piece in self._pieces[bucket]:
                own = self._finish(bucket, piece)
                divide(own, divisor)
                for peer in self._peers:
                    self._isend(own, peer, FINISHED_TAG + piece.number)
        for peer, work in (*self._finished, *self._sends):
            self._wait(work, peer)

    def _finish(self, bucket: int, piece: _Piece) -> Tensor:
        """The sum over all shards of a piece of the own slice, in the active buffer."""
        nodes: dict[Node, Tensor] = {
            node: self._part(tensor, self._world_rank, piece)
            for node, tensor in self._buckets.sums(bucket)
        }
        own = nodes[self._buckets.plan.nodes[-1]]
        for (peer, node), staging in self._staging[bucket].items():
            self._wait(self._sums[piece.number, peer, node], peer)
            nodes[node] = staging[piece.start : piece.stop]
        total = finish(nodes, add_into(own), self._shards)
        if total is not own:
            own.copy_(total)
        return own

    def _part(self, tensor: Tensor, owner: int, piece: _Piece) -> Tensor:
        start = owner * (tensor.numel() // self._world_size)
        return tensor[start + piece.start : start + piece.stop]

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


def _cut(buckets: Buckets, world_size: int) -> list[list[_Piece]]:
    """The pieces of a slice, for each bucket."""
    pieces: list[list[_Piece]] = []
    count = 0
    for layout in buckets.layouts:
        size = layout.numel // world_size
        step = PIECE_BYTES // layout.dtype.itemsize
        starts = range(0, size, step)
        pieces.append(
            [
                _Piece(number=count + place, start=start, stop=min(start + step, size))
                for place, start in enumerate(starts)
            ]
        )
        count += len(starts)
    return pieces
