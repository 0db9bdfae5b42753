"""The fixed tree over shard indices, and what of it each worker holds.

Node (k, n) is the sum of the leaves n*2^k to (n+1)*2^k - 1. The tree does not know how many
workers there are: a worker adds up the maximal aligned subtrees inside its contiguous range of
shards, and the owner of a slice finishes the tree over them in the fixed order. A number of shards
that is no power of two is a tree padded with absent leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Node = tuple[int, int]
"""(level k, index n)"""


def shard_range(shards: int, world_size: int, world_rank: int) -> range:
    """The contiguous shards of one worker (or one device in mode dataparallel)."""
    return range(shards * world_rank // world_size, shards * (world_rank + 1) // world_size)


def subtrees(leaves: range) -> list[Node]:
    """The maximal aligned subtrees inside a contiguous range, from left to right."""
    nodes: list[Node] = []
    start = leaves.start
    while start < leaves.stop:
        level = 0
        while start % (2 << level) == 0 and start + (2 << level) <= leaves.stop:
            level += 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def finish(nodes: dict[Node, T], add: Callable[[T, T], T], shards: int) -> T:
    """Sums subtrees that cover all shards, in the tree's order.

    Args:
        nodes: value by node; together they cover shards 0 to `shards` - 1, without overlap.
        add: left and right to their sum; may write into the left one.
        shards: number of leaves.
    """
    height = (shards - 1).bit_length()

    def value(level: int, index: int) -> T | None:
        if (level, index) in nodes:
            return nodes[level, index]
        if level == 0 or index << level >= shards:
            return None
        left, right = value(level - 1, 2 * index), value(level - 1, 2 * index + 1)
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    root = value(height, 0)
    assert root is not None, f"subtrees {sorted(nodes)} do not cover {shards} shards"
    return root


@dataclass(frozen=True, kw_only=True)
class Push:
    """What happens to the active buffer once the leaves up to a shard are in it.

    Attributes:
        merge: slots whose sum is added to the left of the active buffer, innermost first.
        keep: the active buffer becomes this slot (and another buffer becomes active); None: it
            stays active, either because the next shard adds on top or because it is the last.
        on_top: the next shard accumulates on top of the active buffer (the second of an aligned
            pair), so it is not cleared.
    """

    merge: tuple[int, ...]
    keep: int | None
    on_top: bool


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """How one worker sums its range: a binary counter of partial sums, worked out beforehand.

    Attributes:
        pushes: one per shard of the range, in order.
        nodes: the subtrees that are left at the end.
        slots: where each of `nodes` lies: an index of a slot, or None for the active buffer.
        num_slots: extra buffers needed beside the active one.
    """

    pushes: tuple[Push, ...]
    nodes: tuple[Node, ...]
    slots: tuple[int | None, ...]
    num_slots: int


def local_plan(leaves: range, *, pairs_in_place: bool = True) -> LocalPlan:
    """Plans the sums of a contiguous range of shards.

    Args:
        leaves: the worker's shards.
        pairs_in_place: let the second leaf of an aligned pair accumulate on top of the first
            (`a + b` is the tree's own sum); not possible where gradients are converted.
    """
    held: list[tuple[Node, int]] = []
    free: list[int] = []
    num_slots = 0
    pushes: list[Push] = []
    final: Node | None = None
    for shard in leaves:
        first_of_pair = pairs_in_place and shard % 2 == 0 and shard + 1 in leaves
        if first_of_pair:
            pushes.append(Push(merge=(), keep=None, on_top=True))
            continue
        second_of_pair = pairs_in_place and shard % 2 == 1 and shard - 1 in leaves
        level, index = (1, shard // 2) if second_of_pair else (0, shard)
        merged: list[int] = []
        while index % 2 == 1 and held and held[-1][0] == (level, index - 1):
            slot = held.pop()[1]
            merged.append(slot)
            free.append(slot)
            level, index = level + 1, index // 2
        keep: int | None = None
        if shard + 1 < leaves.stop:
            if free:
                keep = free.pop()
            else:
                keep, num_slots = num_slots, num_slots + 1
            held.append(((level, index), keep))
        else:
            final = (level, index)
        pushes.append(Push(merge=tuple(merged), keep=keep, on_top=False))
    nodes = [node for node, _ in held]
    slots: list[int | None] = [slot for _, slot in held]
    if final is not None:
        nodes.append(final)
        slots.append(None)
    return LocalPlan(
        pushes=tuple(pushes), nodes=tuple(nodes), slots=tuple(slots), num_slots=num_slots
    )


def traffic_factor(shards: int, world_size: int) -> float:
    """Bytes that the busiest worker sends in a step, over what it would in a ring all-reduce.

    A ring sends 2 (W - 1) / W gradients per worker. Here each of a worker's subtree sums sends
    W - 1 of its W slices, and its finished slice goes to W - 1 others.
    """
    if world_size == 1:
        return 1.0
    ranges = (shard_range(shards, world_size, rank) for rank in range(world_size))
    return (max(len(subtrees(leaves)) for leaves in ranges) + 1) / 2
