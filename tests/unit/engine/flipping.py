"""A workload that computes wrongly by one bit, as a machine that is broken does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Conv
from torch import Tensor, nn

from samestep import Loss


class Flipping(Conv):
    """Convolutions, BatchNorm and dropout; one worker's gradients are one bit off at a step.

    Args:
        rank: that worker.
        at: that step.
        marker: a file; while it is missing the fault strikes, and makes it. None: always.
    """

    def __init__(
        self, *, rank: int = -1, at: int = -1, marker: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.rank, self.at = rank, at
        self.marker = None if marker is None else Path(marker)
        self.now = 0

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        out = model(batch[0].to(memory_format=torch.channels_last))
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == self.rank and self.now == self.at and self.strikes():
            out.register_hook(flipped)
        return F.mse_loss(out, batch[1])

    def strikes(self) -> bool:
        if self.marker is None:
            return True
        there = self.marker.exists()
        self.marker.touch()
        return not there


def flipped(gradient: Tensor) -> Tensor:
    wrong = gradient.clone()
    wrong.view(torch.int32).flatten()[0] ^= 1
    return wrong
