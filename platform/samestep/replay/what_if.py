"""A step taken under a changed job, beside the step as it was.

What was restored holds the old settings: learning rates lie in the optimizer's groups, and in the
state of its schedule. So whatever the change makes different in freshly built objects is made
different in the restored ones as well, learning rates in proportion: they keep what the schedule
has made of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from samestep.checkpoint.state import Parts, State
from samestep.engine.setup import build, build_acting
from samestep.errors import CannotReplayError, InputError, SamestepError, UserCodeError
from samestep.replay.bench import Place
from samestep.replay.code import loaded
from samestep.replay.raised import Raised
from samestep.replay.source import Altered, Source
from samestep.replay.taking import Taker
from samestep.spec import JobSpec, changed_spec
from samestep.telemetry.records import StepRecord

OPTIMIZER: Final = "optimizer."
"""Before the name of an option of the optimizer's groups, which the job has no field for."""
_CUTS: Final = ("batch_size", "shards", "drop_last")
_RATES: Final = ("lr", "_last_lr")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a step did.

    Attributes:
        step: its number.
        record: what it came to; None where it raised.
        raised: by it.
        grad_norm: of it; None without a gradient, and where it raised.
        update_norm: L2 norm of the change of all parameters; NaN where it raised.
        weight_norm: of themselves afterwards.
        num_not_finite: values among them that are NaN or infinite.
    """

    step: int
    record: StepRecord | None
    raised: Raised | None = None
    grad_norm: float | None = None
    update_norm: float = math.nan
    weight_norm: float = math.nan
    num_not_finite: int = 0


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A step, and the steps behind it, under the job as it was and under a changed one.

    Attributes:
        changes: `path=value` as given.
        as_it_was: effects by step; an update that the run left out is left out.
        changed: the same under the changed job, with every update.
    """

    changes: tuple[str, ...]
    as_it_was: tuple[Effect, ...]
    changed: tuple[Effect, ...]


def what_if(
    source: Source, before: State, place: Place, changes: Mapping[str, object], *, num_after: int
) -> WhatIf:
    """Takes the source's step twice from the state before it.

    Args:
        source: whose step it is.
        before: the state right before the step.
        place: where to compute.
        changes: by dotted path into the job (`args.lr`), or `optimizer.NAME` for an option of the
            optimizer's groups.
        num_after: steps to go on with behind it, under either job.

    Raises:
        InputError: a change would cut the step into other shards.
        SpecError: the changed job is not valid.
        CannotReplayError: what was recorded does not fit the changed job.
    """
    cuts = [path for path in changes if path in _CUTS]
    if cuts:
        raise InputError(
            f"{', '.join(cuts)} can't be changed for a step that was taken: its samples are cut "
            "into shards already"
        )
    options = {
        path.removeprefix(OPTIMIZER): value
        for path, value in changes.items()
        if path.startswith(OPTIMIZER)
    }
    fields = {path: value for path, value in changes.items() if not path.startswith(OPTIMIZER)}
    spec, midway = changed_spec(source.spec, fields), Altered(source, state=before)
    adjust = partial(
        _adjust,
        then=_settings(source, source.spec, place),
        now=_settings(source, spec, place),
        options=options,
    )
    last_step = source.step + num_after
    runs = []
    for job, change in ((source.spec, None), (spec, adjust)):
        taker = Taker(
            midway,
            spec=job,
            place=place,
            last_step=last_step,
            adjust=change,
            leaves_out=change is None,
        )
        try:
            runs.append(tuple(_effects(taker, last_step)))
        finally:
            taker.close()
    return WhatIf(
        changes=tuple(f"{path}={value}" for path, value in changes.items()),
        as_it_was=runs[0],
        changed=runs[1],
    )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What freshly built objects are set to: the optimizer's groups, the schedule's state."""

    groups: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any]


def _settings(source: Source, spec: JobSpec, place: Place) -> _Settings:
    workload = loaded(source, spec, place.search)
    try:
        parts = build_acting(spec, workload, place.device).parts
    except UserCodeError:  # its methods may need what data() leaves behind
        parts = build(spec, workload, place.device).parts
    groups = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in parts.optimizer.param_groups
    ]
    schedule = {} if parts.scheduler is None else deepcopy(parts.scheduler.state_dict())
    return _Settings(groups=groups, schedule=schedule)


def _adjust(
    parts: Parts, *, then: _Settings, now: _Settings, options: Mapping[str, object]
) -> None:
    if len(then.groups) != len(now.groups):
        raise CannotReplayError(
            f"the change makes {len(now.groups)} groups of parameters of {len(then.groups)}: what "
            "was recorded does not fit"
        )
    for group, before, after in zip(
        parts.optimizer.param_groups, then.groups, now.groups, strict=True
    ):
        for key in after:
            if not _same(before.get(key), after[key]):
                group[key] = _changed(key, group.get(key), before.get(key), after[key])
        unknown = [name for name in options if name not in group]
        if unknown:
            raise InputError(
                f"{OPTIMIZER}{unknown[0]}: {type(parts.optimizer).__name__} has no such option; it "
                f"has: {', '.join(key for key in group if key != 'params')}"
            )
        group.update(options)
    if parts.scheduler is not None:
        state = parts.scheduler.state_dict()
        for key, after_value in now.schedule.items():
            before_value = then.schedule.get(key)
            if not _same(before_value, after_value):
                state[key] = _changed(key, state.get(key), before_value, after_value)
        parts.scheduler.load_state_dict(state)


def _changed(key: str, restored: Any, before: Any, after: Any) -> Any:
    """What a restored setting becomes: rates in proportion, anything else as it is built now."""
    if key not in _RATES:
        return after
    if isinstance(after, list | tuple):
        values = [_changed("lr", *each) for each in zip(restored, before, after, strict=True)]
        return type(after)(values)
    return restored * (after / before) if before else after


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)


def _effects(taker: Taker, last_step: int) -> list[Effect]:
    found: list[Effect] = []
    while taker.step <= last_step:
        step, before = taker.step, _weights(taker)
        try:
            taken = taker.take()
            taker.settle(taken.values, with_hooks=False)
        except CannotReplayError:
            raise
        except SamestepError as error:
            found.append(Effect(step=step, record=None, raised=Raised.of(error)))
            break
        after = _weights(taker)
        moved = [value - before[name] for name, value in after.items()]
        found.append(
            Effect(
                step=step,
                record=taken.record,
                grad_norm=taken.grad_norm,
                update_norm=_norm(moved),
                weight_norm=_norm(list(after.values())),
                num_not_finite=sum(int((~torch.isfinite(value)).sum()) for value in after.values()),
            )
        )
    return found


def _weights(taker: Taker) -> dict[str, torch.Tensor]:
    """A float64 copy of the parameters on the CPU."""
    return {
        name: parameter.detach().to("cpu", torch.float64, copy=True)
        for name, parameter in taker.parts.model.named_parameters()
        if not parameter.is_complex()
    }


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
