"""How names and values of a run are written in MLflow, which takes few characters and short texts.

Names: letters, digits, `_`, `-`, `.`, space and `/` stay. Every other character becomes its code
point in hexadecimal between colons (`:2b:` for `+`), and so does a colon, so that two names never
meet. The same is done to a `/` or `.` that would make a path with empty, `.` or `..` parts. A name
that is still too long is cut, with a digest of the whole at its end.

Values: NaN stays NaN, and the infinities arrive as the largest doubles (MLflow's database has no
others). A long parameter is cut, says so, and bears a digest; `params.json` has it whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from samestep.names import Series
from samestep.telemetry.records import StepRecord

MAX_NAME: Final = 250
MAX_PARAM: Final = 500
"""Older servers take no more."""
MAX_TAG: Final = 5000
_ODD = re.compile(r"[^A-Za-z0-9_\-. /]")
_AMBIGUOUS = re.compile(r'[."]')
_SLASH = re.compile(r"^/|/$|(?<=/)/")
_DOTS = re.compile(r"(?:(?<=/)|^)\.(?=\.?(?:/|$))|^\.(?=\.)")


def tracked_name(name: str) -> str:
    """A name that MLflow takes; different names stay different."""
    text = _ODD.sub(_escape, name) or "::"
    # Only a name's first dot of `.` and `..` is escaped: that suffices for both.
    text = _DOTS.sub(_escape, _SLASH.sub(_escape, text))
    if len(text) <= MAX_NAME:
        return text
    digest = f":{hashlib.sha256(name.encode()).hexdigest()[:16]}:"
    return text[: MAX_NAME - len(digest)] + digest


def step_metrics(record: StepRecord) -> Iterator[tuple[str, float]]:
    """The points of a step as (name, value); what a step has not is left out."""
    if record.loss is not None:
        yield Series.LOSS, record.loss
    if record.grad_norm is not None:
        yield Series.GRAD_NORM, record.grad_norm
    for group, rate in enumerate(record.lr):
        yield f"{Series.LEARNING_RATE}/group_{group}" if group else Series.LEARNING_RATE, rate
    if record.skipped:
        yield Series.SKIPPED, 1.0
    for name, value in record.metrics.items():
        yield tracked_name(f"{Series.TRAIN_PREFIX}{name}"), value


def evaluation_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The points of an evaluation as (name, value)."""
    for name, value in metrics.items():
        yield tracked_name(f"{Series.EVALUATION_PREFIX}{name}"), value


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted paths to texts; everything but text as JSON.

    A key with a dot or a quote in it is quoted, so that no two paths meet.
    """
    flat: dict[str, str] = {}
    for key, value in data.items():
        path = prefix + (json.dumps(key) if _AMBIGUOUS.search(str(key)) else str(key))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value if isinstance(value, str) else json.dumps(value)
    return flat


def tracked_params(flat: Mapping[str, str]) -> dict[str, str]:
    """Parameters as MLflow takes them, by tracked name."""
    return {tracked_name(path): cut(value, MAX_PARAM) for path, value in flat.items()}


def cut(text: str, limit: int) -> str:
    """The text, or its beginning with a mark and a digest that tells long ones apart."""
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    mark = f"... [cut: {len(text)} characters, sha256 {digest}, whole in params.json]"
    return text[: limit - len(mark)] + mark


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """The items in parts of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _escape(found: re.Match[str]) -> str:
    return f":{ord(found.group()):x}:"
