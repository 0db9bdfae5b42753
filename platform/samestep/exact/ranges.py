"""Sets of steps as ranges: those whose batches a run leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class StepRanges:
    """Steps in ranges `[first, end)`, in order, apart from each other; made by `of`.

    Attributes:
        pairs: (first, end) of each.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[Sequence[int]]) -> StepRanges:
        """The union of some ranges, which may overlap; empty ones count for nothing."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted((int(first), int(end)) for first, end in pairs):
            if end <= first:
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        return cls(tuple(merged))

    def __contains__(self, step: int) -> bool:
        return any(first <= step < end for first, end in self.pairs)

    def covers(self, first: int, end: int) -> bool:
        """Whether every step of `[first, end)` is among them."""
        return any(a <= first and end <= b for a, b in self.pairs)

    def before(self, step: int) -> StepRanges:
        """Those before a step."""
        return StepRanges.of((first, min(end, step)) for first, end in self.pairs)

    def with_step(self, step: int) -> StepRanges:
        """The same and one step more."""
        return StepRanges.of([*self.pairs, (step, step + 1)])

    def to_json(self) -> list[list[int]]:
        """Plain data, for `of`."""
        return [list(pair) for pair in self.pairs]


NONE: Final = StepRanges()
"""No step."""
