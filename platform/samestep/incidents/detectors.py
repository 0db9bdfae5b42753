"""Detectors over what a step came to: the same values on every worker, so the same findings.

They look at reduced values before the update, talk to nobody, and their state is part of the
checkpoint, so that restarts and resizes change no decision.

A spike is told by a robust z-score: how far a value lies above the median of the window, in units
of the median absolute deviation (times 1.4826, which makes it the standard deviation where values
are normal). See Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from samestep.names import IncidentKind

MAD_TO_DEVIATION: Final = 1.4826
LEAST_SCALE: Final = 2.0**-16
"""Down to here a loss scale may fall by overflows in a row, as ordinary ones make it."""
LEAST_SPREAD: Final = 1e-3
"""Share of the median below which a spread counts as this much: a plateau is no reason to worry."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something odd about a step.

    Attributes:
        kind: non_finite, loss_spike or grad_spike.
        message: what was seen, in a sentence.
        seen: the values behind it.
    """

    kind: IncidentKind
    message: str
    seen: Mapping[str, Any]


class Window:
    """The last values of one quantity.

    Args:
        length: how many are kept.
        least: how many there must be before anything counts as a spike.
        threshold: robust z-score from which on a value is a spike.
        values: kept from before, oldest first.
    """

    def __init__(
        self, *, length: int, least: int, threshold: float, values: Sequence[float] = ()
    ) -> None:
        self._values: deque[float] = deque(values, maxlen=length)
        self._length = length
        self._least = least
        self._threshold = threshold

    def score(self, value: float) -> float | None:
        """The robust z-score of a value against the window; None while that is too short."""
        if len(self._values) < self._least:
            return None
        median = statistics.median(self._values)
        spread = statistics.median([abs(kept - median) for kept in self._values])
        unit = max(MAD_TO_DEVIATION * spread, LEAST_SPREAD * abs(median))
        if unit == 0:
            return 0.0 if value == median else math.copysign(math.inf, value - median)
        return (value - median) / unit

    def is_spike(self, value: float) -> bool:
        """Whether a value stands out upwards."""
        score = self.score(value)
        return score is not None and score > self._threshold

    def take(self, value: float) -> None:
        """Adds a value; the oldest goes."""
        self._values.append(value)

    def fresh(self) -> Window:
        """An empty one of the same kind."""
        return Window(length=self._length, least=self._least, threshold=self._threshold)

    @property
    def values(self) -> list[float]:
        """What is kept, oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """Of what is kept; NaN without any."""
        return statistics.median(self._values) if self._values else math.nan


def overflows_to_least_scale(init_scale: float, backoff_factor: float) -> int:
    """How many in a row bring a loss scale from where it began to `LEAST_SCALE`: usually 32."""
    return max(1, math.ceil(math.log(init_scale / LEAST_SCALE) / -math.log(backoff_factor)))


class Detectors:
    """Judges one step after another.

    A value that stands out is not taken into the window: else a divergence would soon count as
    usual. After `length` spikes in a row the level has changed for good: the window starts anew.

    Args:
        length: of the windows, in steps.
        least: steps before a spike can be told.
        threshold: robust z-score from which on a value is a spike.
        max_overflows: so many in a row are an incident.
        state: what `state` gave.
    """

    def __init__(
        self,
        *,
        length: int,
        least: int,
        threshold: float,
        max_overflows: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._length = length
        self._max_overflows = max_overflows
        kept = state or {}
        self._windows = {
            name: Window(length=length, least=least, threshold=threshold, values=kept.get(name, ()))
            for name in ("loss", "grad_norm")
        }
        self._num_odd: dict[str, int] = dict(kept.get("num_odd", {}))

    def judge(
        self, *, step: int, loss: float | None, grad_norm: float | None, overflow: bool = False
    ) -> list[Finding]:
        """What is odd about a step, before its update; changes nothing, see `take`.

        Args:
            step: its number.
            loss: None where no shard had weight.
            grad_norm: of the reduced, unscaled gradient before clipping; None without one.
            overflow: the step overflows under loss scaling, as they do now and then, in forward or
                backward: its values are not looked at, and it is no incident unless the scale
                has had time to come down.
        """
        if overflow:
            return self._overflows(step)
        values = _values(loss, grad_norm)
        broken = {name: value for name, value in values.items() if not math.isfinite(value)}
        if broken:
            told = ", ".join(f"{name} {value}" for name, value in broken.items())
            return [
                Finding(
                    kind=IncidentKind.NON_FINITE,
                    message=f"step {step}: {told}",
                    seen={name: repr(value) for name, value in values.items()},
                )
            ]
        found = [self._spike(step, name, value) for name, value in values.items()]
        return [finding for finding in found if finding is not None]

    def take(self, *, loss: float | None, grad_norm: float | None, overflow: bool = False) -> None:
        """Lets a step that was judged become part of what later ones are compared with."""
        if overflow:
            self._num_odd["overflow"] = self._num_odd.get("overflow", 0) + 1
            return
        self._num_odd.pop("overflow", None)
        for name, value in _values(loss, grad_norm).items():
            if not math.isfinite(value):
                continue
            window = self._windows[name]
            if not window.is_spike(value):
                window.take(value)
                self._num_odd.pop(name, None)
                continue
            self._num_odd[name] = self._num_odd.get(name, 0) + 1
            if self._num_odd[name] >= self._length:
                self._windows[name] = window.fresh()
                self._windows[name].take(value)
                self._num_odd.pop(name)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        windows = {name: window.values for name, window in self._windows.items()}
        return {**windows, "num_odd": dict(self._num_odd)}

    def _overflows(self, step: int) -> list[Finding]:
        in_a_row = self._num_odd.get("overflow", 0) + 1
        if in_a_row < self._max_overflows:
            return []
        message = f"step {step}: {in_a_row} steps in a row overflow, however small the loss scale"
        seen = {"overflows": in_a_row}
        return [Finding(kind=IncidentKind.NON_FINITE, message=message, seen=seen)]

    def _spike(self, step: int, name: str, value: float) -> Finding | None:
        window = self._windows[name]
        if not window.is_spike(value):
            return None
        score, median = window.score(value) or 0.0, window.median
        kind = IncidentKind.LOSS_SPIKE if name == "loss" else IncidentKind.GRAD_SPIKE
        return Finding(
            kind=kind,
            message=(
                f"step {step}: {name} {value:.6g} stands out from the last "
                f"{len(window.values)} steps (median {median:.6g}, robust z-score {score:.1f})"
            ),
            seen={name: value, "median": median, "score": score if score < math.inf else "inf"},
        )


def _values(loss: float | None, grad_norm: float | None) -> dict[str, float]:
    given = {"loss": loss, "grad_norm": grad_norm}
    return {name: value for name, value in given.items() if value is not None}
