from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.exact.seeds import (
    Purpose,
    generator,
    global_generators_kept,
    seed_everything,
    stream_key,
)

SEEDS = st.integers(0, 2**63 - 1)
INDICES = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
KEYS = st.tuples(SEEDS, st.sampled_from(list(Purpose)), INDICES)
Draws = tuple[float, float, float]


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with global_generators_kept():
        yield


def drawn() -> Draws:
    return torch.rand(1, dtype=torch.float64).item(), float(np.random.rand()), random.random()


def draws(seed: int, purpose: Purpose, *indices: int) -> Draws:
    seed_everything(seed, purpose, *indices)
    return drawn()


@given(a=KEYS, b=KEYS)
def test_streams_differ_exactly_when_their_keys_do(
    a: tuple[int, Purpose, tuple[int, ...]], b: tuple[int, Purpose, tuple[int, ...]]
) -> None:
    keys = [stream_key(seed, purpose, *indices) for seed, purpose, indices in (a, b)]
    assert (keys[0] == keys[1]) == (a == b)
    with global_generators_kept():
        first, second = (draws(seed, purpose, *indices) for seed, purpose, indices in (a, b))
    assert all((x == y) == (a == b) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("distance", [1, 2**16, 2**31, 2**32, 2**33, 2**48])
def test_seeds_steps_and_shards_far_apart_share_no_stream(distance: int) -> None:
    """torch's CPU generator uses 32 bits of a seed: packed keys would repeat at these distances."""
    base = draws(5, Purpose.FORWARD, 7, 3)
    others = [
        draws(5 + distance, Purpose.FORWARD, 7, 3),
        draws(5, Purpose.FORWARD, 7 + distance, 3),
        draws(5, Purpose.FORWARD, 7, 3 + distance),
    ]
    for other in others:
        assert not set(base) & set(other)


def test_neighbouring_steps_and_shards_draw_all_different_numbers() -> None:
    seen = [draws(0, Purpose.FORWARD, step, shard)[0] for step in range(40) for shard in range(40)]
    assert len(set(seen)) == len(seen)


def test_a_generator_of_its_own_leaves_the_global_ones_alone() -> None:
    before = torch.get_rng_state()
    first = torch.rand(4, generator=generator(1, Purpose.ORDER, 2))
    assert torch.equal(first, torch.rand(4, generator=generator(1, Purpose.ORDER, 2)))
    assert torch.equal(before, torch.get_rng_state())


def test_global_generators_are_put_back_after_an_exception_too() -> None:
    expected = draws(9, Purpose.INIT)
    seed_everything(9, Purpose.INIT)
    with pytest.raises(KeyError), global_generators_kept():
        {}[seed_everything(10, Purpose.INIT)]
    assert drawn() == expected
