"""What a step allocates and sends is what was planned and predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import spec_of

from samestep.exact.tree import local_plan, shard_range, traffic_factor

Results = Callable[..., list[dict[str, Any]]]
NUM_STEPS = 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shards", [4, 6, 8, 12])
def test_the_busiest_worker_sends_what_the_traffic_factor_predicts(
    results: Results, shards: int, world_size: int
) -> None:
    spec = spec_of("Wide", shards=shards, batch_size=2 * shards)
    answers = results("engine", world_size, spec=spec, num_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        counts = [answer["counts"][step] for answer in answers]
        assert counts[0]["num_buckets"] == 2
        ring = 2 * (world_size - 1) / world_size * counts[0]["gradient_bytes"]
        busiest = max(count["sent_bytes"] for count in counts)
        assert busiest == pytest.approx(traffic_factor(shards, world_size) * ring, rel=1e-12)


@pytest.mark.parametrize(
    ("shards", "world_size", "num_buffers"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (2, 2, 1),
        (4, 2, 1),
        (4, 4, 1),
        (6, 3, 1),
        (4, 1, 2),
        (8, 1, 3),
        (8, 2, 2),
    ],
)
def test_gradient_buffers_are_as_many_as_planned_and_stay_where_they_are(
    results: Results, shards: int, world_size: int, num_buffers: int
) -> None:
    spec = spec_of("Wide", shards=shards, batch_size=2 * shards)
    answers = results("engine", world_size, spec=spec, num_steps=NUM_STEPS)
    for world_rank, answer in enumerate(answers):
        counts = answer["counts"]
        plan = local_plan(shard_range(shards, world_size, world_rank))
        assert counts[0]["num_buffers"] == plan.num_slots + 1 == num_buffers
        assert len(counts[0]["addresses"]) == num_buffers * counts[0]["num_buckets"]
        assert all(count["addresses"] == counts[0]["addresses"] for count in counts)
        assert all(address % 64 == 0 for address in counts[0]["addresses"])


def test_converted_gradients_take_a_buffer_more_since_pairs_do_not_meet_in_place(
    results: Results,
) -> None:
    spec = spec_of("LowPrecision", shards=2, reduce_dtype="float32")
    [answer] = results("engine", 1, spec=spec, num_steps=NUM_STEPS)
    assert answer["counts"][0]["num_buffers"] == 2
