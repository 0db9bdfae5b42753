"""Whether two values are the same in type and bit: the independent check on what is written.

It shares no code with the encoding, so that a value the encoding mangles does not pass.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.checkpoint.encode import join


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """The path at which `a` and `b` first differ in type, order or any bit; None: nowhere.

    A NaN equals a NaN of the same bits; 0.0 and -0.0 differ; so do True, 1 and 1.0.
    """
    where = path or "the value"
    if type(a) is not type(b):
        return where
    if isinstance(a, dict):
        return _dicts(a, b, path)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return where
        pairs = enumerate(zip(a, b, strict=True))
        return _first(first_difference(x, y, f"{path}[{n}]") for n, (x, y) in pairs)
    if isinstance(a, set | frozenset):
        return None if _equal_sets(a, b) else where
    return None if _equal_leaves(a, b) else where


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type and in every bit."""
    return first_difference(a, b) is None


def _first(found: Any) -> str | None:
    return next((path for path in found if path is not None), None)


def _dicts(a: dict[Any, Any], b: dict[Any, Any], path: str) -> str | None:
    if len(a) != len(b) or not all(same(x, y) for x, y in zip(a, b, strict=True)):
        return path or "the value"
    pairs = zip(a.items(), b.values(), strict=True)
    return _first(first_difference(x, y, join(path, key)) for (key, x), y in pairs)


def _equal_sets(a: Any, b: Any) -> bool:
    rest = list(b)
    for x in a:
        at = next((n for n, y in enumerate(rest) if same(x, y)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _equal_leaves(a: Any, b: Any) -> bool:
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Tensor):
        return a is b or (
            a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        )
    return bool(a == b)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
