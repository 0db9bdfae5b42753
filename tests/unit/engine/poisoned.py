"""A workload with a sample that makes trouble whenever its turn comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Conv, Rows
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from samestep import Loss, Values


class Unreadable(Dataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5:
            raise OSError("sample 5 can't be read")
        return self.rows[index]


class Poisoned(Conv):
    """Convolutions, BatchNorm and dropout.

    Args:
        poison: what the features and the target of sample 5 are multiplied with.
        bursts_at: the step whose optimizer makes a weight infinite.
        idle: that weight has no effect on anything.
        drifts: `before_step` changes a weight.
        unreadable: reading sample 5 raises.
        breaks: (step, time): this worker's `before_step` raises when it comes there so often.
        seen: a folder where each worker counts that; needed for `breaks`.
        breaking_rank: the worker that breaks; None: all of them.
    """

    def __init__(
        self,
        *,
        poison: float | None = None,
        bursts_at: int | None = None,
        idle: bool = False,
        drifts: bool = False,
        unreadable: bool = False,
        breaks: Sequence[Sequence[int]] = (),
        seen: str = "",
        breaking_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.idle = idle
        self.drifts, self.unreadable = drifts, unreadable
        self.breaks = [tuple(each) for each in breaks]
        self.seen, self.breaking_rank = Path(seen), breaking_rank
        self.poison = math.nan if poison is None else poison
        self.bursts_at = bursts_at
        self.now = 0
        self.told: list[bool] = []

    def model(self) -> nn.Module:
        model = super().model()
        if self.idle:
            model.idle = nn.Parameter(torch.zeros(2))
        return model

    def data(self) -> Dataset[Any]:
        rows = Rows(self.size, self.shape)
        rows.x[5] *= self.poison
        rows.y[5] *= self.poison
        return Unreadable(rows) if self.unreadable else rows

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step
        if self.drifts:
            with torch.no_grad():
                model[0].weight.mul_(1 + 0.001 * torch.rand(()))  # type: ignore[index,operator]
        if any(step == at for at, _ in self.breaks):
            self.count(step)

    def count(self, step: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = self.seen / f"{step}.{rank}"
        times = len(path.read_text(encoding="utf-8")) if path.exists() else 0
        path.write_text("x" * (times + 1), encoding="utf-8")
        if (step, times + 1) in self.breaks and self.breaking_rank in (None, rank):
            raise ValueError(f"broken before step {step}, time {times + 1}")

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
                weight = model.idle if self.idle else model[3].bias  # type: ignore[index]
                weight[1] = math.inf

    def on_step(self, step: int, values: Values) -> None:
        self.told.append(values.skipped)
