"""State of what acts on the gradient: optimizer, learning rate schedule and gradient scaler.

Optimizer tensors do not go through `Optimizer.load_state_dict`, which casts them to the
parameter's dtype: float32 moments of a bfloat16 parameter would come back rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.encode import TensorRef
from samestep.checkpoint.layout import Layout


def optimized_names(optimizer: Optimizer, model: nn.Module) -> list[str | None]:
    """Name of each of the optimizer's parameters, in its order; None: not one of the model's."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [names.get(id(param)) for param in _parameters(optimizer)]


def collect_optimizer(
    optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Puts the optimizer's tensors into `tensors` (references) and returns the rest."""
    saved = optimizer.state_dict()
    return {
        "type": type(optimizer).__qualname__,
        "parameters": optimized_names(optimizer, model),
        "state": {
            index: {
                key: _set_apart(value, f"optimizer/{index}/{key}", tensors)
                for key, value in entries.items()
            }
            for index, entries in saved["state"].items()
        },
        "groups": saved["param_groups"],
        "more": {k: v for k, v in saved.items() if k not in ("state", "param_groups")},
    }


def optimizer_mismatches(
    optimizer: Optimizer, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Lines that say where the optimizer is not of the kind that was collected."""
    if values["type"] != type(optimizer).__qualname__:
        return [
            f"optimizer: {values['type']} in the checkpoint, now {type(optimizer).__qualname__}"
        ]
    saved = [len(group["params"]) for group in values["groups"]]
    live = [len(group["params"]) for group in optimizer.param_groups]
    if saved != live:
        return [f"optimizer: groups of {saved} parameters in the checkpoint, now of {live}"]
    names = optimized_names(optimizer, model)
    lines = [
        f"optimizer: parameter {n} is {old} in the checkpoint, now {new}"
        for n, (old, new) in enumerate(zip(values["parameters"], names, strict=True))
        if old != new
    ]
    for index, param in enumerate(_parameters(optimizer)):
        for ref in values["state"].get(index, {}).values():
            moment = tensors[ref.name] if isinstance(ref, TensorRef) else None
            if moment is not None and moment.shape == param.shape:
                lines += _moment_mismatch(ref.name, names[index], moment, param)
    return lines


def restore_optimizer(
    optimizer: Optimizer, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Gives the optimizer its groups and tensors back: new tensors, laid out as they were."""
    groups = [dict(group) for group in values["groups"]]
    optimizer.load_state_dict({**values["more"], "state": {}, "param_groups": groups})
    owner_of = dict(enumerate(_parameters(optimizer)))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for index, entries in values["state"].items():
        owner: Any = owner_of.get(index, index)
        group = group_of.get(id(owner), {})
        optimizer.state[owner] = {
            key: _restored(key, value, owner, group, tensors) for key, value in entries.items()
        }


def restore_groups(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Gives learning rates and the like back: some schedulers set them while being restored."""
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(value, Tensor):  # a learning rate on the device
                at = group[key].device if isinstance(group.get(key), Tensor) else None
                group[key] = Layout.of(value, name=key).copy(value, device=at)
            else:
                group[key] = deepcopy(value)


def collect_scheduler(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The schedule's class and state; None where there is none."""
    if scheduler is None:
        return None
    return {"type": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def scheduler_mismatches(
    scheduler: LRScheduler | None, values: Mapping[str, Any] | None
) -> list[str]:
    """At most one line: another schedule than the one collected."""
    saved = None if values is None else values["type"]
    live = None if scheduler is None else type(scheduler).__qualname__
    return [] if saved == live else [f"scheduler: {saved} in the checkpoint, now {live}"]


def restore_scheduler(scheduler: LRScheduler | None, values: Mapping[str, Any] | None) -> None:
    """Gives the schedule its own copy of the state back."""
    if scheduler is not None and values is not None:
        scheduler.load_state_dict(deepcopy(values["state"]))


def collect_scaler(scaler: GradScaler | None) -> dict[str, Any] | None:
    """Scale, growth counter and settings; None where there is no scaler that is enabled."""
    return None if scaler is None or not scaler.is_enabled() else scaler.state_dict()


def scaler_mismatches(scaler: GradScaler | None, values: Mapping[str, Any] | None) -> list[str]:
    """At most one line: a scaler only then or only now."""
    live = collect_scaler(scaler) is not None
    if live == (values is not None):
        return []
    return [f"gradient scaler: {'none' if live else 'one'} in the checkpoint, the reverse now"]


def restore_scaler(scaler: GradScaler | None, values: Mapping[str, Any] | None) -> None:
    """Gives the scaler its own copy of the state back."""
    if scaler is not None and values is not None:
        scaler.load_state_dict(deepcopy(dict(values)))


def _parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _set_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if type(value) is not Tensor:  # a subclass is left for the encoding to refuse by its path
        return value
    tensors[name] = value.detach()
    return TensorRef(name)


def _moment_mismatch(ref: str, name: str | None, moment: Tensor, param: Tensor) -> list[str]:
    saved, live = Layout.of(moment, name=ref), Layout.of(param.detach(), name=ref)
    if saved.lies_as(live):
        return []
    return [
        f"{ref}: strides {saved.strides}, but its parameter {name} has {live.strides}: a fused "
        "optimizer would train wrongly"
    ]


def _restored(
    key: Any, value: Any, owner: Any, group: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Any:
    if not isinstance(value, TensorRef):
        return deepcopy(value)
    saved = tensors[value.name]
    device = owner.device if isinstance(owner, Tensor) else saved.device
    on_device = group.get("fused") or group.get("capturable")
    if key == "step" and not on_device:  # torch keeps step counts on the CPU then
        device = torch.device("cpu")
    return Layout.of(saved, name=value.name).copy(saved, device=device)
