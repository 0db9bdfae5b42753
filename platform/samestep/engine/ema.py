"""The exponential moving average of the weights: by name, laid out as each parameter.

In float32 or wider; updated after each applied update on every worker alike, without talking.
Buffers are not averaged: an evaluation of the averages uses the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Averages = dict[str, Tensor]


def start_averages(model: nn.Module) -> Averages:
    """Averages that are equal to the weights; frozen parameters have one too."""
    return {
        name: parameter.detach().to(_wide(parameter), copy=True)
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def restart_averages(ema: Averages, model: nn.Module) -> None:
    """Makes existing averages equal to the weights again."""
    for name, parameter in model.named_parameters():
        ema[name].copy_(parameter)


@torch.no_grad()
def update_averages(ema: Averages, model: nn.Module, decay: float) -> None:
    """One step: average = decay * average + (1 - decay) * weights."""
    weights = [
        parameter.detach().to(ema[name].dtype) for name, parameter in model.named_parameters()
    ]
    torch._foreach_lerp_(list(ema.values()), weights, 1.0 - decay)


@contextmanager
def averages_in(model: nn.Module, ema: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model has its averages for weights meanwhile, and the same bits as before afterwards."""
    if ema is None:
        yield
        return
    parameters = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(ema[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
