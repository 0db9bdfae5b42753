"""State of a model: parameters, buffers of both kinds, extra state, ties, what is trainable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from samestep.checkpoint.layout import Layout
from samestep.errors import CheckpointError

_EXTRA_STATE: Final = "_extra_state"


def bare(model: nn.Module) -> nn.Module:
    """The model without the wrappers that would put a prefix before every key."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        return bare(model.module)
    # By name: importing the compiler's class costs seconds where nothing was compiled.
    if type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, nn.Module):
        return bare(model._orig_mod)
    return model


def collect_model(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the model's tensors into `tensors` (references) and returns the rest of its state."""
    live = model.state_dict(keep_vars=True)
    held = {key: value for key, value in live.items() if isinstance(value, Tensor)}
    buffers = _unsaved_buffers(model, live)
    tied, tied_buffers = _ties(held), _ties(buffers)
    tensors.update((f"model/{key}", v.detach()) for key, v in held.items() if key not in tied)
    tensors.update((f"buffer/{n}", v.detach()) for n, v in buffers.items() if n not in tied_buffers)
    metadata = getattr(live, "_metadata", {})
    return {
        "keys": list(live),
        "tied": tied,
        "extra": {key: value for key, value in live.items() if key not in held},
        "metadata": {prefix: dict(entry) for prefix, entry in metadata.items()},
        "trainable": [name for name, param in _parameters(model) if param.requires_grad],
        "buffers": list(buffers),
        "tied_buffers": tied_buffers,
    }


def model_mismatches(
    model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Lines that say where the model is not of the kind that the state was collected from."""
    live = model.state_dict(keep_vars=True)
    held = {key: value for key, value in live.items() if isinstance(value, Tensor)}
    lines = [
        f"model/{key}: in the checkpoint, not in the model"
        for key in values["keys"]
        if key not in live
    ]
    lines += [
        f"model/{key}: in the model, not in the checkpoint"
        for key in live
        if key not in values["keys"]
    ]
    if values["tied"] != _ties(held):
        lines.append(f"tied weights: the checkpoint has {values['tied']}, the model {_ties(held)}")
    for key, tensor in held.items():
        saved = tensors.get(f"model/{key}")
        if saved is not None and not _is_extra(key):
            lines += differences(f"model/{key}", saved, tensor)
    for name in values["buffers"]:
        owner, leaf = _owner(model, name)
        if owner is None or leaf not in owner._buffers:
            lines.append(f"buffer/{name}: in the checkpoint, not in the model")
    unsaved = _unsaved_buffers(model, live)
    lines += [
        f"buffer/{n}: in the model, not in the checkpoint"
        for n in unsaved
        if n not in values["buffers"]
    ]
    return lines  # fmt: skip


def differences(name: str, saved: Tensor, live: Tensor) -> list[str]:
    """At most one line: where two tensors that must be laid out alike are not."""
    a, b = Layout.of(saved, name=name), Layout.of(live.detach(), name=name)
    for what in ("shape", "dtype"):
        in_file, in_model = getattr(a, what), getattr(b, what)
        if in_file != in_model:
            return [f"{name}: {what} {in_file} in the checkpoint, {in_model} in the model"]
    if not a.lies_as(b):
        return [
            f"{name}: strides {a.strides} in the checkpoint, {b.strides} in the model (set the "
            "same memory format as before)"
        ]
    return []


def ema_mismatches(
    ema: Mapping[str, Tensor] | None, saved: list[str] | None, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Lines that say where the averages are not of the kind that was collected."""
    if (ema is None) != (saved is None):
        return [
            f"average of weights (ema): {'none' if saved is None else 'one'} in the checkpoint, "
            "the reverse now"
        ]
    if ema is None or saved is None:
        return []
    if list(ema) != saved:
        return [f"ema: averages of {saved} in the checkpoint, now of {list(ema)}"]
    kept = {f"ema/{name}": average for name, average in ema.items()}
    return [line for n, average in kept.items() for line in differences(n, tensors[n], average)]


def restore_ema(ema: Mapping[str, Tensor] | None, tensors: Mapping[str, Tensor]) -> None:
    """Writes the averages in place."""
    for name, average in (ema or {}).items():
        average.copy_(tensors[f"ema/{name}"])


def averaged(
    state_dict: OrderedDict[str, Any], values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> OrderedDict[str, Any]:
    """A state_dict with the averages in the parameters' places, in the parameters' dtypes."""
    for key, weights in state_dict.items():
        average = tensors.get(f"ema/{values['tied'].get(key, key)}")
        if average is not None:
            state_dict[key] = average.to(weights.dtype)
    return state_dict


def state_dict_of(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> OrderedDict[str, Any]:
    """The model's state_dict: tied keys and extra state included, in the model's own order.

    Raises:
        CheckpointError: a key has neither a tensor nor a value.
    """
    found: OrderedDict[str, Any] = OrderedDict()
    for key in values["keys"]:
        name = f"model/{values['tied'].get(key, key)}"
        if key in values["extra"]:
            found[key] = values["extra"][key]
        elif name in tensors:
            found[key] = tensors[name]
        else:
            raise CheckpointError(f"{name}: missing from the tensors file")
    found._metadata = OrderedDict(values["metadata"])  # type: ignore[attr-defined]
    return found


def restore_model(
    model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes parameters and buffers in place, and says again which parameters are trainable."""
    saved = state_dict_of(values, tensors)
    for key in saved:
        if _is_extra(key):  # handed to the module itself, which may keep it
            saved[key] = deepcopy(saved[key])
    try:
        model.load_state_dict(saved, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"the model does not take its state back: {error}") from error
    trainable = set(values["trainable"])
    for name, param in _parameters(model):
        param.requires_grad_(name in trainable)
    _restore_buffers(model, values, tensors)


def _restore_buffers(
    model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    placed: dict[str, Tensor] = {}
    for name in values["buffers"]:
        first = values["tied_buffers"].get(name, name)
        saved = tensors[f"buffer/{first}"]
        owner, leaf = _owner(model, name)
        assert owner is not None, f"{name} was checked before"
        live = owner._buffers[leaf]
        if live is not None and not differences(name, saved, live):
            with torch.no_grad():
                live.copy_(saved)
        else:  # a cache that grew, or was filled, while training
            device = live.device if live is not None else _device(model)
            if first not in placed:
                placed[first] = Layout.of(saved, name=name).copy(saved, device=device)
            setattr(owner, leaf, placed[first])


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _unsaved_buffers(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in state_dict}


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        earlier = first.setdefault(id(tensor), name)
        if earlier != name:
            tied[name] = earlier
    return tied


def _owner(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


def _device(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE
