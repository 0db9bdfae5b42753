from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.incidents.record import Incident
from samestep.names import METRICS, METRICS_FILE, IncidentKind, Metric, Metrics, MetricType
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.prometheus_sink import PrometheusSink
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord
from samestep.telemetry.sink import RunInfo

SPEC = parse_spec({"workload": "a:B", "batch_size": 8, "shards": 2, "max_steps": 100})
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Open = Callable[..., tuple[Recorder, PrometheusSink]]


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, metric: Metric, /, **labels: str) -> float:
    return samples[metric.name, tuple(sorted({"run": "r", **labels}.items()))]


@pytest.fixture
def open_recorder(run: Storage) -> Iterator[Open]:
    opened: list[Recorder] = []

    def make(run: Storage = run, name: str = "r", **options: Any) -> Any:
        sink = PrometheusSink(**{"host": "127.0.0.1", "port": 0, "interval_s": 0.0, **options})
        recorder = Recorder(run.uri, run=name, spec_yaml=dump_spec(SPEC), sinks=[sink])
        opened.append(recorder)
        return recorder, sink

    yield make
    for recorder in opened:
        recorder.close()


@pytest.fixture
def tell(make_step: Callable[..., StepRecord]) -> Callable[..., int]:
    def steps(recorder: Recorder, start: int, stop: int, **changes: Any) -> int:
        attempt = recorder.begin_attempt({"start_step": start, "mode": "ddp", "world_size": 2})
        records = [make_step(step, **changes).to_json() for step in range(start, stop)]
        recorder.push(attempt, "0", 1, records)
        recorder.drain()
        return attempt

    return steps


def test_the_page_shows_what_the_run_did(open_recorder: Open, tell: Any) -> None:
    recorder, sink = open_recorder()
    timing = {"step_s": 0.01, "data_wait_s": 0.5}
    attempt = tell(recorder, 0, 4, lr=[0.1, 0.2], metrics={"a b": 0.5}, timing=timing)
    incident = Incident(kind=IncidentKind.HANG, step=3, attempt=attempt, message="m")
    recorder.record_incident(attempt, incident.to_json())
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.STEPS) == 4
    assert value(samples, Metrics.SAMPLES) == 32
    assert value(samples, Metrics.DATA_WAIT_SECONDS) == 2.0
    assert value(samples, Metrics.LOSS) == 1 / 6
    assert value(samples, Metrics.GRAD_NORM) == 0.5
    assert value(samples, Metrics.LEARNING_RATE, group="1") == 0.2
    assert value(samples, Metrics.TRAIN, metric="a b") == 0.5
    assert value(samples, Metrics.WORKERS) == 2
    assert value(samples, Metrics.ATTEMPTS) == 1
    assert value(samples, Metrics.INCIDENTS, kind="hang") == 1
    assert value(samples, Metrics.INCIDENTS, kind="crash") == 0
    assert samples["samestep_step_seconds_count", (("run", "r"),)] == 4
    bucket = (("le", "0.015625"), ("run", "r"))
    assert samples["samestep_step_seconds_bucket", bucket] == 4
    assert value(samples, Metrics.LAST_STEP) > 1e9
    assert recorder.status()["metrics_url"] == sink.url


def test_every_name_on_the_page_is_in_the_table_and_bears_the_run(
    open_recorder: Open, tell: Any
) -> None:
    recorder, sink = open_recorder()
    tell(recorder, 0, 2)
    known = {metric.name for metric in METRICS} | {
        f"{metric.name}_{end}"
        for metric in METRICS
        if metric.type is MetricType.HISTOGRAM
        for end in ("bucket", "sum", "count")
    }
    samples = scrape(sink.url)
    assert {name for name, _ in samples} <= known
    assert {dict(labels)["run"] for _, labels in samples} == {"r"}


def test_a_recorder_that_comes_back_goes_on_counting(open_recorder: Open, tell: Any) -> None:
    recorder, sink = open_recorder()
    tell(recorder, 0, 6)
    tell(recorder, 3, 8)
    before = scrape(sink.url)
    recorder.close()
    recorder, sink = open_recorder()
    recorder.drain()
    after = scrape(sink.url)
    counted = [m for m in METRICS if m.type is MetricType.COUNTER and not m.labels]
    for metric in counted:
        assert value(after, metric) == value(before, metric), metric.name
    assert value(after, Metrics.REDONE_STEPS) == 3
    assert value(after, Metrics.STEPS) == 8
    assert value(after, Metrics.ATTEMPTS) == 2


def test_steps_taken_again_move_the_time_of_the_last_step_but_no_counter(
    open_recorder: Open, tell: Any
) -> None:
    recorder, sink = open_recorder()
    tell(recorder, 0, 6)
    before = scrape(sink.url)
    tell(recorder, 2, 4)
    after = scrape(sink.url)
    assert value(after, Metrics.STEPS) == value(before, Metrics.STEPS) == 6
    assert value(after, Metrics.LAST_STEP) > value(before, Metrics.LAST_STEP)
    assert value(after, Metrics.LOSS) == 1 / 6


def test_nothing_is_shown_that_no_step_gave(open_recorder: Open) -> None:
    recorder, sink = open_recorder()
    recorder.drain()
    names = {name for name, _ in scrape(sink.url)}
    assert Metrics.LOSS.name not in names
    assert Metrics.STEPS.name in names


def test_until_the_counters_are_added_up_the_page_answers_503(run: Storage) -> None:
    sink = PrometheusSink(host="127.0.0.1", port=0)
    sink.started(RunInfo(run=run, name="r", spec=SPEC))
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape(sink.url)
        sink.take([], more=True)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape(sink.url)
        sink.take([], more=False)
        assert value(scrape(sink.url), Metrics.STEPS) == 0
    finally:
        sink.close()


def test_a_port_taken_by_another_program_is_refused_by_name(open_recorder: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} on 127\.0\.0\.1 is taken.*0 for any"):
            open_recorder(port=port)
    open_recorder(port=port)


def test_two_runs_with_one_port_both_have_a_page_of_their_own(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    first, first_sink = open_recorder()
    tell(first, 0, 2)
    port = int(first_sink.target.rpartition(":")[2])
    other = Storage.at(f"{run.uri}-other")
    second, second_sink = open_recorder(run=other, name="other", port=port)
    tell(second, 0, 5)
    assert value(scrape(first_sink.url), Metrics.STEPS) == 2
    samples = scrape(second_sink.url)
    assert samples[Metrics.STEPS.name, (("run", "other"),)] == 5
    texts = [item["text"] for item in second.status()["messages"]]
    assert f"metrics.port {port} is taken by the run r; this run takes another port" in texts
    found = [json.loads(r.read(METRICS_FILE))[0]["targets"] for r in (run, other)]
    assert found == [[first_sink.target], [second_sink.target]]


def test_an_address_of_another_machine_is_refused(open_recorder: Open) -> None:
    with pytest.raises(InputError, match=r"can't serve metrics on 192\.0\.2\.1:0"):
        open_recorder(host="192.0.2.1")


def test_a_closed_run_has_no_page_and_no_target(open_recorder: Open, run: Storage) -> None:
    recorder, sink = open_recorder()
    recorder.close()
    with pytest.raises(OSError, match="refused"):
        scrape(sink.url)
    assert not run.exists(METRICS_FILE)


def test_what_waits_for_mlflow_is_shown(open_recorder: Open, tell: Any) -> None:
    status = {"mlflow": {"up": False, "run_id": "abc", "num_steps": 1}}
    recorder, sink = open_recorder(tracking=lambda: status)
    tell(recorder, 0, 4)
    samples = scrape(sink.url)
    assert value(samples, Metrics.TRACKING_UP) == 0
    assert value(samples, Metrics.TRACKING_WAITING) == 3
    (labels,) = [dict(ls) for name, ls in samples if name == Metrics.RUN_INFO.name]
    assert labels["mlflow_run_id"] == "abc"
