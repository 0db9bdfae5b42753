from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pool import Pool, gathered, spec_of

Results = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_messages_of_any_length_reach_all_in_the_order_of_the_workers(
    results: Results, world_size: int
) -> None:
    lengths = [0, 1, 4000, *range(4070, 4100), 70_000]
    messages = ["x" * length for length in lengths]
    for heard in results("talk", world_size, messages=messages):
        for message, told in zip(messages, heard, strict=True):
            assert told == [[rank, message] for rank in range(world_size)]


def test_floats_come_out_with_the_bits_they_went_in_with(results: Results) -> None:
    values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 1 / 3]
    for heard in results("talk", 2, messages=[values]):
        for _, told in heard[0]:
            assert [value.hex() for value in told] == [value.hex() for value in values]


def test_messages_are_waited_for_as_long_as_the_job_says_not_as_long_as_the_group_had_to_form(
    results: Results,
) -> None:
    heard = results("meet_late", 2, form_s=2.0, late_s=2.5, limit_s=30.0)
    assert heard == [[[0, 1], [1.0] * 3, [1.0] * 3]] * 2
    spec = spec_of("slow_cases:Late", args={"late_s": 2.5}, shards=2)
    [steps] = results("refer", 1, spec=spec, num_steps=1)
    for worker in results("engine", 2, spec=spec, num_steps=1, form_s=2.0):
        assert worker["steps"] == steps


def test_who_waits_for_a_message_gives_up_after_the_limit(pool: Pool) -> None:
    (kind, told), _ = gathered(pool, "meet_late", 2, form_s=30.0, late_s=2.0, limit_s=0.5)
    assert (kind, told[0]) == ("raised", "PeerLostError")
    assert told[1].startswith("lost worker 1: ")
    assert "500ms" in told[1]


@pytest.mark.parametrize("case", ["Mlp", "Conv", "Branching"])
def test_collectives_give_the_bits_that_messages_between_pairs_give(
    results: Results, case: str
) -> None:
    """What NCCL does, over gloo: an all-to-all per round of subtrees, then a gather."""
    spec = spec_of(case, shards=8, batch_size=20)
    [expected] = results("refer", 1, spec=spec, num_steps=3)
    for world_size in (2, 3, 4):
        answers = results("engine", world_size, spec=spec, num_steps=3, collective=True)
        assert [answer["steps"] for answer in answers] == [expected] * world_size
        pairs = results("engine", world_size, spec=spec, num_steps=3)
        sent = [answer["counts"][0]["sent_bytes"] for answer in answers]
        assert sent == [answer["counts"][0]["sent_bytes"] for answer in pairs]
