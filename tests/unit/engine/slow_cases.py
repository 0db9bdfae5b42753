"""Workloads whose state is copied so slowly that a step's forward and backward end before it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from cases import Large
from torch import Tensor, nn

from samestep import Loss
from samestep.checkpoint.image import Image

PAUSE_S = 0.05


class Slow(Large):
    """Has momentum, averages by the job, and a buffer that each forward changes behind autograd.

    Args:
        slow: copies take long, in this process from now on.
        width: of a buffer.
    """

    def __init__(self, *, slow: bool, width: int = 9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        if slow:
            _slow_down()

    def net(self) -> nn.Module:
        net = super().net()
        net.register_buffer("seen", torch.zeros(self.width))
        return net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        assert isinstance(model.seen, Tensor)
        if model.training:
            model.seen.data.add_(1.0)
        return super().loss(model, batch)


class SlowBefore(Slow):
    """As Slow, with a `before_step` that shrinks the weights."""

    def before_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def _slow_down() -> None:
    fill, pause = Image.fill, threading.Event()

    def slowly(*args: Any) -> None:
        pause.wait(PAUSE_S)
        fill(*args)

    Image.fill = slowly  # type: ignore[method-assign]
