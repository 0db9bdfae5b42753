"""What the forecast says is what the engine allocates and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tasks import prepared
from torch import nn

from samestep import parse_spec
from samestep.engine.buckets import trainable
from samestep.engine.forecast import cheap_numbers, forecast
from samestep.exact.numerics import GlobalsKept

RunTask = Callable[..., Any]


def spec_of(workload: str, **fields: Any) -> dict[str, Any]:
    return {
        "workload": f"cases:{workload}",
        "batch_size": 2 * fields["shards"],
        "max_steps": 1,
        **fields,
    }


@pytest.mark.parametrize(
    ("spec", "num_workers"),
    [
        (spec_of("Base", shards=8), 1),
        (spec_of("Base", shards=3), 1),
        (spec_of("Base", shards=4), 2),
        (spec_of("Base", shards=8), 3),
        (spec_of("Base", shards=7), 4),
        (spec_of("Wide", shards=6), 2),
        (spec_of("LowPrecision", shards=6, reduce_dtype="float32"), 3),
        (spec_of("LowPrecision", shards=4), 2),
    ],
    ids=str,
)
def test_buffers_and_bytes_of_the_engine_are_those_forecast(
    spec: dict[str, Any], num_workers: int, results: RunTask
) -> None:
    with GlobalsKept():
        parsed, workload = prepared(spec)
    found = forecast(parsed, trainable(workload.model()), num_workers)
    counted = [
        answer["counts"][0] for answer in results("engine", num_workers, spec=spec, num_steps=1)
    ]
    for worker, counts in zip(found.workers, counted, strict=True):
        assert counts["num_buffers"] == worker.num_extra_buffers + 1
        assert counts["gradient_bytes"] == found.gradient_bytes
        assert counts["sent_bytes"] == worker.sent_bytes
        assert worker.extra_buffer_bytes == worker.num_extra_buffers * found.gradient_bytes
    assert found.sent_bytes == sum(counts["sent_bytes"] for counts in counted)


def net() -> list[tuple[str, nn.Parameter]]:
    return trainable(nn.Linear(100, 100))


def job(shards: int) -> Any:
    return parse_spec({"workload": "a:A", "batch_size": 64, "shards": shards, "max_steps": 1})


def test_one_shard_or_one_aligned_pair_needs_no_extra_buffer() -> None:
    for shards, num_workers in ((4, 4), (8, 4), (2, 1), (1, 1)):
        found = forecast(job(shards), net(), num_workers)
        assert [worker.num_extra_buffers for worker in found.workers] == [0] * num_workers


def test_a_range_that_is_not_aligned_needs_more_and_sends_more() -> None:
    found = forecast(job(8), net(), 3)
    assert [worker.num_shards for worker in found.workers] == [2, 3, 3]
    assert [worker.num_extra_buffers for worker in found.workers] == [0, 1, 1]
    assert found.traffic_factor == 1.5
    assert found.is_costly
    slice_bytes = found.gradient_bytes // 3
    assert [worker.sent_bytes for worker in found.workers] == [
        2 * slice_bytes * 2,
        2 * slice_bytes * 3,
        2 * slice_bytes * 3,
    ]


def test_traffic_is_a_ring_all_reduces_where_shards_over_workers_is_a_power_of_two() -> None:
    for shards, num_workers in ((4, 2), (8, 2), (8, 4), (12, 3), (64, 16)):
        found = forecast(job(shards), net(), num_workers)
        ring = 2 * (num_workers - 1) * found.gradient_bytes
        assert found.sent_bytes == ring
        assert not found.is_costly


def test_one_worker_sends_and_stages_nothing() -> None:
    (worker,) = forecast(job(8), net(), 1).workers
    assert (worker.sent_bytes, worker.staging_bytes) == (0, 0)


def test_collectives_stage_the_own_slices_too() -> None:
    on_cpu = forecast(job(8), net(), 2)
    on_gpu = forecast(job(8), net(), 2, device_type="cuda")
    half = on_cpu.gradient_bytes // 2
    assert [worker.staging_bytes for worker in on_cpu.workers] == [half, half]
    assert [worker.staging_bytes for worker in on_gpu.workers] == [2 * half, 2 * half]


def test_the_cheap_numbers_of_workers_are_named() -> None:
    assert cheap_numbers(8, 8) == [1, 2, 4, 6, 7, 8]
    assert cheap_numbers(12, 6) == [1, 3, 6]


def test_more_workers_than_shards_can_not_be_forecast() -> None:
    with pytest.raises(ValueError, match=r"must be in 1\.\.4 \(shards\), got 5"):
        forecast(job(4), net(), 5)


def test_gradients_in_another_dtype_are_counted_in_it() -> None:
    parameters = trainable(nn.Linear(100, 100).to(torch.bfloat16))
    plain = forecast(job(4), parameters, 2)
    wide = forecast(job(4).model_copy(update={"reduce_dtype": "float32"}), parameters, 2)
    assert wide.gradient_bytes == pytest.approx(2 * plain.gradient_bytes, rel=0.05)
    # Converted gradients can't be added on top of each other: a pair needs a buffer more.
    assert [worker.num_extra_buffers for worker in plain.workers] == [0, 0]
    assert [worker.num_extra_buffers for worker in wide.workers] == [1, 1]
