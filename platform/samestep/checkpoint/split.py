"""Which worker writes which bytes of a state: equal parts, the same whoever computes them.

Pure: a function of the tensors' sizes and the number of parts alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

CUT_BYTES: Final = 1 << 20
"""Tensors below this size are never cut: they go whole into the part that most of them lies in."""
GRAIN_BYTES: Final = 4096
"""Cuts inside a tensor lie at multiples of this, so never inside an element."""


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A tensor as the split sees it.

    Attributes:
        name: of the tensor.
        num_bytes: of its elements.
        can_cut: its elements lie in memory in C order, so that a part of them can be taken.
    """

    name: str
    num_bytes: int
    can_cut: bool = True


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes `start` to `stop` of a tensor's elements in C order; `is_whole`: all of them."""

    name: str
    start: int
    stop: int
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return self.stop - self.start


def split(tensors: Sequence[Sized], num_parts: int) -> list[list[Piece]]:
    """Cuts a sequence of tensors into `num_parts` runs of about equal size.

    Every byte is in exactly one piece; pieces and parts are in the order of the tensors. Parts may
    be empty. A part has at most `CUT_BYTES` more than its share, unless a tensor can't be cut.
    """
    assert num_parts >= 1, f"a state is split into at least one part, got {num_parts}"
    ends = list(accumulate(item.num_bytes for item in tensors))
    starts = [end - item.num_bytes for end, item in zip(ends, tensors, strict=True)]
    total = ends[-1] if ends else 0
    cuts = [0, *(_cut(tensors, starts, total * p // num_parts) for p in range(1, num_parts))]
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    for item, start in zip(tensors, starts, strict=True):
        end = start + item.num_bytes
        # Of equal cuts only the last begins a part that is not empty.
        place = bisect_right(cuts, start) - 1
        while True:
            stop = min(end, cuts[place + 1]) if place + 1 < num_parts else end
            first = max(start, cuts[place])
            parts[place].append(
                Piece(
                    name=item.name,
                    start=first - start,
                    stop=stop - start,
                    is_whole=(first, stop) == (start, end),
                )
            )
            if stop == end:
                break
            place = bisect_right(cuts, stop) - 1
    return parts


def _cut(tensors: Sequence[Sized], starts: Sequence[int], wanted: int) -> int:
    """Where a cut wanted after so many bytes is made."""
    place = bisect_right(starts, wanted) - 1
    if place < 0:
        return 0
    item, start = tensors[place], starts[place]
    if item.can_cut and item.num_bytes >= CUT_BYTES:
        return start + (wanted - start) // GRAIN_BYTES * GRAIN_BYTES
    return start if 2 * (wanted - start) < item.num_bytes else start + item.num_bytes
