from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.exact.tree import (
    LocalPlan,
    Node,
    finish,
    local_plan,
    shard_range,
    subtrees,
    traffic_factor,
)

SHARDS = st.integers(1, 130)
PAIRS = st.booleans()


def bare_tree(leaves: list[str]) -> str:
    """The tree over all leaves as a text with brackets; no two orders of addition give the same."""
    level: list[str | None] = list(leaves)
    level += [None] * (2 ** (len(leaves) - 1).bit_length() - len(leaves))
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [a if b is None else b if a is None else add(a, b) for a, b in pairs]
    assert level[0] is not None
    return level[0]


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def carried_out(plan: LocalPlan, leaves: range) -> dict[Node, str]:
    """Does to texts what the buckets do to buffers."""
    slots: dict[int, str] = {}
    active = ""
    for leaf, push in zip(leaves, plan.pushes, strict=True):
        active = add(active, str(leaf)) if active else str(leaf)
        for slot in push.merge:
            active = add(slots.pop(slot), active)
        if push.keep is not None:
            assert push.keep not in slots
            slots[push.keep] = active
        assert push.on_top == (push.keep is None and leaf + 1 < leaves.stop)
        if not push.on_top and leaf + 1 < leaves.stop:
            active = ""
    where = zip(plan.nodes, plan.slots, strict=True)
    return {node: active if slot is None else slots[slot] for node, slot in where}


@given(shards=SHARDS, data=st.data(), pairs_in_place=PAIRS)
def test_any_number_of_workers_adds_in_the_order_of_the_bare_tree(
    shards: int, data: st.DataObject, pairs_in_place: bool
) -> None:
    world_size = data.draw(st.integers(1, shards))
    nodes: dict[Node, str] = {}
    for world_rank in range(world_size):
        leaves = shard_range(shards, world_size, world_rank)
        plan = local_plan(leaves, pairs_in_place=pairs_in_place)
        sums = carried_out(plan, leaves)
        assert list(sums) == subtrees(leaves)
        nodes |= sums
    assert finish(nodes, add, shards) == bare_tree([str(leaf) for leaf in range(shards)])


@given(shards=SHARDS, data=st.data())
def test_every_shard_belongs_to_one_worker_and_no_worker_is_without(
    shards: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, shards))
    ranges = [shard_range(shards, world_size, rank) for rank in range(world_size)]
    assert [leaf for leaves in ranges for leaf in leaves] == list(range(shards))
    assert all(ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(start=st.integers(0, 200), length=st.integers(1, 100))
def test_subtrees_are_aligned_maximal_and_cover_the_range(start: int, length: int) -> None:
    leaves = range(start, start + length)
    nodes = subtrees(leaves)
    covered = [leaf for k, n in nodes for leaf in range(n << k, (n + 1) << k)]
    assert covered == list(leaves)
    for k, n in nodes:
        parent = range(n >> 1 << (k + 1), ((n >> 1) + 1) << (k + 1))
        assert not (parent.start in leaves and parent.stop - 1 in leaves)


@given(shards=st.integers(1, 4096), pairs_in_place=PAIRS)
def test_slots_are_about_log2_of_the_shards(shards: int, pairs_in_place: bool) -> None:
    plan = local_plan(range(shards), pairs_in_place=pairs_in_place)
    assert plan.num_slots <= shards.bit_length()


@pytest.mark.parametrize("leaves", [range(1), range(5, 6), range(2), range(6, 8)])
def test_one_shard_or_one_aligned_pair_needs_no_slot(leaves: range) -> None:
    assert local_plan(leaves).num_slots == 0


def test_converted_gradients_never_meet_in_place() -> None:
    plan = local_plan(range(8), pairs_in_place=False)
    assert not any(push.on_top for push in plan.pushes)
    assert local_plan(range(2), pairs_in_place=False).num_slots == 1


@pytest.mark.parametrize(
    ("shards", "world_size", "factor"),
    [
        (4, 1, 1.0),
        (4, 2, 1.0),
        (4, 4, 1.0),
        (12, 3, 1.0),
        (8, 3, 1.5),
        (12, 4, 1.5),
        (16, 3, 2.0),
        (64, 3, 3.0),
        (105, 4, 3.0),
    ],
)
def test_traffic_is_a_rings_times_the_factor(shards: int, world_size: int, factor: float) -> None:
    assert traffic_factor(shards, world_size) == factor


@given(height=st.integers(0, 8), data=st.data())
def test_traffic_is_a_rings_where_shards_over_workers_is_a_power_of_two(
    height: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12]))
    assert traffic_factor(world_size << height, world_size) == 1.0


def test_finish_says_what_is_missing() -> None:
    def keep(left: str, right: str) -> str:
        return left + right

    function: Callable[[str, str], str] = keep
    with pytest.raises(AssertionError, match="do not cover 4 shards"):
        finish({}, function, 4)
