"""What the reduction will take for a number of workers: buffers, and bytes on the network.

Worked out from shapes alone; a test holds it equal to what the engine allocates and counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samestep.engine.buckets import BucketLayout, NamedParameters, layout_buckets
from samestep.exact.tree import local_plan, shard_range, subtrees, traffic_factor
from samestep.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class WorkerForecast:
    """What one worker holds and sends.

    Attributes:
        num_shards: shards that it computes.
        num_extra_buffers: gradient-sized buffers beside the one that gradients lie in.
        extra_buffer_bytes: all of them together.
        staging_bytes: room for what other workers send (one worker: none).
        sent_bytes: gradient bytes that it sends in a step, as the engine counts them.
    """

    num_shards: int
    num_extra_buffers: int
    extra_buffer_bytes: int
    staging_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a number of workers takes.

    Attributes:
        num_workers: workers of the group.
        gradient_bytes: the buckets that gradients lie in, padding included, on every worker.
        traffic_factor: what the busiest worker sends over what it would in a ring all-reduce.
        workers: one per world rank.
    """

    num_workers: int
    gradient_bytes: int
    traffic_factor: float
    workers: tuple[WorkerForecast, ...]

    @property
    def is_costly(self) -> bool:
        """More goes over the network than in a ring all-reduce."""
        return self.traffic_factor > 1

    @property
    def sent_bytes(self) -> int:
        """Gradient bytes on the network in a step, over all workers."""
        return sum(worker.sent_bytes for worker in self.workers)


def forecast(
    spec: JobSpec, parameters: NamedParameters, num_workers: int, *, device_type: str = "cpu"
) -> Forecast:
    """Forecasts the exact reduction in mode ddp (one worker: in any mode on one device).

    Args:
        spec: the job; its shards and `reduce_dtype` count.
        parameters: the trainable parameters, in order of registration, tied ones once.
        num_workers: workers of the group, at most `spec.shards`.
        device_type: "cpu" exchanges between pairs, "cuda" by collectives (which stage their
            own slices too).

    Raises:
        NotExactError: a parameter that is not dense.
        ValueError: a number of workers that the job can't have.
    """
    if not 1 <= num_workers <= spec.shards:
        raise ValueError(f"num_workers must be in 1..{spec.shards} (shards), got {num_workers}")
    reduce_dtype = torch.float32 if spec.reduce_dtype else None
    converts = reduce_dtype is not None and any(p.dtype != reduce_dtype for _, p in parameters)
    layouts = layout_buckets(parameters, world_size=num_workers, reduce_dtype=reduce_dtype)
    whole_bytes = sum(map(_layout_bytes, layouts))
    ranges = [shard_range(spec.shards, num_workers, rank) for rank in range(num_workers)]
    num_sums = [len(subtrees(leaves)) for leaves in ranges]
    slice_bytes = whole_bytes // num_workers  # every bucket is padded to equal slices
    workers = []
    for rank, leaves in enumerate(ranges):
        num_slots = local_plan(leaves, pairs_in_place=not converts).num_slots
        num_staged = sum(num_sums) - (num_sums[rank] if device_type == "cpu" else 0)
        workers.append(
            WorkerForecast(
                num_shards=len(leaves),
                num_extra_buffers=num_slots,
                extra_buffer_bytes=num_slots * whole_bytes,
                staging_bytes=num_staged * slice_bytes if num_workers > 1 else 0,
                # W - 1 slices of each subtree sum, and the finished slice to W - 1 others.
                sent_bytes=(num_workers - 1) * slice_bytes * (num_sums[rank] + 1),
            )
        )
    return Forecast(
        num_workers=num_workers,
        gradient_bytes=whole_bytes,
        traffic_factor=traffic_factor(spec.shards, num_workers),
        workers=tuple(workers),
    )


def cheap_numbers(shards: int, most: int) -> list[int]:
    """Numbers of workers, up to `most`, that send no more than a ring all-reduce would."""
    return [n for n in range(1, min(shards, most) + 1) if traffic_factor(shards, n) <= 1]


def _layout_bytes(layout: BucketLayout) -> int:
    return layout.numel * layout.dtype.itemsize
