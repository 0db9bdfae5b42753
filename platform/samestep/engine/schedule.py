"""The learning rate schedule: what a workload may return as one, and stepping it."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, get_args, get_type_hints

from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import WorkloadError
from samestep.spec import JobSpec
from samestep.workload import Schedule


def checked_schedule(spec: JobSpec, made: object, *, has_evaluation: bool) -> Schedule | None:
    """What `scheduler()` returned, as a Schedule.

    Raises:
        WorkloadError: it is none, or would never be stepped as it needs to be.
    """
    if made is None:
        return None
    schedule = made if isinstance(made, Schedule) else None
    scheduler = schedule.scheduler if schedule else made
    if not isinstance(scheduler, LRScheduler):
        raise WorkloadError(
            "scheduler() must return an LRScheduler, a samestep.Schedule of one, or None; got "
            f"{type(scheduler).__name__}"
        )
    schedule = schedule or Schedule(scheduler)
    _require_sense(schedule, type(scheduler).__name__)
    if schedule.every == "evaluation":
        _require_evaluation(spec, type(scheduler).__name__, has_evaluation)
    return schedule


def is_due(schedule: Schedule | None, num_steps: int, steps_per_epoch: int) -> bool:
    """Whether a schedule is stepped after the last of `num_steps` steps, evaluations aside."""
    if schedule is None or schedule.every == "evaluation":
        return False
    return schedule.every == "step" or num_steps % steps_per_epoch == 0


def step_schedule(scheduler: LRScheduler, *values: float) -> None:
    """Steps a scheduler, with the value of its metric where it takes one."""
    step: Any = scheduler.step
    with warnings.catch_warnings():
        # A skipped first step makes torch warn that the scheduler came before the optimizer.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        step(*values)


def _require_sense(schedule: Schedule, name: str) -> None:
    allowed = get_args(get_type_hints(Schedule)["every"])
    if schedule.every not in allowed:
        raise WorkloadError(
            f"Schedule(every={schedule.every!r}): allowed are {', '.join(map(repr, allowed))}"
        )
    needs, takes = _metric_of(schedule.scheduler)
    if needs and (schedule.metric is None or schedule.every != "evaluation"):
        raise WorkloadError(
            f"{name}.step takes a metric, so it must be stepped on an evaluation; got "
            f"every={schedule.every!r}, metric={schedule.metric!r}: return "
            'samestep.Schedule(scheduler, every="evaluation", metric="NAME") with the name of a '
            "metric that evaluate() gives"
        )
    if schedule.metric is not None and schedule.every != "evaluation":
        raise WorkloadError(
            f"Schedule(every={schedule.every!r}, metric={schedule.metric!r}): only an evaluation "
            'has that metric: use every="evaluation"'
        )
    if schedule.metric is not None and not takes:
        raise WorkloadError(
            f"Schedule(metric={schedule.metric!r}): {name}.step takes no metric; leave it out"
        )


def _require_evaluation(spec: JobSpec, name: str, has_evaluation: bool) -> None:
    if not has_evaluation:
        raise WorkloadError(
            f"{name} is stepped on evaluations, but evaluation_data() returns None: give the "
            "workload evaluation data, or step it every step or epoch"
        )
    if not (spec.evaluate.every_epochs or spec.evaluate.every_steps):
        raise WorkloadError(
            f"{name} is stepped on evaluations, but evaluate.every_epochs and "
            "evaluate.every_steps are 0: set one of them"
        )


def _metric_of(scheduler: LRScheduler) -> tuple[bool, bool]:
    """Whether `step` needs a metric, and whether it takes one."""
    parameters = list(inspect.signature(type(scheduler).step).parameters.values())[1:]
    first = parameters[0] if parameters else None
    if first is None or first.name == "epoch" or first.kind is first.KEYWORD_ONLY:
        return False, False
    variadic = first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    return first.default is first.empty and not variadic, first.kind is not first.VAR_KEYWORD
