"""The update: unscaling, clipping, optimizer, averages, scheduler; on every worker, no talking.

What happens on a step that is left out (no weight, or an overflow under loss scaling) is defined
here once: the optimizer does not act and the averages of the weights stay, the scheduler and the
position go on, and the scaler does as torch's GradScaler does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.state import Parts
from samestep.engine.ema import update_averages
from samestep.engine.schedule import step_schedule
from samestep.engine.shard import in_user_code
from samestep.exact.seeds import Purpose, seed_everything
from samestep.spec import JobSpec


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
) -> Updated:
    """Updates the model by the reduced gradient.

    Args:
        spec: the job.
        parts: model, optimizer, scheduler, scaler, averages.
        parameters: those that have a gradient.
        step: global step; keys the optimizer's own draws.
        device: of the parameters.
        schedule_due: the scheduler is stepped after this step, whether or not it is left out.
    """
    learning_rates = [float(group["lr"]) for group in parts.optimizer.param_groups if "lr" in group]
    grad_norm, skipped = math.nan, not parameters
    seed_everything(spec.seed, Purpose.OPTIMIZER, step, device=device)
    parameters = _optimized(parts.optimizer, parameters)
    if parameters:
        scaler = parts.scaler
        if scaler is not None:
            scaler.unscale_(parts.optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = global_norm(gradients)
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, spec.clip_norm, norm)
        if scaler is None:
            in_user_code(parts.optimizer.step, f"the optimizer at step {step}")
        else:
            found = scaler._found_inf_per_device(parts.optimizer)
            skipped = any(bool(flag) for flag in found.values())
            in_user_code(lambda: scaler.step(parts.optimizer), f"the optimizer at step {step}")
            scaler.update()
        grad_norm = float(norm)
    if parts.ema is not None and not skipped:
        assert spec.ema.decay is not None
        update_averages(parts.ema, parts.model, spec.ema.decay)
    if parts.scheduler is not None and schedule_due:
        scheduler = parts.scheduler
        in_user_code(lambda: step_schedule(scheduler), f"the scheduler after step {step}")
    return Updated(grad_norm=grad_norm, learning_rates=learning_rates, skipped=skipped)


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
