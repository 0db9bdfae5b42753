"""Samples for people to look at: as the workload shows them, and in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from samestep.engine.batch import tensors_of
from samestep.errors import CannotReplayError, SamestepError
from samestep.exact.order import ShardPlan
from samestep.replay.alone import Sample
from samestep.replay.taking import Taker
from samestep.replay.trace import Stats

MAX_SIDE: Final = 64
"""Pixels of a picture's longer side; a larger one is thinned out."""
MAX_CHARACTERS: Final = 2000
MAX_VALUES: Final = 12
"""Values of a tensor that are shown one by one."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A sample, prepared for a page.

    Attributes:
        sample: which one, and what it did.
        text: what the workload's `show` says; empty where it says nothing.
        picture: what it shows: rows of values in 0..1, None for one that is not finite.
        numbers: its tensors by path, and the first values of each.
    """

    sample: Sample
    text: str
    picture: tuple[tuple[float | None, ...], ...]
    numbers: tuple[tuple[str, Stats, tuple[float, ...]], ...]


def show_sample(taker: Taker, plan: ShardPlan, sample: Sample) -> Shown:
    """Prepares a sample; what can't be had of it is left out."""
    text = ""
    picture: tuple[tuple[float | None, ...], ...] = ()
    numbers: list[tuple[str, Stats, tuple[float, ...]]] = []
    try:
        batch = taker.batch(plan)
        text, picture = _show(taker, batch, sample.place)
        numbers = list(_numbers(batch, sample.place, len(plan.ids)))
    except CannotReplayError as error:
        text = str(error)
    except SamestepError as error:  # its batch can't be made: that is the incident
        text = str(error).splitlines()[0]
    return Shown(sample=sample, text=text, picture=picture, numbers=tuple(numbers))


def _show(taker: Taker, batch: Any, place: int) -> tuple[str, tuple[tuple[float | None, ...], ...]]:
    try:
        found = taker.workload.show(batch, place)
    except Exception as error:  # the workload's own code, for a picture only: worth no replay
        return f"show() raised {type(error).__name__}: {error}", ()
    if isinstance(found, Tensor) and found.ndim == 2 and not found.is_complex():
        return "", _picture(found)
    if found is None:
        return "", ()
    if isinstance(found, str):
        return found[:MAX_CHARACTERS], ()
    return f"show() gave a {type(found).__name__}, not a text or a 2-dim tensor", ()


def _picture(tensor: Tensor) -> tuple[tuple[float | None, ...], ...]:
    every = max(1, -(-max(tensor.shape) // MAX_SIDE))
    values = tensor.detach().to("cpu", torch.float64)[::every, ::every]
    finite = values[torch.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    scaled = (values - low) / ((high - low) or 1.0)
    return tuple(
        tuple(value if value == value and abs(value) <= 1 else None for value in row)
        for row in scaled.tolist()
    )


def _numbers(batch: Any, place: int, count: int) -> list[tuple[str, Stats, tuple[float, ...]]]:
    found = []
    for path, tensor in tensors_of(batch):
        if not tensor.ndim or tensor.shape[0] != count or tensor.is_complex():
            continue
        own = tensor[place]
        values = own.detach().reshape(-1)[:MAX_VALUES].to("cpu", torch.float64).tolist()
        found.append((path or "the batch", Stats.of(own), tuple(values)))
    return found
