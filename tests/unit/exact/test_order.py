from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.errors import WorkloadError
from samestep.exact.order import EpochOrder, Order, cut


def make(dataset_size: int, batch_size: int, shards: int, **fields: Any) -> Order:
    settings = {"drop_last": False, "seed": 0, **fields}
    return Order(dataset_size=dataset_size, batch_size=batch_size, shards=shards, **settings)


@given(num_samples=st.integers(0, 500), num_parts=st.integers(1, 64))
def test_parts_are_those_of_array_split_and_only_the_last_are_empty(
    num_samples: int, num_parts: int
) -> None:
    parts = cut(num_samples, num_parts)
    expected = np.array_split(np.arange(num_samples), num_parts)
    assert [list(part) for part in parts] == [list(part) for part in expected]
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)


@given(
    dataset_size=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    shards=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_epoch_takes_each_sample_once_in_another_order(
    dataset_size: int, batch_size: int, shards: int, seed: int
) -> None:
    order = make(dataset_size, batch_size, shards, seed=seed)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        plans = [plan for step in steps for plan in order.shards_of(step)]
        assert {plan.epoch for plan in plans} == {epoch}
        ids = [index for plan in plans for index in plan.ids]
        assert sorted(ids) == list(range(dataset_size))
        assert [p for plan in plans for p in plan.positions] == list(range(dataset_size))
        assert all(len(plan.ids) in order.shard_sizes() for plan in plans if plan.ids)
        epochs.append(tuple(ids))
    if dataset_size > 20:
        assert len(set(epochs)) == 3


@given(steps=st.lists(st.integers(0, 200), min_size=1, max_size=10), drop_last=st.booleans())
def test_a_step_is_the_same_whatever_was_asked_for_before(
    steps: list[int], drop_last: bool
) -> None:
    used = make(17, 5, 3, drop_last=drop_last)
    for step in steps:
        assert used.shards_of(step) == make(17, 5, 3, drop_last=drop_last).shards_of(step)


def test_dropping_the_last_batch_leaves_whole_ones() -> None:
    order = make(17, 5, 3, drop_last=True)
    assert order.steps_per_epoch == 3
    assert [len(ids) for step in range(6) for ids in order.step_ids(step)] == [2, 2, 1] * 6


@pytest.mark.parametrize("seed", [1, 1 + 2**32])
def test_seeds_that_agree_in_their_low_bits_give_other_orders(seed: int) -> None:
    others = {0, 1, 2, 1 + 2**32} - {seed}
    mine = make(50, 50, 1, seed=seed).step_ids(0)
    assert all(make(50, 50, 1, seed=other).step_ids(0) != mine for other in others)


def test_a_workloads_own_order_may_repeat_samples() -> None:
    def twice(epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 3, (10,), generator=generator)

    order = make(3, 4, 2, epoch_order=twice)
    assert order.epoch_size == 10
    assert order.steps_per_epoch == 3
    assert order.step_ids(2) == make(3, 4, 2, epoch_order=twice).step_ids(2)
    assert order.step_ids(0) != order.step_ids(3)


def test_an_order_that_draws_from_the_global_generators_is_the_same_everywhere() -> None:
    def draws(epoch: int, _: torch.Generator) -> list[int]:
        return [*torch.randperm(20).tolist(), *np.random.permutation(20).tolist()]

    before = torch.get_rng_state()
    first = make(20, 40, 1, epoch_order=draws).step_ids(5)
    torch.rand(3)
    np.random.rand(3)
    assert make(20, 40, 1, epoch_order=draws).step_ids(5) == first
    torch.set_rng_state(before)
    make(20, 40, 1, epoch_order=draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_order_of_none_is_the_ordinary_one_even_if_numbers_were_drawn() -> None:
    def declines(epoch: int, generator: torch.Generator) -> None:
        torch.rand(epoch + 1, generator=generator)

    assert make(9, 9, 1, epoch_order=declines).step_ids(0) == make(9, 9, 1).step_ids(0)


BAD: list[tuple[EpochOrder, str]] = [
    (lambda _, __: [0, 5], r"order\(0\) holds the index 5; allowed are 0 to 4"),
    (lambda _, __: [-1], r"holds the index -1"),
    (lambda _, __: [[0, 1]], r"flat sequence of integers, got shape \(1, 2\)"),
    (lambda _, __: [0.0, 1.0], r"flat sequence of integers, got shape \(2,\) of float64"),
    (lambda _, __: [True, False], r"flat sequence of integers.*bool"),
    (lambda _, __: [], r"5 samples, 0 in an epoch, batch_size 4, drop_last False"),
]


@pytest.mark.parametrize(("epoch_order", "message"), BAD)
def test_an_order_that_cannot_be_used_is_refused(epoch_order: EpochOrder, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make(5, 4, 2, epoch_order=epoch_order)


def test_an_order_of_another_length_in_a_later_epoch_is_refused() -> None:
    def shrinks(epoch: int, _: torch.Generator) -> Sequence[int]:
        return range(5 - epoch)

    order = make(5, 5, 2, epoch_order=shrinks)
    with pytest.raises(WorkloadError, match=r"order\(1\) has 4 indices, order\(0\) had 5"):
        order.shards_of(1)


@pytest.mark.parametrize(
    ("dataset_size", "drop_last", "advice"), [(0, False, ""), (3, True, "; set drop_last: false")]
)
def test_data_that_gives_no_step_is_refused_with_the_counts(
    dataset_size: int, drop_last: bool, advice: str
) -> None:
    with pytest.raises(WorkloadError) as caught:
        make(dataset_size, 4, 2, drop_last=drop_last)
    text = str(caught.value)
    assert f"{dataset_size} samples, {dataset_size} in an epoch, batch_size 4" in text
    assert advice in text
