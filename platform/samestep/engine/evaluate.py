"""Evaluation: fixed batches cut from the data, each computed by one worker, summed exactly.

Batches are never padded and no sample is taken twice; their shape does not depend on the number
of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep.engine.batch import to_device
from samestep.engine.buffers import BufferKeeper
from samestep.engine.ema import averages_in
from samestep.engine.feed import Fetcher, require_map_style
from samestep.engine.peers import Peers
from samestep.engine.shard import autocast, in_user_code, metric_sums
from samestep.errors import UserCodeError, WorkloadError
from samestep.exact.seeds import Purpose, seed_everything
from samestep.exact.sums import mean_of_sums
from samestep.exact.tree import shard_range
from samestep.spec import JobSpec
from samestep.workload import Workload


class Evaluation:
    """The evaluation of one run.

    Args:
        spec: the job.
        workload: the user's.
        dataset: the evaluation data.
        ema: live averages of the weights, which are evaluated instead of them.

    Attributes:
        dataset: the evaluation data, of `size` samples.

    Raises:
        WorkloadError: the evaluation data is unusable, or `evaluate` is missing.
    """

    def __init__(
        self,
        spec: JobSpec,
        workload: Workload,
        dataset: Dataset[Any],
        *,
        ema: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._spec = spec
        self._ema = ema
        self._workload = workload
        self.dataset = dataset
        self.size = require_map_style(dataset, "evaluation_data()")
        if self.size == 0:
            raise WorkloadError(
                "evaluation_data() returned an empty dataset: return None for no evaluation"
            )
        if type(workload).evaluate is Workload.evaluate:
            workload.evaluate(nn.Identity(), None)
        self._batch_size = spec.evaluate.batch_size or -(-spec.batch_size // spec.shards)
        self._fetcher = Fetcher(workload, dataset, spec.seed)

    def run(
        self,
        model: nn.Module,
        peers: Peers,
        *,
        step: int,
        device: torch.device,
        max_batches: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """Metrics over all evaluation samples, the same on every worker.

        The model is in eval mode meanwhile, with the averages of its weights where there are any;
        its modes, weights and buffers are as before afterwards.

        Args:
            model: to evaluate.
            peers: the other workers; every one computes its part of the batches.
            step: steps taken so far; keys random draws.
            device: of the model.
            max_batches: evaluate the first so many batches only (for a dry run).
            on_batch: told the number of each batch before it is computed here.
        """
        starts = range(0, self.size, self._batch_size)[:max_batches]
        mine = shard_range(len(starts), peers.world_size, peers.world_rank)
        modes = [(module, module.training) for module in model.modules()]
        keeper = BufferKeeper(model)
        keeper.start_step()
        model.eval()
        try:
            with torch.no_grad(), averages_in(model, self._ema):
                sums = {}
                for number in mine:
                    if on_batch is not None:
                        on_batch(number)
                    batch = self._batch(model, number, starts[number], step, device)
                    sums[str(number)] = batch
        finally:
            keeper.start_shard()
            for module, training in modes:
                module.training = training
        merged: dict[str, list[tuple[float, float]]] = {}
        for message in peers.gather(sums)():
            for metrics in message.values():
                for name, (total, count) in metrics.items():
                    merged.setdefault(name, []).append((total, count))
        return {name: mean_of_sums(terms) for name, terms in sorted(merged.items())}

    def _batch(
        self, model: nn.Module, number: int, start: int, step: int, device: torch.device
    ) -> dict[str, tuple[float, float]]:
        seed = self._spec.seed
        ids = range(start, min(start + self._batch_size, self.size))
        where = f"evaluation batch {number} after step {step}"
        fetched = self._fetcher.fetch(
            ids,
            [(Purpose.EVALUATION, 0, index) for index in ids],
            (Purpose.EVALUATION, 1, number),
            where,
        )
        if fetched.error is not None:
            raise UserCodeError(fetched.error)
        batch = to_device(fetched.batch, device)
        seed_everything(seed, Purpose.EVALUATION, 2, step, number, device=device)
        with autocast(self._spec, device):
            metrics = in_user_code(
                lambda: self._workload.evaluate(model, batch), f"evaluate of {where}"
            )
        return metric_sums(metrics, float(len(ids)), f"{type(self._workload).__name__}.evaluate")
