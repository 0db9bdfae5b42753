from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.exact.sums import exact_sum, mean_of_sums, weighted_mean

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.floats()


def bits(value: float) -> str:
    return "nan" if math.isnan(value) else value.hex()


@given(
    values=st.lists(ANY | st.sampled_from([1e308, -1e308, 1.7e308]), max_size=20),
    seed=st.integers(0, 99),
)
def test_a_sum_does_not_depend_on_the_order_of_its_terms(values: list[float], seed: int) -> None:
    shuffled = list(values)
    random.Random(seed).shuffle(shuffled)
    assert bits(exact_sum(shuffled)) == bits(exact_sum(values))


@given(values=st.lists(st.floats(-1e300, 1e300), max_size=20))
def test_a_sum_is_the_true_one_rounded_once(values: list[float]) -> None:
    assert exact_sum(values) == float(sum(map(Fraction, values), Fraction(0)))


@given(terms=st.lists(st.tuples(FINITE, st.floats(0, 1e6)), max_size=8), seed=st.integers(0, 99))
def test_a_weighted_mean_does_not_depend_on_the_order(
    terms: list[tuple[float, float]], seed: int
) -> None:
    shuffled = list(terms)
    random.Random(seed).shuffle(shuffled)
    assert bits(weighted_mean(shuffled)) == bits(weighted_mean(terms))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([math.inf, 1.0], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.inf, math.nan], math.nan),
        ([1e308, 1e308, -1e308], 1e308),
    ],
)
def test_infinities_and_overflow_come_out_as_ieee_has_them(
    values: list[float], expected: float
) -> None:
    assert bits(exact_sum(values)) == bits(expected)


def test_means_leave_out_what_has_no_weight() -> None:
    assert weighted_mean([(math.nan, 0.0), (2.0, 3.0), (5.0, 1.0)]) == 2.75
    assert math.isnan(weighted_mean([(1.0, 0.0)]))
    assert mean_of_sums([(1.0, 2.0), (3.0, 3.0)]) == 0.8
    assert math.isnan(mean_of_sums([]))
