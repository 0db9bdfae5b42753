"""A workload that breaks once at a place of choice: what do the others hold then?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Conv, Rows
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from samestep import Loss, Schedule, Values


class Breaking(Conv):
    """Convolutions, BatchNorm and dropout; a schedule that hangs on the evaluation.

    Args:
        where: before_step, loss, backward, optimizer, on_step, evaluate or on_epoch.
        at: the step (of evaluate and on_epoch: any after it).
        rank: the worker that breaks; None: all of them.
        marker: a file; while it is missing, the fault strikes and makes it.
    """

    def __init__(
        self, *, where: str, at: int, marker: str, rank: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.where, self.at, self.rank, self.marker = where, at, rank, Path(marker)
        self.now = 0

    def strike(self, where: str) -> None:
        mine = self.rank is None or (dist.is_initialized() and dist.get_rank() == self.rank)
        path = self.marker.with_suffix(f".{dist.get_rank() if dist.is_initialized() else 0}")
        if where == self.where and self.now >= self.at and mine and not path.exists():
            path.touch()
            raise ValueError(f"broken once in {where}")

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step
        self.strike("before_step")
        with torch.no_grad():  # part of the step: twice would show
            model[0].weight.mul_(1 + 0.001 * torch.rand(()))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        x = batch[0].to(memory_format=torch.channels_last)
        out = model(x)
        self.strike("loss")
        if self.where == "backward":
            out.register_hook(lambda gradient: self.strike("backward"))
        return F.mse_loss(out, batch[1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = AdamW(model.parameters(), lr=0.02)
        optimizer.register_step_post_hook(lambda *_: self.strike("optimizer"))
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | Schedule:
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return Schedule(plateau, every="evaluation", metric="error")

    def on_step(self, step: int, values: Values) -> None:
        self.strike("on_step")

    def on_epoch(self, epoch: int, values: Values) -> None:
        self.strike("on_epoch")

    def evaluation_data(self) -> Dataset[Any]:
        return Rows(9, self.shape)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.strike("evaluate")
        return {"error": (model(batch[0]) - batch[1]).abs().flatten()}
