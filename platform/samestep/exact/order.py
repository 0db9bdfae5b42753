"""Which samples a step takes, and which shard takes which: a function of the global step alone.

The position of a run is its step; nothing is counted locally, so a resume reads nothing of what
came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from samestep.errors import WorkloadError
from samestep.exact.seeds import (
    Purpose,
    generator,
    global_generators_kept,
    seed_everything,
)

EpochOrder = Callable[[int, torch.Generator], Sequence[int] | Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The samples of one shard of one step.

    Attributes:
        positions: places in the epoch's order; they key the random transforms, since an order
            with replacement may take a sample twice.
        ids: indices into the dataset, one per position.
    """

    step: int
    epoch: int
    shard: int
    positions: range
    ids: tuple[int, ...]


def cut(num_samples: int, num_parts: int) -> list[range]:
    """Near-equal contiguous parts; the first ones get one more (as numpy.array_split).

    A short batch so leaves only the last parts empty.
    """
    base, extra = divmod(num_samples, num_parts)
    bounds = [part * base + min(part, extra) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


class Order:
    """The order of a whole run; holds one epoch's permutation at a time.

    Args:
        dataset_size: number of samples in the training data.
        batch_size: samples per step over all workers.
        shards: parts that a step is cut into.
        drop_last: leave out the short last batch of each epoch.
        seed: the job's seed.
        epoch_order: a workload's own order; None or a result of None: a random permutation.

    Raises:
        WorkloadError: an epoch would have no step, or the workload's order is not usable.
    """

    def __init__(
        self,
        *,
        dataset_size: int,
        batch_size: int,
        shards: int,
        drop_last: bool,
        seed: int,
        epoch_order: EpochOrder | None = None,
    ) -> None:
        self.dataset_size = dataset_size
        self.batch_size = batch_size
        self.shards = shards
        self._seed = seed
        self._epoch_order = epoch_order
        self._epoch = -1
        self._indices: np.ndarray = np.empty(0, dtype=np.int64)
        self.epoch_size = dataset_size
        if dataset_size > 0:
            self.epoch_size = len(self._load(0))
        full, rest = divmod(self.epoch_size, batch_size)
        self.steps_per_epoch = full + (1 if rest and not drop_last else 0)
        if self.steps_per_epoch == 0:
            raise WorkloadError(
                f"the data gives no step: {dataset_size} samples, {self.epoch_size} in an epoch, "
                f"batch_size {batch_size}, drop_last {drop_last}"
                + ("; set drop_last: false or lower batch_size" if self.epoch_size else "")
            )

    def epoch_of(self, step: int) -> int:
        """The epoch that a global step belongs to."""
        return step // self.steps_per_epoch

    def shards_of(self, step: int) -> list[ShardPlan]:
        """The shards of a step in order; the last ones may be empty."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        indices = self._load(epoch)
        start = step_in_epoch * self.batch_size
        size = min(self.batch_size, self.epoch_size - start)
        plans = []
        for shard, part in enumerate(cut(size, self.shards)):
            positions = range(start + part.start, start + part.stop)
            ids = tuple(indices[positions.start : positions.stop].tolist())
            plans.append(
                ShardPlan(step=step, epoch=epoch, shard=shard, positions=positions, ids=ids)
            )
        return plans

    def step_ids(self, step: int) -> list[list[int]]:
        """Sample ids of a step, by shard."""
        return [list(plan.ids) for plan in self.shards_of(step)]

    def shard_sizes(self) -> set[int]:
        """The sizes that shards have in the course of an epoch, empty ones left out."""
        sizes: set[int] = set()
        for step in {0, self.steps_per_epoch - 1}:
            start = step * self.batch_size
            size = min(self.batch_size, self.epoch_size - start)
            sizes |= {len(part) for part in cut(size, self.shards)}
        return sizes - {0}

    def _load(self, epoch: int) -> np.ndarray:
        if epoch == self._epoch:
            return self._indices
        stream = generator(self._seed, Purpose.ORDER, epoch)
        own = None
        if self._epoch_order is not None:
            # It should draw from its stream, but may use the global generators.
            with global_generators_kept():
                seed_everything(self._seed, Purpose.ORDER, epoch)
                own = self._epoch_order(epoch, stream)
        if own is None:
            # A stream of its own again: the workload may have drawn from it before it declined.
            stream = generator(self._seed, Purpose.ORDER, epoch)
            indices = torch.randperm(self.dataset_size, generator=stream).numpy()
        else:
            indices = self._checked(epoch, own)
        self._epoch, self._indices = epoch, indices
        return indices

    def _checked(self, epoch: int, own: Sequence[int] | Tensor) -> np.ndarray:
        indices = np.asarray(own)
        if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
            raise WorkloadError(
                f"order({epoch}) must give a flat sequence of integers, got shape "
                f"{indices.shape} of {indices.dtype}"
            )
        indices = indices.astype(np.int64)
        bad = indices[(indices < 0) | (indices >= self.dataset_size)]
        if bad.size:
            raise WorkloadError(
                f"order({epoch}) holds the index {int(bad[0])}; allowed are 0 to "
                f"{self.dataset_size - 1}"
            )
        if self._epoch >= 0 and indices.size != self.epoch_size:
            raise WorkloadError(
                f"order({epoch}) has {indices.size} indices, order(0) had {self.epoch_size}: "
                "there must be as many in every epoch, so that the position of a step is known "
                "without going through the epochs before it"
            )
        return indices
