"""The update: unscaling, clipping, optimizer, averages, scheduler; on every worker, no talking.

What happens on a step that is left out (no weight, an overflow under loss scaling, an incident with
policy skip, a batch that is passed over) is defined here once. The optimizer does not act; weights,
their averages and the buffers are as before the step, so that no NaN stays in BatchNorm's running
mean. The scheduler and the position go on, hooks are called (`Values.skipped`), and the scaler does
as torch's GradScaler does: it backs off where the gradient was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.state import Parts
from samestep.engine.ema import update_averages
from samestep.engine.schedule import step_schedule
from samestep.engine.shard import in_user_code
from samestep.exact.seeds import Purpose, seed_everything
from samestep.spec import JobSpec

LeavesOut = Callable[[float, bool], bool]
"""Told the gradient norm (see `Updated`) and whether the step overflows under loss scaling."""

_KEEPS: Final[LeavesOut] = lambda grad_norm, overflow: False  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What the update did.

    Attributes:
        grad_norm: global L2 norm of the unscaled gradient before clipping; NaN without one.
        learning_rates: of each parameter group, as used in this step.
        skipped: the optimizer did not act.
    """

    grad_norm: float
    learning_rates: list[float]
    skipped: bool


def make_scaler(spec: JobSpec, device: torch.device) -> torch.amp.GradScaler | None:
    """The loss scaler of `precision: fp16`."""
    if spec.precision != "fp16":
        return None
    settings = spec.scaler
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=settings.init_scale,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
    )
    # Makes its tensors now: an idle worker scales no loss, and unscaling needs them.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def apply_update(
    spec: JobSpec,
    parts: Parts,
    parameters: list[nn.Parameter],
    *,
    step: int,
    device: torch.device,
    schedule_due: bool = True,
    leaves_out: LeavesOut = _KEEPS,
) -> Updated:
    """Updates the model by the reduced gradient.

    Args:
        spec: the job.
        parts: model, optimizer, scheduler, scaler, averages.
        parameters: those that have a gradient.
        step: global step; keys the optimizer's own draws.
        device: of the parameters.
        schedule_due: the scheduler is stepped after this step, whether or not it is left out.
        leaves_out: asked before anything of the state changes; may raise.
    """
    rates = learning_rates(parts.optimizer)
    seed_everything(spec.seed, Purpose.OPTIMIZER, step, device=device)
    has_gradient, parameters = bool(parameters), _optimized(parts.optimizer, parameters)
    norm, overflow = _measure(parts, parameters)
    grad_norm = math.nan if norm is None else float(norm)
    skipped = leaves_out(grad_norm, overflow) or overflow or not has_gradient
    if norm is not None:
        if not skipped:
            _step(spec, parts, parameters, norm, step)
        if parts.scaler is not None:
            parts.scaler.update()
    if parts.ema is not None and not skipped:
        assert spec.ema.decay is not None
        update_averages(parts.ema, parts.model, spec.ema.decay)
    if parts.scheduler is not None and schedule_due:
        scheduler = parts.scheduler
        in_user_code(lambda: step_schedule(scheduler), f"the scheduler after step {step}")
    return Updated(grad_norm=grad_norm, learning_rates=rates, skipped=skipped)


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _measure(parts: Parts, parameters: list[nn.Parameter]) -> tuple[Tensor | None, bool]:
    """Norm of the gradient, unscaled from here on, and whether it overflows under loss scaling."""
    if not parameters:
        return None, False
    overflow = False
    if parts.scaler is not None:
        parts.scaler.unscale_(parts.optimizer)
        found = parts.scaler._found_inf_per_device(parts.optimizer)
        overflow = any(bool(flag) for flag in found.values())
    return global_norm([p.grad for p in parameters if p.grad is not None]), overflow


def _step(
    spec: JobSpec, parts: Parts, parameters: list[nn.Parameter], norm: Tensor, step: int
) -> None:
    if spec.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, spec.clip_norm, norm)
    optimizer, scaler = parts.optimizer, parts.scaler
    act = optimizer.step if scaler is None else partial(scaler.step, optimizer)
    in_user_code(act, f"the optimizer at step {step}")


def _optimized(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those that the optimizer updates: the others count neither for the norm nor for clipping."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if id(p) in ours]


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm per parameter, then over parameters, never per bucket; 0-dim, float32 or wider."""
    norms = torch._foreach_norm(gradients)
    has_double = any(norm.dtype == torch.float64 for norm in norms)
    dtype = torch.float64 if has_double else torch.float32
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]))
    return total
