"""How much memory a tensor spans: what a file says of it must not fill the reader's."""

from __future__ import annotations

import math
from typing import Final

from samestep.checkpoint.layout import Layout
from samestep.errors import CheckpointError

MAX_SPREAD: Final = 64
"""A tensor with strides may span so many times its own bytes; one that spans more is kept dense."""
FREE_SPREAD_BYTES: Final = 1 << 20


def check_layout(layout: Layout, *, name: str) -> None:
    """Refuses a layout from a file that no tensor has, or that would take far more memory.

    Raises:
        CheckpointError: names the tensor.
    """
    numbers = (*layout.shape, *layout.strides)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise CheckpointError(f"{name}: impossible layout {layout}")
    layout.check(name=name)
    if not is_compact(layout):
        raise CheckpointError(f"{name}: {layout} spans far more memory than it has elements")


def is_compact(layout: Layout) -> bool:
    """Whether it spans no more than may be."""
    num_bytes = math.prod(layout.shape) * 16
    span = 1 + sum(stride * (size - 1) for stride, size in layout.significant_strides)
    return span <= max(FREE_SPREAD_BYTES, MAX_SPREAD * num_bytes)
