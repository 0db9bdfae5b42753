"""Incidents on a run's page: nobody may miss those that end the run, and the page with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pages import Open, scrape, value

from samestep.incidents.record import Incident
from samestep.metric_names import Metrics
from samestep.names import IncidentKind
from samestep.telemetry import prometheus_sink
from samestep.telemetry.recorder import Recorder


def note_incident(recorder: Recorder, attempt: int, kind: IncidentKind) -> Incident:
    incident = Incident(kind=kind, step=1, attempt=attempt, message="m", time=1234.5)
    recorder.record_incident(attempt, incident.to_json())
    return incident


def test_the_last_incident_of_a_kind_and_a_run_that_failed_are_shown(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 3)
    note_incident(recorder, attempt, IncidentKind.NON_FINITE)
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.LAST_INCIDENT, kind="non_finite") > 1e9
    assert value(samples, Metrics.FAILED) == 0
    recorder.finish(attempt, {"status": "failed", "step": 3})
    recorder.drain()
    assert value(scrape(sink.url), Metrics.FAILED) == 1
    tell_steps(recorder, 3, 4)
    assert value(scrape(sink.url), Metrics.FAILED) == 0


def test_a_page_that_nobody_fetches_is_not_waited_for(
    open_page: Open, tell_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_sink, "SCRAPE_S", 1e6)  # pytest ends what waits for it
    recorder, sink = open_page()
    note_incident(recorder, tell_steps(recorder, 0, 3), IncidentKind.NON_FINITE)
    recorder.drain()
    assert not sink.wait_until_seen()


def test_an_incident_is_waited_for_until_a_scrape_has_seen_it(
    open_page: Open, tell_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_sink, "SCRAPE_S", 1e6)
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 3)
    scrape(sink.url)
    assert sink.wait_until_seen()  # nothing has happened since
    note_incident(recorder, attempt, IncidentKind.NON_FINITE)
    seen: list[bool] = []
    ending = threading.Thread(target=lambda: (recorder.drain(), seen.append(True)))
    ending.start()
    while value(scrape(sink.url), Metrics.INCIDENTS, kind="non_finite") == 0:
        assert not seen
    ending.join(30)
    assert seen


def test_a_scrape_that_does_not_come_is_waited_for_no_longer_than_one_should(
    open_page: Open, tell_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_sink, "SCRAPE_S", 0.1)
    monkeypatch.setattr(prometheus_sink, "LATE_S", 0.1)
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 3)
    scrape(sink.url)
    note_incident(recorder, attempt, IncidentKind.NON_FINITE)
    recorder.drain()
    assert not sink.wait_until_seen()
