"""Which checkpoint is better: by one metric of the evaluation, more or less of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from samestep.spec_training import Best, MetricOrder


class Ranked(Protocol):
    """What has a place in a ranking."""

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Metrics of the evaluation after its step; empty without one."""


R = TypeVar("R", bound=Ranked)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The metric that ranks, and which way; NaN is never best, and the first of equals stays."""

    metric: str
    order: MetricOrder

    @classmethod
    def of(cls, best: Best) -> Ranking | None:
        """The ranking that a job asks for."""
        return cls(metric=best.metric, order=best.order) if best.metric is not None else None

    def is_better(self, score: float, than: float | None) -> bool:
        """Whether a score beats the best one so far (None: there is none)."""
        if math.isnan(score):
            return False
        if than is None:
            return True
        return score > than if self.order == "max" else score < than

    def score_of(self, ranked: Ranked) -> float | None:
        """The value of the metric; None where it was not evaluated, or is NaN."""
        score = ranked.evaluation.get(self.metric)
        return None if score is None or math.isnan(score) else score

    def best_of(self, candidates: Iterable[R]) -> R | None:
        """The best of some, given from the oldest to the newest; None when none has a score."""
        best: R | None = None
        for candidate in candidates:
            score = self.score_of(candidate)
            so_far = self.score_of(best) if best is not None else None
            if score is not None and self.is_better(score, so_far):
                best = candidate
        return best
