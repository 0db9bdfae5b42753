"""What the evaluations of a run decide: schedule, early stop, and which checkpoint is best.

Decisions are the same on every worker, and don't depend on when checkpoints are written or on
restarts: they hang on evaluations that are due by the job, and their state is in the checkpoints.
The evaluation at the end of a run that is not due ranks its checkpoint and decides nothing else,
since a longer run would not have it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from samestep.checkpoint.ranking import Ranking
from samestep.engine.early_stop import EarlyStop
from samestep.engine.schedule import step_schedule
from samestep.errors import WorkloadError
from samestep.spec import JobSpec
from samestep.workload import Schedule

Best = tuple[int, float]
"""Steps before the best checkpoint, and its score."""


class Appraisal:
    """Takes the evaluations of one attempt.

    Args:
        spec: the job.
        schedule: of the learning rate, whatever it is stepped by.
        steps_per_epoch: of the run.
        early_stop: what `state` gave for it in the restored checkpoint.
        best: the best checkpoint up to the restored one.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        schedule: Schedule | None,
        steps_per_epoch: int,
        early_stop: Mapping[str, Any] | None = None,
        best: Best | None = None,
    ) -> None:
        self._spec = spec
        self._schedule = schedule
        self._steps_per_epoch = steps_per_epoch
        self._early_stop = (
            EarlyStop(spec.early_stop, early_stop) if spec.early_stop.metric is not None else None
        )
        self.ranking = Ranking.of(spec.checkpoint.best)
        self.best = best
        self._without_score: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether an evaluation takes place after `step` steps."""
        epochs, steps = self._spec.evaluate.every_epochs, self._spec.evaluate.every_steps
        by_epoch = epochs > 0 and step % (self._steps_per_epoch * epochs) == 0
        return by_epoch or (steps > 0 and step % steps == 0)

    def take(self, metrics: Mapping[str, float], *, step: int, decides: bool) -> bool:
        """Draws the conclusions from an evaluation.

        Args:
            metrics: over all samples.
            step: steps taken before it.
            decides: it is due by the job.

        Returns:
            Whether the state after this step is the best one so far.

        Raises:
            WorkloadError: a metric that something hangs on is missing.
        """
        require_metrics(self._spec, self._schedule, metrics)
        if decides:
            if self._schedule is not None and self._schedule.every == "evaluation":
                named = self._schedule.metric
                step_schedule(self._schedule.scheduler, *([metrics[named]] if named else []))
            if self._early_stop is not None:
                self._early_stop.take(metrics[self._early_stop.metric], step=step)
        if self.ranking is None:
            return False
        score = metrics[self.ranking.metric]
        if math.isnan(score):
            self._without_score = step
        if not self.ranking.is_better(score, self.best[1] if self.best else None):
            return False
        self.best = (step, score)
        return True

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early; None while it goes on."""
        return self._early_stop.reason if self._early_stop is not None else None

    @property
    def warning(self) -> str | None:
        """What the user should know at the end about the best checkpoint."""
        if self.ranking is None or self.best is not None or self._without_score is None:
            return None
        return (
            f"no checkpoint is the best one: {self.ranking.metric} was NaN in every evaluation "
            f"(the last one after {self._without_score} steps); the latest stands for it"
        )

    def best_as_json(self) -> dict[str, Any] | None:
        """Steps before the best checkpoint, and what it is the best by; None without one."""
        if self.ranking is None or self.best is None:
            return None
        return {"step": self.best[0], "metric": self.ranking.metric, "score": self.best[1]}

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the scheduler's own state; empty without any."""
        return {"early_stop": self._early_stop.state} if self._early_stop is not None else {}


def required_metrics(spec: JobSpec, schedule: Schedule | None) -> dict[str, str]:
    """The metrics of an evaluation that something hangs on, by what does."""
    wanted = {
        "checkpoint.best.metric": spec.checkpoint.best.metric,
        "early_stop.metric": spec.early_stop.metric,
        "the schedule's metric": schedule.metric if schedule is not None else None,
    }
    return {what: metric for what, metric in wanted.items() if metric is not None}


def require_metrics(
    spec: JobSpec, schedule: Schedule | None, given: Collection[str] | None
) -> None:
    """Checks that an evaluation gives what hangs on it.

    Args:
        spec: the job.
        schedule: the workload's.
        given: names of the evaluation's metrics; None: there is no evaluation.

    Raises:
        WorkloadError: names the metric, who asks for it, and those there are.
    """
    for what, metric in required_metrics(spec, schedule).items():
        if given is None:
            raise WorkloadError(
                f"{what} is {metric!r}, but evaluation_data() returns None: give the workload "
                "evaluation data, or leave the metric out"
            )
        if metric not in given:
            near = difflib.get_close_matches(metric, given, n=1, cutoff=0.5)
            raise WorkloadError(
                f"{what} is {metric!r}, but evaluate() gives {', '.join(sorted(given)) or 'none'}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
