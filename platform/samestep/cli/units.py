"""Ages and sizes as people read them."""

from __future__ import annotations

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


def age_text(seconds: float) -> str:
    """In the largest unit that fits: `3 d`, `5 h`, `12 min`, `40 s`."""
    for unit, length_s in _UNITS:
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size_text(num_bytes: int | None) -> str:
    """In megabytes; `-` where it is not known."""
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"
