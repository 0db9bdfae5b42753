"""JSON from a file that anybody may have written: bounded, finite, and of the shape that is asked.

Nothing here trusts a size, a type or a key that a file gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from samestep.checkpoint.strict_json import parse_json
from samestep.errors import BundleError, SamestepError

MAX_BYTES: Final = 256 << 20
MAX_DEPTH: Final = 40

Kinds = type | tuple[type, ...]
NUMBER: Final = (int, float)


def read_json(data: bytes, what: str, *, max_bytes: int = MAX_BYTES) -> Any:
    """The plain data that a file holds.

    Args:
        data: the file.
        what: names it in messages.
        max_bytes: a longer one is refused unread.

    Raises:
        BundleError: no strict JSON in UTF-8, too long, too deep, or with a number that no float
            holds.
    """
    if len(data) > max_bytes:
        raise BundleError(f"{what} has {len(data)} bytes; at most {max_bytes} are read")
    with refusing(what):
        value = parse_json(data.decode("utf-8"))
        _check(value, what)
        return value


def fields(data: Any, what: str, kinds: Mapping[str, Kinds]) -> dict[str, Any]:
    """An object with exactly these keys, each with a value of its kind (bool is no int).

    Raises:
        BundleError: it is none; names the key.
    """
    if type(data) is not dict:
        raise BundleError(f"{what} should be an object, but is {_shown(data)}")
    missing, extra = kinds.keys() - data.keys(), data.keys() - kinds.keys()
    if missing or extra:
        told = [f"{key!r} is missing" for key in sorted(missing)]
        told += [f"{key!r} is unknown" for key in sorted(extra)]
        raise BundleError(f"{what}: {', '.join(told[:5])}")
    for key, kind in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(data[key]) not in allowed:
            names = " or ".join(one.__name__ for one in allowed)
            raise BundleError(f"{what}: {key} should be {names}, but is {_shown(data[key])}")
    return data


def items(data: Any, what: str, kind: Kinds, *, limit: int) -> list[Any]:
    """A list of at most `limit` values of a kind.

    Raises:
        BundleError: it is none.
    """
    allowed = kind if isinstance(kind, tuple) else (kind,)
    if type(data) is not list or len(data) > limit:
        raise BundleError(f"{what} should be a list of at most {limit}, but is {_shown(data)}")
    for value in data:
        if type(value) not in allowed:
            raise BundleError(f"{what} holds {_shown(value)}")
    return data


def count(value: Any, what: str) -> int:
    """A whole number from 0 on that fits 63 bits.

    Raises:
        BundleError: it is none.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise BundleError(f"{what} should be a number from 0 on, but is {_shown(value)}")
    return value


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What goes wrong meanwhile is the file's fault.

    Raises:
        BundleError: instead of whatever a library raises on odd content.
    """
    try:
        yield
    except BundleError:
        raise
    except SamestepError as error:
        raise BundleError(f"{what}: {error}") from error
    except Exception as error:  # of odd content anything may come, in torch as in Python itself
        raise BundleError(f"{what} is malformed ({type(error).__name__}: {error})") from error


def _check(value: Any, what: str) -> None:
    """Walks without recursion, so that depth can do no harm."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise BundleError(f"{what} holds a number that is too large for a float")
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise BundleError(f"{what} is nested more than {MAX_DEPTH} levels deep")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
