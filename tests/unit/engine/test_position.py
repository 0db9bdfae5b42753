"""A run goes on from a position, not by going through what lies before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Train
from pool import spec_of

from samestep import parse_spec
from samestep.exact.order import Order


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_in_mid_epoch_reads_no_sample_of_the_steps_before(
    train: Train, tmp_path: Path, world_size: int
) -> None:
    fields = {"batch_size": 4, "shards": 2, "args": {"folder": str(tmp_path), "size": 40}}
    spec = spec_of("noting:Guarded", **fields, max_steps=9)
    (tmp_path / "forbidden").touch()
    straight = train(spec, "straight", 1)
    train({**spec, "max_steps": 6}, "stopped", 2)
    parsed = parse_spec(spec)
    order = Order(
        dataset_size=40,
        batch_size=parsed.batch_size,
        shards=parsed.shards,
        drop_last=parsed.drop_last,
        seed=parsed.seed,
    )
    first, *others = order.step_ids(0)  # the first shard is computed again: it is the canary
    before = [*others, *(ids for step in range(1, 6) for ids in order.step_ids(step))]
    forbidden = [str(index) for ids in before for index in ids if index not in first]
    assert len(forbidden) == 22
    (tmp_path / "forbidden").write_text(" ".join(forbidden))
    assert train(spec, "stopped", world_size).digest == straight.digest
