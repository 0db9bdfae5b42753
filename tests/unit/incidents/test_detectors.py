from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.incidents.detectors import (
    LEAST_SCALE,
    Detectors,
    Finding,
    Window,
    overflows_to_least_scale,
)
from samestep.names import IncidentKind

FINITE = st.floats(min_value=-1e6, max_value=1e6)


def make(**fields: Any) -> Detectors:
    defaults = {"length": 8, "least": 4, "threshold": 10.0, "max_overflows": 32}
    return Detectors(**{**defaults, **fields})


def feed(detectors: Detectors, losses: list[float], *, start: int = 0) -> list[list[Finding]]:
    found = []
    for n, loss in enumerate(losses):
        found.append(detectors.judge(step=start + n, loss=loss, grad_norm=1.0))
        detectors.take(loss=loss, grad_norm=1.0)
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_at_the_first_step(value: float) -> None:
    (found,) = make().judge(step=0, loss=value, grad_norm=1.0)
    assert found.kind is IncidentKind.NON_FINITE
    assert found.message == f"step 0: loss {value}"
    (found,) = make().judge(step=3, loss=1.0, grad_norm=value)
    assert found.message == f"step 3: grad_norm {value}"


@pytest.mark.parametrize(
    ("init_scale", "backoff_factor", "num"),
    [(65536.0, 0.5, 32), (65536.0, 0.9, 211), (1e38, 0.5, 143)],
)
def test_overflows_are_ordinary_until_the_scale_is_down(
    init_scale: float, backoff_factor: float, num: int
) -> None:
    assert overflows_to_least_scale(init_scale, backoff_factor) == num
    assert (
        init_scale * backoff_factor**num <= LEAST_SCALE < init_scale * backoff_factor ** (num - 1)
    )


def test_overflows_under_loss_scaling_are_an_incident_only_when_the_scale_does_not_help() -> None:
    detectors = make()
    for step in range(100):
        overflow = step % 32 != 31
        found = detectors.judge(step=step, loss=math.nan, grad_norm=math.inf, overflow=overflow)
        assert found == [] or not overflow
        detectors.take(loss=1.0, grad_norm=1.0, overflow=overflow)
    detectors = make()
    for step in range(31):
        assert not detectors.judge(step=step, loss=math.inf, grad_norm=math.inf, overflow=True)
        detectors.take(loss=math.inf, grad_norm=math.inf, overflow=True)
    (finding,) = detectors.judge(step=31, loss=math.inf, grad_norm=math.inf, overflow=True)
    assert finding.kind is IncidentKind.NON_FINITE
    assert finding.message.startswith("step 31: 32 steps in a row overflow")


def test_a_step_without_weight_is_not_judged() -> None:
    assert make().judge(step=0, loss=None, grad_norm=None) == []


def test_a_spike_is_told_with_median_and_score() -> None:
    detectors = make()
    assert not any(feed(detectors, [1.0, 1.1, 0.9, 1.0, 1.2]))
    (found,) = detectors.judge(step=5, loss=9.0, grad_norm=1.0)
    assert found.kind is IncidentKind.LOSS_SPIKE
    assert "loss 9 stands out from the last 5 steps (median 1, robust z-score 54.0)" in (
        found.message
    )
    (found,) = detectors.judge(step=6, loss=1.0, grad_norm=50.0)
    assert found.kind is IncidentKind.GRAD_SPIKE


def test_nothing_is_a_spike_before_the_window_has_enough_steps() -> None:
    assert not any(feed(make(), [1.0, 1000.0, 1.0]))


def test_a_fall_is_no_spike() -> None:
    assert not any(feed(make(), [5.0, 5.1, 4.9, 5.0, 5.0, 0.1]))


def test_a_plateau_with_a_hair_of_noise_is_no_spike() -> None:
    assert not any(feed(make(), [1.0] * 8 + [1.0005, 1.0, 1.002]))


def test_spikes_stay_out_of_the_window_until_they_are_the_new_level() -> None:
    detectors = make()
    feed(detectors, [1.0] * 8)
    found = feed(detectors, [100.0] * 8, start=8)
    assert all(found)
    assert not any(feed(detectors, [100.0] * 8, start=16))


@given(st.lists(FINITE, max_size=60), st.integers(0, 59))
def test_a_restart_at_any_step_changes_no_finding(losses: list[float], cut: int) -> None:
    straight = make()
    whole = feed(straight, losses)
    first = make()
    head = feed(first, losses[:cut])
    second = make(state=first.state)
    assert head + feed(second, losses[cut:], start=len(losses[:cut])) == whole
    assert second.state == straight.state


@given(st.lists(FINITE, min_size=4, max_size=8), FINITE)
def test_a_score_does_not_depend_on_the_order_of_the_window(
    values: list[float], value: float
) -> None:
    def window(kept: list[float]) -> Window:
        return Window(length=8, least=4, threshold=10.0, values=kept)

    assert window(values).score(value) == window(values[::-1]).score(value)
