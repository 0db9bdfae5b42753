"""Which samples of a step do it: each is taken alone, as a batch of one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.engine.batch import map_tensors, tensors_of
from samestep.errors import CannotReplayError, SamestepError
from samestep.exact.order import ShardPlan
from samestep.replay.bench import sample_plan
from samestep.replay.raised import Raised
from samestep.replay.taking import Taker
from samestep.replay.trace import compute, gradients

MAX_SAMPLES: Final = 256
MAX_S: Final = 60.0
"""Seconds that looking at samples may take; the rest is left out, and told so."""
STANDS_OUT: Final = 20.0
"""Robust z-score from which on a sample's loss or gradient stands out from the others."""
_MAD: Final = 1.4826


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample taken alone.

    Attributes:
        id: index into the dataset.
        shard: that held it.
        place: in the shard's batch.
        loss: NaN where it raised.
        grad_norm: of all gradients; NaN where there is none.
        raised: what it raised.
        score: by how much it stands out from the others (robust z-score of loss or gradient).
    """

    id: int
    shard: int
    place: int
    loss: float
    grad_norm: float
    raised: Raised | None = None
    score: float = 0.0

    @property
    def is_broken(self) -> bool:
        """It raised, or its loss or gradient is not finite."""
        finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return self.raised is not None or not finite


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What came of the samples of a step.

    Attributes:
        culprits: those that do it, the worst first.
        num_looked_at: samples taken alone.
        num_samples: of the step.
        notes: what could not be looked at, and why.
    """

    culprits: tuple[Sample, ...]
    num_looked_at: int
    num_samples: int
    notes: tuple[str, ...] = ()


def take_alone(taker: Taker, plans: Sequence[ShardPlan]) -> Alone:
    """Takes samples alone, up to a number and a time, from the state before their step.

    Args:
        taker: at that state.
        plans: shards, those that are suspected first.
    """
    found: list[Sample] = []
    notes: list[str] = []
    num_samples = sum(len(plan.ids) for plan in plans)
    deadline = time.monotonic() + MAX_S
    keeper = taker.replica.keeper
    for plan in plans:
        if len(found) >= MAX_SAMPLES or time.monotonic() > deadline:
            break
        take = _taking(taker, plan, notes)
        if take is None:
            continue
        keeper.start_step()
        try:
            for place in range(len(plan.ids)):
                if len(found) >= MAX_SAMPLES or time.monotonic() > deadline:
                    break
                found.append(_sample(taker, plan, place, take))
        finally:
            keeper.rewind()
    if len(found) < num_samples and not notes:
        notes.append(f"{len(found)} of {num_samples} samples were taken alone: the first ones")
    return Alone(
        culprits=tuple(_culprits(found)),
        num_looked_at=len(found),
        num_samples=num_samples,
        notes=tuple(notes),
    )


def _taking(taker: Taker, plan: ShardPlan, notes: list[str]) -> Callable[[int], Any] | None:
    """What gives a sample as a batch: reads it anew where the data is, else cuts it out."""
    if taker.has_data:
        return lambda place: taker.sample(plan, place)
    count = len(plan.ids)
    try:
        batch = taker.batch(plan)
    except CannotReplayError:
        raise
    except SamestepError as error:
        notes.append(f"the batch of shard {plan.shard} can't be made: {Raised.of(error).message}")
        return None
    if count not in {tensor.shape[0] for _, tensor in tensors_of(batch) if tensor.ndim}:
        notes.append(
            f"the batch of shard {plan.shard} has no tensor whose first dimension are its {count} "
            "samples, so they can't be told apart"
        )
        return None
    return lambda place: _cut(batch, place, count)


def _cut(batch: Any, place: int, count: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        is_by_sample = tensor.ndim > 0 and tensor.shape[0] == count
        return tensor[place : place + 1].clone() if is_by_sample else tensor

    if isinstance(batch, Mapping) and type(batch) is dict:
        return {key: _cut(value, place, count) for key, value in batch.items()}
    if type(batch) is list and len(batch) == count and not any(True for _ in tensors_of(batch)):
        return batch[place : place + 1]
    return map_tensors(batch, cut)


def _sample(taker: Taker, plan: ShardPlan, place: int, take: Callable[[int], Any]) -> Sample:
    taker.replica.keeper.start_shard()
    alone = sample_plan(plan, place)
    loss = norm = math.nan
    raised: Raised | None = None
    try:
        with _batch_norm_from_averages(taker.parts.model):
            result = compute(taker, take(place), alone)
            loss, norm = result.loss_value, 0.0
            if result.weight > 0:
                norm = _norm(gradients(taker, result, alone))
    except CannotReplayError:
        raise
    except SamestepError as error:
        raised = Raised.of(error)
    return Sample(
        id=plan.ids[place],
        shard=plan.shard,
        place=place,
        loss=loss,
        grad_norm=norm,
        raised=raised,
    )


@contextmanager
def _batch_norm_from_averages(model: nn.Module) -> Iterator[None]:
    """BatchNorm takes its running averages meanwhile, where they are any good.

    One sample has no variance, or one of its own that would hide how it differs from the others.
    """
    training = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and _is_finite(module)
    ]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _is_finite(module: _BatchNorm) -> bool:
    averages = (module.running_mean, module.running_var)
    return all(each is not None and bool(torch.isfinite(each).all()) for each in averages)


def _norm(found: Mapping[str, Tensor]) -> float:
    norms = [torch.linalg.vector_norm(g.detach().to("cpu", torch.float64)) for g in found.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _culprits(found: Sequence[Sample]) -> list[Sample]:
    """Those that are broken; where none is, those that stand out."""
    broken = [sample for sample in found if sample.is_broken]
    if broken:
        return broken
    scored = []
    for sample in found:
        scores = [
            _score(value, others)
            for value, others in (
                (sample.loss, [s.loss for s in found]),
                (sample.grad_norm, [s.grad_norm for s in found]),
            )
        ]
        if max(scores) > STANDS_OUT:
            scored.append(
                Sample(**{**vars(sample), "score": max(scores)}),
            )
    return sorted(scored, key=lambda sample: -sample.score)


def _score(value: float, values: Sequence[float]) -> float:
    median = statistics.median(values)
    spread = _MAD * statistics.median([abs(other - median) for other in values])
    unit = max(spread, 1e-3 * abs(median))
    return (value - median) / unit if unit else 0.0
