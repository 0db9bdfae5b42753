"""A line of values by step as an inline SVG: no script, no network, colours from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 900
HEIGHT: Final = 190
LEFT: Final = 70
RIGHT: Final = 14
TOP: Final = 26
BOTTOM: Final = 34
LOG_RATIO: Final = 100.0
"""Positive values that span more than this are drawn by their logarithm."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        step: where.
        text: what, shown when the mouse rests on it.
        is_step: it is the step of the report.
    """

    step: int
    text: str
    is_step: bool = False


def line_chart(title: str, values: Mapping[int, float | None], marks: Sequence[Mark]) -> str:
    """The chart of one quantity.

    Args:
        title: name of the quantity.
        values: by step; None and what is not finite are drawn as crosses at the top.
        marks: in the range of steps or not.
    """
    finite = {step: v for step, v in values.items() if v is not None and math.isfinite(v)}
    if not values:
        return ""
    scale = _Scale.of(list(values), list(finite.values()))
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)} by step">',
        f'<text class="title" x="{LEFT}" y="15">{escape(title)}'
        f"{' (logarithmic)' if scale.log else ''}</text>",
        *_axes(scale),
        *_marks(scale, marks),
        *_lines(scale, values, finite),
        *_crosses(scale, values),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    first: int
    last: int
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[float]) -> _Scale:
        log = bool(values) and min(values) > 0 and max(values) / min(values) > LOG_RATIO
        shown = [math.log10(value) for value in values] if log else list(values)
        low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return cls(first=min(steps), last=max(steps), low=low - room, high=high + room, log=log)

    def x(self, step: float) -> float:
        span = max(1, self.last - self.first)
        return LEFT + (step - self.first) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        shown = math.log10(value) if self.log else value
        share = (shown - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """Values worth a line across."""
        if self.log:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            every = max(1, len(powers) // 4)
            return [10.0**power for power in powers[::every]] or [
                10 ** ((self.low + self.high) / 2)
            ]
        rough = (self.high - self.low) / 4
        unit: float = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        start = math.ceil(self.low / step)
        return [step * n for n in range(start, math.floor(self.high / step) + 1)]


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{value:.4g}</text>"
        )
    every = max(1, _nice((scale.last - scale.first) / 8))
    start = -(-scale.first // every) * every
    for step in range(start, scale.last + 1, every):
        x = scale.x(step)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{step}</text>'
        )
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
    )
    return parts


def _nice(rough: float) -> int:
    if rough <= 1:
        return 1
    unit = 10 ** math.floor(math.log10(rough))
    return next(int(unit * factor) for factor in (1, 2, 5, 10) if unit * factor >= rough)


def _marks(scale: _Scale, marks: Sequence[Mark]) -> list[str]:
    parts = []
    bottom = HEIGHT - BOTTOM
    for mark in marks:
        if not scale.first <= mark.step <= scale.last:
            continue
        x = scale.x(mark.step)
        if mark.is_step:
            parts.append(f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        else:
            parts.append(
                f'<path class="event" d="M{x:.1f} {bottom - 9} l4.5 9 h-9 z">'
                f"<title>{escape(mark.text)}</title></path>"
            )
    return parts


def _lines(
    scale: _Scale, values: Mapping[int, float | None], finite: Mapping[int, float]
) -> list[str]:
    """Broken where a value is missing; a lone one is a dot."""
    runs: list[list[int]] = [[]]
    for step in sorted(values):
        if step in finite:
            runs[-1].append(step)
        elif runs[-1]:
            runs.append([])
    parts = []
    for run in runs:
        points = [f"{scale.x(step):.1f},{scale.y(finite[step]):.1f}" for step in run]
        if len(points) > 1:
            parts.append(f'<polyline class="line" points="{" ".join(points)}"/>')
        dots = run if len(run) <= 60 else []
        parts += [
            f'<circle class="dot" cx="{scale.x(step):.1f}" cy="{scale.y(finite[step]):.1f}" '
            f'r="2.2"><title>step {step}: {finite[step]:.6g}</title></circle>'
            for step in dots
        ]
    return parts


def _crosses(scale: _Scale, values: Mapping[int, float | None]) -> list[str]:
    parts = []
    for step, value in values.items():
        if value is None or math.isfinite(value):
            continue
        x, y = scale.x(step), TOP + 7
        parts.append(
            f'<path class="cross" d="M{x - 5:.1f} {y - 5} l10 10 m0 -10 l-10 10">'
            f"<title>step {step}: {value}</title></path>"
        )
    return parts


def pixels(rows: Sequence[Sequence[float | None]], *, side: int = 6) -> str:
    """A picture in grey, values in 0..1; what is not finite in the colour of errors."""
    if not rows:
        return ""
    width, height = len(rows[0]) * side, len(rows) * side
    cells = [
        f'<rect x="{x * side}" y="{y * side}" width="{side}" height="{side}" '
        + ('class="broken"/>' if value is None else f'fill="rgb({_grey(value)})"/>')
        for y, row in enumerate(rows)
        for x, value in enumerate(row)
    ]
    return (
        f'<svg class="picture" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'shape-rendering="crispEdges">{"".join(cells)}</svg>'
    )


def _grey(value: float) -> str:
    level = round(255 * value)
    return f"{level},{level},{level}"
