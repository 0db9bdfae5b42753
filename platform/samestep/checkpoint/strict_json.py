"""JSON as it is read here: nothing that two readers could take for different things."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from samestep.errors import CheckpointError


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity, no key twice.

    Raises:
        CheckpointError: `text` is none.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key stands twice in {[key for key, _ in pairs][:20]}")
    return found
