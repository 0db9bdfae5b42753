"""Early stopping: counts evaluations in a row that bring no improvement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.checkpoint.ranking import Ranking
from samestep.spec_training import EarlyStop as Settings


class EarlyStop:
    """The count of a run, which its checkpoints hold.

    Args:
        settings: of the job, with a metric.
        saved: what `state` gave in the checkpoint that was restored; None at the start.
    """

    def __init__(self, settings: Settings, saved: Mapping[str, Any] | None = None) -> None:
        assert settings.metric is not None
        self._settings = settings
        self.metric = settings.metric
        self._ranking = Ranking(metric=settings.metric, order=settings.order)
        self._best: float | None = saved["best"] if saved else None
        self._best_step: int | None = saved["best_step"] if saved else None
        self._num_bad = int(saved["num_bad"]) if saved else 0

    def take(self, score: float, *, step: int) -> None:
        """Counts an evaluation; NaN is no improvement."""
        sign = 1 if self._settings.order == "max" else -1
        bar = None if self._best is None else self._best + sign * self._settings.min_delta
        if self._ranking.is_better(score, bar):
            self._best, self._best_step, self._num_bad = score, step, 0
        else:
            self._num_bad += 1

    @property
    def reason(self) -> str | None:
        """Why the run ends; None while it goes on."""
        if self._num_bad < self._settings.patience:
            return None
        so_far = (
            "it never had a value"
            if self._best is None
            else f"the best was {self._best:.6g} after {self._best_step} steps"
        )
        return (
            f"early stop: {self.metric} did not improve by more than "
            f"{self._settings.min_delta:g} in {self._num_bad} evaluations; {so_far}"
        )

    @property
    def state(self) -> dict[str, Any]:
        """What goes on from here; plain values."""
        return {"best": self._best, "best_step": self._best_step, "num_bad": self._num_bad}
