"""Stock DDP over the same shards differs by the number of workers: the comparison can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pool import Pool, gathered, spec_of

Results = Callable[..., list[dict[str, Any]]]
NUM_STEPS = 4


def final_weights(answers: list[dict[str, Any]]) -> str:
    found = {answer["steps"][-1]["weights"] for answer in answers}
    assert len(found) == 1
    return str(found.pop())


def test_fast_reduction_gives_other_weights_for_one_two_and_three_workers(
    results: Results,
) -> None:
    def weights(reduction: str, world_size: int) -> str:
        spec = spec_of("Mlp", shards=6, batch_size=12, args={"size": 48}, reduction=reduction)
        return final_weights(results("engine", world_size, spec=spec, num_steps=NUM_STEPS))

    fast = [weights("fast", world_size) for world_size in (1, 2, 3)]
    exact = [weights("exact", world_size) for world_size in (1, 2, 3)]
    assert len(set(fast)) == 3
    assert len(set(exact)) == 1


def test_fast_reduction_trains_batch_norm_dropout_and_uneven_shards(results: Results) -> None:
    spec = spec_of("Conv", shards=5, batch_size=13, reduction="fast")
    for world_size in (1, 2, 3):
        final_weights(results("engine", world_size, spec=spec, num_steps=NUM_STEPS))


def test_who_loses_another_worker_within_backward_does_not_blame_the_workload(pool: Pool) -> None:
    spec = spec_of("slow_cases:Leaves", shards=2, reduction="fast")
    (_, first), (_, other) = gathered(pool, "engine", 2, spec=spec, num_steps=2)
    assert (first[0], other[0]) == ("PeerLostError", "UserCodeError")
    assert first[1].startswith("lost another worker: ")


def test_fast_reduction_with_a_branch_fails_as_stock_ddp_does(pool: Pool) -> None:
    spec = spec_of("Branching", shards=2, reduction="fast", faults={"hang_timeout_s": 5})
    answers = gathered(pool, "engine", 2, spec=spec, num_steps=2)
    kinds = {kind for kind, _ in answers}
    assert kinds == {"raised"}
    text = "".join(value[2] for _, value in answers)
    assert "find_unused_parameters=True" in text
