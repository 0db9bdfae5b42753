"""What is compared with: a training loop with stock DistributedDataParallel, as one writes it.

Nothing of samestep is used in its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class PlainDdp:
    """The state of a plain script.

    Args:
        model: wrapped here.
        loss: from model and batch.
        optimizer: over the model's parameters.
        scheduler: stepped once per step.
        clip_norm: as `clip_grad_norm_` takes it; None: no clipping.
        set_to_none: how gradients are cleared.
        ddp_options: of `DistributedDataParallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        clip_norm: float | None,
        set_to_none: bool = True,
        **ddp_options: Any,
    ) -> None:
        self.model = model
        self.ddp = DistributedDataParallel(model, **ddp_options)
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.set_to_none = set_to_none

    def step(self, batches: Sequence[Any]) -> None:
        """One step over this worker's micro-batches, accumulated under `no_sync` but the last."""
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else self.ddp.no_sync():
                loss = self.loss(self.ddp, batch) / len(batches)
                loss.backward()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
