"""Everything needed to take the next step, taken from the live objects and put back into them.

A state consists of tensors by name and of typed values. Names never carry a wrapper's prefix:

    model/<key>               parameters and persistent buffers, by their key in the state_dict
    buffer/<name>             buffers that are in no state_dict
    optimizer/<index>/<key>   the optimizer's state; index counts parameters over its groups
    ema/<name>                averages of the parameters, where the job keeps them

What two names share (tied weights) is stored once, under the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint import model_state, optimizer_state
from samestep.checkpoint.encode import TensorRef, decode, dumps, loads
from samestep.checkpoint.equal import first_difference
from samestep.checkpoint.layout import Layout
from samestep.errors import CheckpointError
from samestep.exact.digest import sha256_state

_SUNK_PREFIX: Final = "values/"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The live objects whose state a checkpoint holds; a wrapper around the model is ignored.

    Attributes:
        model: as the workload made it.
        optimizer: over its parameters.
        scheduler: of the learning rate.
        scaler: of the loss.
        ema: averages of the parameters by name, each laid out as its parameter.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    ema: dict[str, Tensor] | None = None

    @property
    def dtypes(self) -> list[str]:
        """Names of the floating dtypes of the model's state."""
        state = self.model.state_dict().values()
        found = {t.dtype for t in state if isinstance(t, Tensor) and t.is_floating_point()}
        return sorted(str(dtype).removeprefix("torch.") for dtype in found)

    def scaled(self, loss: Tensor) -> Tensor:
        """A scalar loss as it goes into backward: times the scaler's scale where there is one."""
        return loss if self.scaler is None else self.scaler.scale(loss)


@dataclass(kw_only=True)
class State:
    """State between two steps.

    Attributes:
        step: number of steps taken so far: the next step has this number.
        tensors: by the names of the module's docstring; any dtype, shape and strides.
        values: everything else, of the types that `encode` keeps.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @property
    def extras(self) -> dict[str, Any]:
        """What `collect` was given as extras."""
        extras: dict[str, Any] = self.values["extras"]
        return extras


def collect(parts: Parts, *, step: int, extras: Mapping[str, Any]) -> State:
    """The state after `step` steps; tensors and values are references to the live ones.

    So use or copy it before the next step changes them. `extras` must not depend on how many
    workers there are or in which mode they run.
    """
    tensors: dict[str, Tensor] = {}
    model = model_state.bare(parts.model)
    values: dict[str, Any] = {
        "model": model_state.collect_model(model, tensors),
        "optimizer": optimizer_state.collect_optimizer(parts.optimizer, model, tensors),
        "scheduler": optimizer_state.collect_scheduler(parts.scheduler),
        "scaler": optimizer_state.collect_scaler(parts.scaler),
        "extras": dict(extras),
    }
    if parts.ema is not None:
        values["ema"] = list(parts.ema)
        tensors.update((f"ema/{name}", average) for name, average in parts.ema.items())
    return State(step=step, tensors=tensors, values=values)


def restore(state: State, parts: Parts) -> None:
    """Puts a state into fresh parts, built as those that it was collected from.

    Parameters and buffers are written in place; optimizer tensors are new ones, laid out as they
    were. The state itself is only read and may be restored again. Parts that don't fit are left
    unchanged.

    Raises:
        CheckpointError: the parts are of another kind; every mismatch is named.
    """
    model, values, tensors = model_state.bare(parts.model), state.values, state.tensors
    problems = [
        *model_state.model_mismatches(model, values["model"], tensors),
        *optimizer_state.optimizer_mismatches(parts.optimizer, model, values["optimizer"], tensors),
        *optimizer_state.scheduler_mismatches(parts.scheduler, values["scheduler"]),
        *optimizer_state.scaler_mismatches(parts.scaler, values["scaler"]),
        *model_state.ema_mismatches(parts.ema, values.get("ema"), tensors),
    ]
    if problems:
        raise CheckpointError(
            f"the state of step {state.step} does not fit the workload; continue with the code "
            "that wrote it, or start a run of another name:\n  " + "\n  ".join(problems)
        )
    model_state.restore_model(model, values["model"], tensors)
    optimizer_state.restore_optimizer(parts.optimizer, values["optimizer"], tensors)
    optimizer_state.restore_scheduler(parts.scheduler, values["scheduler"])
    optimizer_state.restore_scaler(parts.scaler, values["scaler"])
    optimizer_state.restore_groups(parts.optimizer, values["optimizer"])
    model_state.restore_ema(parts.ema, tensors)


def check_encodable(parts: Parts) -> None:
    """Refuses, before step 0, parts whose state can't be kept whole.

    Raises:
        CheckpointError: names the path to what can't be kept, and says what to do.
    """
    names = optimizer_state.optimized_names(parts.optimizer, model_state.bare(parts.model))
    stray = [n for n, name in enumerate(names) if name is None]
    if stray:
        raise CheckpointError(
            f"the optimizer's parameters number {stray} are no parameters of the model, so no "
            "checkpoint would hold them: make them attributes of the model"
        )
    flatten(collect(parts, step=0, extras={}))


def flatten(state: State) -> tuple[dict[str, Tensor], str]:
    """All tensors of a state, those inside its values too, and the JSON of the values.

    Raises:
        CheckpointError: something can't be kept, or would not come back as it is.
    """
    sunk: dict[str, Tensor] = {}
    text = dumps(state.values, tensors=sunk)
    difference = first_difference(state.values, loads(text, tensors=sunk))
    if difference is not None:
        raise CheckpointError(f"{difference}: would not come back from a checkpoint as it is")
    tensors = {**state.tensors, **sunk}
    for name, tensor in tensors.items():
        Layout.of(tensor, name=name)
    return tensors, text


def unflatten(step: int, tensors: Mapping[str, Tensor], encoded: Any) -> State:
    """The state that `flatten` was given, from what it returned, its JSON parsed.

    Raises:
        CheckpointError: the values are malformed or name a tensor that is missing.
    """
    values = decode(encoded, tensors=tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(_SUNK_PREFIX)}
    missing = [ref.name for ref in _references(values) if ref.name not in kept]
    if missing or not isinstance(values, dict):
        raise CheckpointError(f"tensors are missing from the tensors file: {missing}")
    return State(step=step, tensors=kept, values=values)


def state_sha256(state: State) -> str:
    """SHA-256 of weights, optimizer state and position: what `samestep digest` prints.

    Over the canonical form that exact/digest.py documents; its JSON is the typed encoding of
    `{"step": ..., "values": ...}` with the items of dicts sorted.
    """
    sunk: dict[str, Tensor] = {}
    whole = {"step": state.step, "values": state.values}
    text = dumps(whole, tensors=sunk, canonical=True)
    return sha256_state({**state.tensors, **sunk}, text)


def _references(value: Any) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)
