"""Workloads whose state is copied so slowly that a step's forward and backward end before it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Large
from torch import Tensor, nn

from samestep import Loss
from samestep.checkpoint.image import Image

PAUSE_S = 0.05
NUM_SLOW = 12
"""Copies that are slow: those of the first two or three saves of a worker."""
under_way = threading.Event()


class Slow(Large):
    """Has a buffer that each forward changes behind autograd.

    Args:
        slow: the rank of the worker whose first copies take long; None: none is.
        width: of the buffer.
        overlaps: a file that is made when a loss is computed during such a copy.
    """

    def __init__(
        self, *, slow: int | None, width: int = 9, overlaps: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.width, self.overlaps = width, overlaps
        rank = dist.get_rank() if dist.is_initialized() else 0
        if slow == rank:
            _slow_down()

    def net(self) -> nn.Module:
        net = super().net()
        net.register_buffer("seen", torch.zeros(self.width))
        return net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        assert isinstance(model.seen, Tensor)
        if model.training:
            model.seen.data.add_(1.0)
            if self.overlaps is not None and under_way.is_set():
                Path(self.overlaps).touch()
        return super().loss(model, batch)


class SlowBefore(Slow):
    """As Slow, with a `before_step` that shrinks the weights."""

    def before_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def _slow_down() -> None:
    fill, pause, left = Image.fill, threading.Event(), iter(range(NUM_SLOW))

    def slowly(*args: Any) -> None:
        if next(left, None) is None:
            Image.fill = fill  # type: ignore[method-assign]
        else:
            under_way.set()
            pause.wait(PAUSE_S)
            under_way.clear()
        fill(*args)

    Image.fill = slowly  # type: ignore[method-assign]
