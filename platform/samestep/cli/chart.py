"""A curve in characters: each has two by four dots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

EMPTY: Final = 0x2800
DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
LABEL_WIDTH: Final = 10


def chart(points: Sequence[tuple[int, float]], *, width: int, height: int) -> list[str]:
    """Lines of text with the curve, the axis of values at their left.

    Args:
        points: (step, finite value), by step.
        width: characters of a line.
        height: lines of the curve; one more tells the steps.
    """
    columns = max(1, width - LABEL_WIDTH - 1)
    if not points:
        return [""] * (height + 1)
    first, last = points[0][0], points[-1][0]
    line = _spread(points, 2 * columns, first, last)
    low = min(value for _, value in line)
    high = max(value for _, value in line)
    cells = [[EMPTY] * columns for _ in range(height)]
    before: int | None = None
    for x, value in line:
        row = _place(high - value, high - low, 4 * height)
        start = row if before is None else before
        # From the last height to this one, so that steep parts have no holes.
        for y in range(min(row, start), max(row, start) + 1):
            cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        before = row
    labels = {0: high, height - 1: low}
    lines = [
        f"{_label(labels.get(number)):>{LABEL_WIDTH}} {''.join(map(chr, row))}"
        for number, row in enumerate(cells)
    ]
    ends = f"{first}{last:>{max(1, columns - len(str(first)))}}"
    return [*lines, f"{'step':>{LABEL_WIDTH}} {ends}"]


def _spread(
    points: Sequence[tuple[int, float]], width: int, first: int, last: int
) -> list[tuple[int, float]]:
    """(column, mean of the points in it), and in between what lies on the line."""
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault(_place(step - first, last - first, width), []).append(value)
    means = [(x, sum(values) / len(values)) for x, values in sorted(found.items())]
    line = means[:1]
    for (x0, y0), (x1, y1) in pairwise(means):
        line += [(x, y0 + (y1 - y0) * (x - x0) / (x1 - x0)) for x in range(x0 + 1, x1 + 1)]
    return line


def _place(distance: float, length: float, size: int) -> int:
    return 0 if length <= 0 else min(size - 1, int(distance / length * size))


def _label(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
