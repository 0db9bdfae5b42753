"""What a dry step found, as plain data: the command line shows it, scripts read it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from samestep.engine.batch import tensors_of
from samestep.engine.forecast import Forecast
from samestep.engine.setup import Built
from samestep.errors import ExitStatus
from samestep.exact.order import cut
from samestep.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor: its path or name, shape, dtype (as torch spells it), device and size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """What collate made of a shard's samples: the batch's own type, and its tensors."""

    type: str
    num_samples: int
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, kw_only=True)
class LossInfo:
    """What the loss method returned for shard 0 of step 0.

    Attributes:
        tensor: the loss.
        value: its value, before the update.
        weight: the shard's weight.
        own_weight: the workload gave the weight; else it is the number of samples.
        nominal_weight: weight of a full shard, by which leaves are scaled.
        metrics: means over the shard by name.
        grad_norm: global norm of the gradient before clipping; None without a gradient.
        learning_rates: of each parameter group at step 0.
    """

    tensor: TensorInfo
    value: float
    weight: float
    own_weight: bool
    nominal_weight: float
    metrics: dict[str, float]
    grad_norm: float | None
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ParametersInfo:
    """The model's parameters by class; a tied one counts once, under its first name.

    Attributes:
        trainable: require a gradient before step 0.
        frozen: do not.
        tied: names of one and the same parameter, for each that has several.
        unused: trainable, without a gradient from shard 0 of step 0; None when not computed.
        not_optimized: trainable, but in no group of the optimizer.
    """

    trainable: tuple[TensorInfo, ...]
    frozen: tuple[TensorInfo, ...]
    tied: tuple[tuple[str, ...], ...]
    unused: tuple[str, ...] | None
    not_optimized: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Bytes of state on each worker; activations and the reduction's extra buffers come on top.

    Attributes:
        model_bytes: parameters.
        buffer_bytes: the model's buffers; as much again is kept twice to go back to.
        gradient_bytes: the flat buckets that gradients lie in.
        optimizer_bytes: the optimizer's state after one update; None when not computed.
    """

    model_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo:
    """How the data is cut.

    Attributes:
        dataset_size: samples in the data.
        epoch_size: samples that an epoch's order visits.
        left_out: of those, samples that `drop_last` leaves out.
        steps_per_epoch: steps.
        total_steps: steps of the whole run.
        shard_sizes: samples of each shard of a full step.
        last_shard_sizes: of the last step of an epoch.
        evaluation_size: samples in the evaluation data; None without.
    """

    dataset_size: int
    epoch_size: int
    left_out: int
    steps_per_epoch: int
    total_steps: int
    shard_sizes: tuple[int, ...]
    last_shard_sizes: tuple[int, ...]
    evaluation_size: int | None


@dataclass(frozen=True, kw_only=True)
class ModesInfo:
    """Submodules that are not in train mode.

    Attributes:
        not_training: in eval mode when step 0 is computed.
        put_to_training: in eval mode as `model()` returned them, but not when step 0 is computed,
            since training starts with `model.train()`.
    """

    not_training: tuple[str, ...]
    put_to_training: tuple[str, ...]


@dataclass(kw_only=True)
class Report:
    """Everything that `samestep check` knows; parts are None where it did not get that far.

    Attributes:
        numerics: the fingerprint, binding and informational.
        forecasts: by number of workers, from 1.
        costly: numbers of workers within the job's that send more than a ring all-reduce.
        cheap: those that don't.
        buffers: of the model, as registered.
        evaluation: metrics of the first evaluation batch.
        refused: why training would not start, or would fail at its first step.
        not_exact: what was seen to break the contract though training would start.
        warnings: what may break it, or costs.
        exit_status: what the command ends with.
    """

    numerics: dict[str, Any] = field(default_factory=dict)
    schedule: ScheduleInfo | None = None
    batch: BatchInfo | None = None
    loss: LossInfo | None = None
    parameters: ParametersInfo | None = None
    buffers: tuple[TensorInfo, ...] = ()
    memory: MemoryInfo | None = None
    forecasts: tuple[Forecast, ...] = ()
    costly: tuple[int, ...] = ()
    cheap: tuple[int, ...] = ()
    modes: ModesInfo | None = None
    evaluation: dict[str, float] | None = None
    refused: list[str] = field(default_factory=list)
    not_exact: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    exit_status: ExitStatus = ExitStatus.DONE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; a number that JSON has no word for is its name as text."""
        made: dict[str, Any] = _plain(dataclasses.asdict(self))
        for entry, found in zip(made["forecasts"], self.forecasts, strict=True):
            entry |= {"sent_bytes": found.sent_bytes, "is_costly": found.is_costly}
        return made


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    """What there is to say about a tensor."""
    return TensorInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        num_bytes=tensor.nbytes,
    )


def batch_info(batch: Any, num_samples: int) -> BatchInfo:
    """What there is to say about a batch, which lies on its device."""
    tensors = tuple(tensor_info(path, tensor) for path, tensor in tensors_of(batch))
    return BatchInfo(type=type(batch).__name__, num_samples=num_samples, tensors=tensors)


def schedule_info(spec: JobSpec, built: Built) -> ScheduleInfo:
    """How the data is cut into steps and shards."""
    order = built.order
    full = min(spec.batch_size, order.epoch_size)
    rest = order.epoch_size - (order.steps_per_epoch - 1) * spec.batch_size
    visited = min(order.epoch_size, order.steps_per_epoch * spec.batch_size)
    return ScheduleInfo(
        dataset_size=built.dataset_size,
        epoch_size=order.epoch_size,
        left_out=order.epoch_size - visited,
        steps_per_epoch=order.steps_per_epoch,
        total_steps=built.end_step,
        shard_sizes=tuple(map(len, cut(full, spec.shards))),
        last_shard_sizes=tuple(map(len, cut(min(spec.batch_size, rest), spec.shards))),
        evaluation_size=built.evaluation.size if built.evaluation else None,
    )


def parameters_info(built: Built) -> ParametersInfo:
    """The parameters as they are now; which ones are used is not known yet."""
    model = built.parts.model
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    optimized = {id(p) for group in built.parts.optimizer.param_groups for p in group["params"]}
    own = list(model.named_parameters())
    return ParametersInfo(
        trainable=tuple(tensor_info(name, p) for name, p in own if p.requires_grad),
        frozen=tuple(tensor_info(name, p) for name, p in own if not p.requires_grad),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        unused=None,
        not_optimized=tuple(n for n, p in own if p.requires_grad and id(p) not in optimized),
    )


def memory_info(built: Built, gradient_bytes: int, *, updated: bool = False) -> MemoryInfo:
    """Bytes of state; the optimizer's are known once it has `updated`."""
    model, optimizer = built.parts.model, built.parts.optimizer
    held = [value for state in optimizer.state.values() for value in state.values()]
    optimizer_bytes = sum(value.nbytes for value in held if isinstance(value, Tensor))
    return MemoryInfo(
        model_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes if updated else None,
    )


def named(names: Sequence[object], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ExitStatus):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
