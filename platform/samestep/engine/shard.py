"""One shard: the workload's forward and loss, under its own random streams, and what came out."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.errors import NotExactError, SamestepError, UserCodeError, WorkloadError
from samestep.exact.seeds import Purpose, seed_everything
from samestep.exact.sums import exact_sum
from samestep.spec import JobSpec
from samestep.workload import Loss, Workload, advice_for

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """What a shard's forward gave.

    Attributes:
        loss: 0-dim tensor attached to the graph.
        loss_value: the same as float64.
        weight: its weight in the step; 0: the shard is absent.
        own_weight: the workload gave the weight, it is not the number of samples.
        metrics: (total, count) in float64 by name.
    """

    loss: Tensor
    loss_value: float
    weight: float
    own_weight: bool
    metrics: dict[str, tuple[float, float]]


def autocast(spec: JobSpec, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of one shard; a longer one would serve stale cached casts."""
    if spec.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPE[spec.precision])


def forward_shard(
    spec: JobSpec,
    workload: Workload,
    loss_of: Callable[[Any], Tensor | Loss],
    batch: Any,
    *,
    step: int,
    shard: int,
    num_samples: int,
    device: torch.device,
) -> ShardResult:
    """Runs the workload's loss on one shard.

    Args:
        spec: the job.
        workload: for messages.
        loss_of: batch to loss; the workload's method with its model bound.
        batch: the shard's batch on `device`.
        step: global step, from 0.
        shard: index of the shard; with the step it keys the random stream.
        num_samples: the shard's weight where the workload gives none.
        device: where to compute.

    Raises:
        WorkloadError: what came back is no usable loss.
        NotExactError: an operation without a deterministic kernel.
        UserCodeError: the workload raised.
    """
    where = f"step {step}, shard {shard}"
    seed_everything(spec.seed, Purpose.FORWARD, step, shard, device=device)
    with autocast(spec, device):
        made = in_user_code(lambda: loss_of(batch), f"loss of {where}")
    if isinstance(made, Loss):
        value, metrics, weight = made.value, made.metrics, made.weight
    else:
        value, metrics, weight = made, {}, None
    name = type(workload).__name__
    if not isinstance(value, Tensor):
        raise WorkloadError(
            f"{name}.loss must return a scalar tensor or samestep.Loss, got "
            f"{type(value).__name__} ({where})"
        )
    if value.ndim != 0 or not value.is_floating_point():
        raise WorkloadError(
            f"{name}.loss must return a scalar (0 dimensions) of a floating dtype, got shape "
            f"{tuple(value.shape)} of {value.dtype} ({where}); take the mean over the samples"
        )
    if not value.requires_grad:
        raise WorkloadError(
            f"{name}.loss returned a scalar that is not attached to the graph ({where}): it was "
            "detached, computed under no_grad, or no parameter that requires a gradient took "
            "part"
        )
    try:
        number = float(num_samples) if weight is None else float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"{name}.loss returned the weight {weight!r} ({where}); it must be one number"
        ) from error
    if not (number >= 0 and math.isfinite(number)):
        raise WorkloadError(f"{name}.loss returned the weight {number} ({where}); it must be >= 0")
    return ShardResult(
        loss=value,
        loss_value=float(value.detach()),
        weight=number,
        own_weight=weight is not None,
        metrics=metric_sums(metrics, number, f"{name}.loss, {where}"),
    )


def metric_sums(
    metrics: Mapping[str, Tensor | float], weight: float, where: str
) -> dict[str, tuple[float, float]]:
    """Each metric as (total, count) in float64.

    A 1-dim tensor holds one value per sample: its exact sum and length. A number is a mean of
    the given weight.

    Raises:
        WorkloadError: a metric that is neither.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise WorkloadError(
            f"{where}: metrics must be a dict from names to numbers or 1-dim tensors, got "
            f"{metrics!r}"[:400]
        )
    sums = {}
    value: Any
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.ndim == 1 and not value.is_complex():
            values = value.detach().to("cpu", torch.float64).tolist()
            sums[name] = (exact_sum(values), float(len(values)))
        elif isinstance(value, Real) or (
            isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
        ):
            sums[name] = (float(value) * weight, weight)
        else:
            is_tensor = isinstance(value, Tensor)
            shown = f"shape {tuple(value.shape)} of {value.dtype}" if is_tensor else repr(value)
            raise WorkloadError(
                f"{where}: metric {name!r} must be a number or a 1-dim tensor with one value per "
                f"sample, got {shown}"
            )
    return sums


def in_user_code(function: Callable[[], T], what: str) -> T:
    """Runs code of the workload; its exception becomes a UserCodeError with its traceback."""
    try:
        return function()
    except SamestepError:
        raise
    except (Exception, SystemExit) as error:
        raise told(error, what) from error


def told(error: BaseException, what: str) -> SamestepError:
    """The samestep error for an exception of the workload."""
    text = "".join(traceback.format_exception(error))
    if "does not have a deterministic implementation" in str(error):
        return NotExactError(
            f"{what} uses an operation without a deterministic kernel: {error}\nUse another "
            f"operation, or reduction: fast where nothing is promised about bits.\n{text}"
        )
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return NotExactError(
            f"{what} met more shapes than torch.compile compiles a function for, and what is not "
            "compiled gives other bits: pad batches to a few shapes, or raise the limit with "
            f"model.compile(dynamic=False, recompile_limit=N)\n{text}"
        )
    kind = type(error).__name__
    return UserCodeError(f"{what} raised {kind}: {error}\n{advice_for(error)}{text}")


def refuse_inexact(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses, before step 0, what can be seen to break the contract.

    Raises:
        NotExactError: says what it is and what to use instead.
    """
    import inspect

    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise NotExactError(
                f"module {name} is SyncBatchNorm, whose statistics depend on the number of "
                "workers: use BatchNorm (its batch is the shard), GroupNorm or LayerNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise NotExactError(f"module {name} makes sparse gradients: build it with sparse=False")
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotExactError(
                f"parameter {name} has a post-accumulate-grad hook: an optimizer step inside "
                "backward would act on a gradient that is not reduced yet; step in the "
                "workload's optimizer instead"
            )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise NotExactError(
            f"{type(optimizer).__name__} needs a closure that evaluates the loss again; use an "
            "optimizer that steps from one gradient (SGD, Adam, AdamW, ...)"
        )
