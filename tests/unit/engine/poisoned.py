"""A workload with a sample that makes trouble whenever its turn comes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from cases import Conv, Rows
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from samestep import Loss, Values


class Poisoned(Conv):
    """Convolutions, BatchNorm and dropout.

    Args:
        poison: what the features and the target of sample 5 are multiplied with.
        bursts_at: the step whose optimizer makes a weight infinite.
    """

    def __init__(
        self, *, poison: float | None = None, bursts_at: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.poison = math.nan if poison is None else poison
        self.bursts_at = bursts_at
        self.now = 0
        self.told: list[bool] = []

    def data(self) -> Dataset[Any]:
        rows = Rows(self.size, self.shape)
        rows.x[5] *= self.poison
        rows.y[5] *= self.poison
        return rows

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return F.mse_loss(model(batch[0].to(memory_format=torch.channels_last)), batch[1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        kind = AdamW if self.bursts_at is None else SGD
        optimizer = kind(model.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.burst(model))
        return optimizer

    def burst(self, model: nn.Module) -> None:
        if self.now == self.bursts_at:
            with torch.no_grad():
                model[3].bias[1] = math.inf  # type: ignore[index]

    def on_step(self, step: int, values: Values) -> None:
        self.told.append(values.skipped)
