"""Batches for this process's shards, in order, from the main process or loader processes.

An item's random transforms are keyed by its position in the epoch, a collate by step and shard,
and both run under one intra-op thread wherever they run: so the number of loader processes does
not matter, and what was prefetched is no part of the position.

Each attempt forks its loader processes anew, also in a process that is kept over a restart. What
takes time to make is kept there and inherited: the dataset with its index, the order of the epoch,
all imports. A fork takes 10 ms of processor time (measured; the collection that went before it took
170, and is not needed). Loader processes that lived on would cost more than that: they have to read
to the end what they prefetched for shards that are now another worker's; and they hold the sockets
of the group in which they were forked, so that its other workers would not see them close.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from samestep.engine.batch import (
    Signature,
    check_batch,
    check_ranges,
    map_tensors,
    signature,
    to_device,
)
from samestep.errors import PeerLostError, UserCodeError, WorkloadError
from samestep.exact.order import Order, ShardPlan
from samestep.exact.ranges import NONE, StepRanges
from samestep.exact.seeds import Purpose, seed_everything
from samestep.workload import Workload, advice_for

PREFETCH_BATCHES = 4
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A batch, or why there is none (exceptions need not pickle)."""

    batch: Any = None
    error: str | None = None

    def pin_memory(self) -> Fetched:
        """With its tensors in page-locked memory; the DataLoader's thread calls this.

        By itself it pins tensors in lists, tuples and mappings alone, and leaves objects like this
        one as they are.
        """
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


class Fetcher(Dataset[Fetched]):
    """Makes the batch of a shard; used in the main process and in loader processes alike."""

    def __init__(self, workload: Workload, dataset: Dataset[Any], seed: int) -> None:
        self._workload = workload
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, plan: ShardPlan) -> Fetched:
        return self.fetch(
            plan.ids,
            [(Purpose.ITEM, plan.epoch, position) for position in plan.positions],
            (Purpose.COLLATE, plan.step, plan.shard),
            f"step {plan.step}, shard {plan.shard}",
        )

    def fetch(
        self,
        ids: Sequence[int],
        item_keys: Sequence[tuple[Any, ...]],
        collate_key: tuple[Any, ...],
        where: str,
    ) -> Fetched:
        """Reads samples one by one (`__getitems__` would go round their seeds), and collates."""
        threads = torch.get_num_threads()
        if threads != 1:
            torch.set_num_threads(1)
        what = ""
        try:
            samples = []
            for index, key in zip(ids, item_keys, strict=True):
                what = f"reading sample {index} ({where})"
                seed_everything(self._seed, *key)
                samples.append(self._dataset[index])
            what = f"collate ({where}, samples {list(ids)})"
            seed_everything(self._seed, *collate_key)
            return Fetched(batch=self._workload.collate(samples))
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's own code: told whole, in whichever process
            text = "".join(traceback.format_exception(error))
            kind = type(error).__name__
            return Fetched(error=f"{what} raised {kind}: {error}\n{advice_for(error)}{text}")
        finally:
            if threads != 1:
                torch.set_num_threads(threads)


class Feed:
    """Hands out batches in the order in which the step engine asks for them.

    Args:
        workload: for collate and the declared dimensions.
        dataset: the training data.
        order: a copy of the run's order, used for prefetching only.
        turns: this process's shards in the order of a step.
        seed: the job's.
        start_step: first step to feed.
        end_step: one past the last.
        loader_processes: processes that load; 0 loads in the main process.
        pin_memory: for copies to a GPU.
        left_out: steps whose batches nobody asks for.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        dataset: Dataset[Any],
        order: Order,
        turns: Sequence[int],
        seed: int,
        start_step: int,
        end_step: int,
        loader_processes: int,
        pin_memory: bool,
        left_out: StepRanges = NONE,
    ) -> None:
        self.fetcher = Fetcher(workload, dataset, seed)
        self._workload = workload
        self.expected: Signature | None = None
        self._iterator: Iterator[Fetched] | None = None
        self._pins = pin_memory and not loader_processes  # else the DataLoader's thread does it
        if loader_processes:
            loader: DataLoader[Any] = DataLoader(
                self.fetcher,
                batch_size=None,
                sampler=_Plans(order, turns, range(start_step, end_step), left_out),
                num_workers=loader_processes,
                collate_fn=_as_it_is,
                pin_memory=pin_memory,
                prefetch_factor=PREFETCH_BATCHES,
                multiprocessing_context="fork",
                worker_init_fn=_end_with_parent,
                # Keeps the loader from drawing its base seed from the global generator.
                generator=torch.Generator(),
            )
            self._iterator = _forked(loader)

    def take(self, plan: ShardPlan, device: torch.device) -> Any:
        """The batch of the next shard, on the device.

        Raises:
            UserCodeError: the dataset or collate raised.
            BadBatchError: the batch is of another kind than the first, or not as declared.
            PeerLostError: a loader process died.
        """
        if self._iterator is None:
            return self._checked(self.fetcher[plan], plan, device)
        try:
            fetched = next(self._iterator)
        except RuntimeError as error:
            raise PeerLostError(f"a loader process of this worker died: {error}") from error
        return self._checked(fetched, plan, device)

    def take_apart(self, plan: ShardPlan, device: torch.device) -> Any:
        """A batch outside of the order (the canary's), loaded in the main process."""
        return self._checked(self.fetcher[plan], plan, device)

    def close(self) -> None:
        """Ends the loader processes."""
        self._iterator = None

    def _checked(self, fetched: Fetched, plan: ShardPlan, device: torch.device) -> Any:
        if fetched.error is not None:
            raise UserCodeError(fetched.error)
        if self._pins:
            fetched = fetched.pin_memory()
        if self.expected is None:
            self.expected = signature(fetched.batch)
        where = f"step {plan.step}, shard {plan.shard}"
        check_batch(fetched.batch, self.expected, self._workload.dimensions, where)
        check_ranges(fetched.batch, self._workload.ranges, where)
        return to_device(fetched.batch, device)


def require_map_style(dataset: Any, method: str) -> int:
    """The number of samples of a map-style dataset.

    Raises:
        WorkloadError: an iterable dataset, or one without length or access by index.
    """
    if isinstance(dataset, IterableDataset):
        raise WorkloadError(
            f"{method} returned {type(dataset).__name__}, an IterableDataset: which samples a "
            "step takes could not be told from its number. Give a map-style dataset (__len__ and "
            "__getitem__), for example one that keeps byte offsets of its records"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise WorkloadError(
            f"{method} must return a map-style dataset with __len__ and __getitem__, got "
            f"{type(dataset).__name__}"
        )
    return len(dataset)


def _forked(loader: DataLoader[Fetched]) -> Iterator[Fetched]:
    """Starts the loader processes, which never collect what they inherited.

    Garbage of this process may hold a process group: its destructor, run in a child, waits for
    threads that exist in the parent only, and crashes. What is frozen no collection looks at.
    """
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()


def _end_with_parent(number: int) -> None:
    """A loader process ends as soon as the worker does, whatever it is at.

    By itself it looks after 5 s, and never from within the dataset. As long as it lives it holds
    the sockets of the worker's group, and the other workers wait for one that was killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # gone before that
            os.kill(os.getpid(), signal.SIGKILL)


class _Plans:
    """The plans of this process's shards, lazily, over steps and epochs."""

    def __init__(
        self, order: Order, turns: Sequence[int], steps: range, left_out: StepRanges
    ) -> None:
        self._order, self._turns, self._steps, self._left_out = order, turns, steps, left_out

    def __iter__(self) -> Iterator[ShardPlan]:
        for step in self._steps:
            if step in self._left_out:
                continue
            plans = self._order.shards_of(step)
            yield from (plans[shard] for shard in self._turns if plans[shard].ids)

    def __len__(self) -> int:
        return len(self._steps) * len(self._turns)


def _as_it_is(fetched: Any) -> Any:
    return fetched


TakeApart = Callable[[ShardPlan, torch.device], Any]
