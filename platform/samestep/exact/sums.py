"""Sums that do not depend on the order of their terms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction


def exact_sum(values: Iterable[float]) -> float:
    """Correctly rounded sum of float64 numbers (`math.fsum`), with IEEE results for infinities.

    `math.fsum` raises where infinities of both signs meet, or where a partial sum overflows,
    which depends on the order of the terms.
    """
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        special = {term for term in terms if not math.isfinite(term)}
        if special:
            return sum(special)
        total = sum(map(Fraction, terms), Fraction(0))
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def weighted_mean(terms: Iterable[tuple[float, float]]) -> float:
    """Mean of (value, weight) pairs; NaN without weight."""
    pairs = [(value, weight) for value, weight in terms if weight > 0]
    total = exact_sum(weight for _, weight in pairs)
    if total == 0:
        return math.nan
    return exact_sum(value * weight for value, weight in pairs) / total


def mean_of_sums(terms: Iterable[tuple[float, float]]) -> float:
    """Mean from (total, count) pairs; NaN where nothing was counted."""
    pairs = list(terms)
    count = exact_sum(count for _, count in pairs)
    return exact_sum(total for total, _ in pairs) / count if count else math.nan
