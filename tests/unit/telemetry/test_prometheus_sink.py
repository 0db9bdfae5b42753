from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from pages import SPEC, Open, scrape, value

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.incidents.record import Incident
from samestep.metric_names import METRICS, Metrics, MetricType, series_of
from samestep.names import TARGETS_DIR, Event, IncidentKind, TimePart
from samestep.telemetry.prometheus_sink import PrometheusSink
from samestep.telemetry.records import EventRecord
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.targets import announced
from samestep.telemetry.totals import MAX_USERS_METRICS, Totals


def test_the_page_shows_what_the_run_did(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    timing = {"step_s": 0.01, "data_wait_s": 0.5}
    attempt = tell_steps(recorder, 0, 4, lr=[0.1, 0.2], metrics={"a b": 0.5}, timing=timing)
    incident = Incident(kind=IncidentKind.HANG, step=3, attempt=attempt, message="m")
    recorder.record_incident(attempt, incident.to_json())
    saved = EventRecord(
        event=Event.CHECKPOINT_COMMITTED, step=4, attempt=attempt, time=5.5, fields={"bytes": 77}
    )
    recorder.push(attempt, "0", 2, [saved.to_json()])
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.LAST_CHECKPOINT) == 5.5
    assert value(samples, Metrics.LAST_CHECKPOINT_BYTES) == 77
    assert value(samples, Metrics.STEPS) == 4
    assert value(samples, Metrics.SAMPLES) == 32
    assert samples["samestep_data_wait_seconds_sum", (("run", "r"),)] == 4 * 0.01
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
    assert samples["samestep_compute_seconds_count", (("run", "r"),)] == 4
    assert value(samples, Metrics.LOSS_WEIGHT) == 32
    assert value(samples, Metrics.WORKERS_WANTED) == 1
    assert value(samples, Metrics.LAST_STEP) > 1e9
    assert recorder.status()["metrics_url"] == sink.url


def test_names_and_labels_are_as_prometheus_has_them() -> None:
    """As its documentation recommends: practices/naming."""
    for metric in METRICS:
        assert re.fullmatch(r"samestep(_[a-z0-9]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER), metric.name
        bare = metric.name.removesuffix("_total")
        assert bare.endswith(f"_{metric.unit}" if metric.unit else ""), metric.name
        assert not {"step", "epoch", "path", "run", "message"} & set(metric.labels), metric.name


def test_every_name_on_the_page_is_in_the_table_and_bears_the_run(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    tell_steps(recorder, 0, 2)
    known = {name for metric in METRICS for name in series_of(metric)}
    samples = scrape(sink.url)
    assert {name for name, _ in samples} <= known
    assert {dict(labels)["run"] for _, labels in samples} == {"r"}


def test_a_recorder_that_comes_back_goes_on_counting(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    tell_steps(recorder, 0, 6)
    tell_steps(recorder, 3, 8)
    before = scrape(sink.url)
    recorder.close()
    recorder, sink = open_page()
    recorder.drain()
    after = scrape(sink.url)
    counted = [m for m in METRICS if m.type is MetricType.COUNTER and not m.labels]
    for metric in counted:
        assert value(after, metric) == value(before, metric), metric.name
    assert value(after, Metrics.REDONE_STEPS) == 3
    assert value(after, Metrics.STEPS) == 8
    assert value(after, Metrics.ATTEMPTS) == 2


def test_steps_taken_again_move_the_time_of_the_last_step_but_no_counter(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    tell_steps(recorder, 0, 6)
    before = scrape(sink.url)
    tell_steps(recorder, 2, 4)
    after = scrape(sink.url)
    assert value(after, Metrics.STEPS) == value(before, Metrics.STEPS) == 6
    assert value(after, Metrics.LAST_STEP) > value(before, Metrics.LAST_STEP)
    assert value(after, Metrics.LOSS) == 1 / 6


def test_nothing_is_shown_that_no_step_gave(open_page: Open) -> None:
    recorder, sink = open_page()
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


def test_a_port_taken_by_another_program_is_refused_by_name(open_page: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} on 127\.0\.0\.1 is taken.*0 for any"):
            open_page(port=port)
    open_page(port=port)


def test_a_port_whose_owner_does_not_talk_http_is_refused_all_the_same(open_page: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def greet() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(InputError, match=rf"port {port} on 127\.0\.0\.1 is taken"):
            open_page(port=port)
        thread.join()


def test_two_runs_with_one_port_both_have_a_page_of_their_own(
    run: Storage, open_page: Open, tell_steps: Any
) -> None:
    first, first_sink = open_page()
    tell_steps(first, 0, 2)
    port = int(first_sink.target.rpartition(":")[2])
    other = Storage.at(f"{run.uri}-other")
    second, second_sink = open_page(run=other, name="other", port=port)
    tell_steps(second, 0, 5)
    assert value(scrape(first_sink.url), Metrics.STEPS) == 2
    samples = scrape(second_sink.url)
    assert samples[Metrics.STEPS.name, (("run", "other"),)] == 5
    texts = [item["text"] for item in second.status()["messages"]]
    assert f"metrics.port {port} is taken by the run r; this run takes another port" in texts
    storage = Storage.at(run.uri.rpartition("/")[0])
    assert announced(storage) == {"run": first_sink.target, "run-other": second_sink.target}
    (file,) = [name for name in storage.list(TARGETS_DIR) if "other" in name]
    labels = {"job": "samestep", "instance": other.uri}
    targets = [{"targets": [second_sink.target], "labels": labels}]
    assert json.loads(storage.read(f"{TARGETS_DIR}/{file}")) == targets


def test_an_address_of_another_machine_is_refused(open_page: Open) -> None:
    with pytest.raises(InputError, match=r"can't serve metrics on 192\.0\.2\.1:0"):
        open_page(host="192.0.2.1")


def test_a_closed_run_has_no_page_and_no_target(open_page: Open, run: Storage) -> None:
    recorder, sink = open_page()
    recorder.close()
    with pytest.raises(OSError, match="refused"):
        scrape(sink.url)
    assert announced(Storage.at(run.uri.rpartition("/")[0])) == {}


def test_what_waits_for_mlflow_is_shown(open_page: Open, tell_steps: Any) -> None:
    status = {"mlflow": {"up": False, "run_id": "abc", "num_steps": 1}}
    recorder, sink = open_page(tracking=lambda: status)
    tell_steps(recorder, 0, 4)
    samples = scrape(sink.url)
    assert value(samples, Metrics.TRACKING_UP) == 0
    assert value(samples, Metrics.TRACKING_WAITING) == 3
    (labels,) = [dict(ls) for name, ls in samples if name == Metrics.RUN_INFO.name]
    assert labels["mlflow_run_id"] == "abc"


def test_workers_are_shown_side_by_side_and_no_longer_than_their_attempt(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 4)
    for world_rank, own_s in enumerate([1.0, 3.0]):
        assert recorder.report(
            {
                "attempt": attempt,
                "world_rank": world_rank,
                "num_steps": 4,
                "num_samples": 16,
                "own_s": own_s,
                "host_bytes": 100,
                "host_limit_bytes": 1000,
                "num_dropped": world_rank,
            }
        )
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.STRAGGLER) == 3.0
    assert value(samples, Metrics.SLOWEST) == 1
    assert value(samples, Metrics.WORKER_STEP_SECONDS, world_rank="1") == 0.75
    assert value(samples, Metrics.WORKER_MEMORY, world_rank="0", memory="host") == 100
    assert value(samples, Metrics.WORKER_MEMORY_LIMIT, world_rank="0", memory="host") == 1000
    assert value(samples, Metrics.DROPPED) == 1
    recorder.end_attempt(attempt, "restarted")
    recorder.drain()
    names = {name for name, _ in scrape(sink.url)}
    assert not names & {Metrics.WORKER_MEMORY.name, Metrics.SLOWEST.name}
    assert not recorder.report({"attempt": attempt + 1})


def test_time_is_accounted_and_goodput_told(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    timing = {"step_s": 1e-6, "training_s": 1e-6, "elapsed_s": 1e-6}
    tell_steps(recorder, 0, 2, timing=timing)
    samples = scrape(sink.url)
    parts = {part: value(samples, Metrics.TIME, part=part) for part in TimePart}
    assert 0 < parts[TimePart.KEPT] <= 1e-6
    assert parts[TimePart.STARTING] > 0
    assert 0 < value(samples, Metrics.GOODPUT) < 1


@pytest.mark.parametrize(
    ("incident", "end", "cause"),
    [
        (IncidentKind.CRASH, None, "crash"),
        (None, None, "worker_lost"),
        (None, "interrupted", "resumed"),
    ],
)
def test_restarts_are_counted_by_what_ended_the_attempt_before(
    open_page: Open, tell_steps: Any, incident: IncidentKind | None, end: str | None, cause: str
) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 2)
    if incident is not None:
        told = Incident(kind=incident, step=1, attempt=attempt, message="m").to_json()
        recorder.record_incident(attempt, told)
    if end is not None:
        recorder.finish(attempt, {"status": end, "step": 2})
        recorder.close()
        recorder, sink = open_page()
    again = tell_steps(recorder, 2, 4)
    recovery = {"cause": "crash", "message": "", "planned": False, "workers": [2, 2]}
    recorder.recovered(again, {**recovery, "detected_s": None, "again_s": 0.5})
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.RESTARTS, cause=cause) == 1
    assert sum(v for (name, _), v in samples.items() if name == Metrics.RESTARTS.name) == 1
    recoveries = samples["samestep_recovery_seconds_count", (("run", "r"),)]
    assert recoveries == (0 if end else 1)


def test_recoveries_are_told_apart_by_whether_they_were_planned_and_by_where_the_state_was(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    tell_steps(recorder, 0, 4, source="start")
    again = tell_steps(recorder, 2, 5, source="checkpoint")
    fault = {"cause": "crash", "message": "lost", "planned": False, "workers": [2, 1]}
    recorder.recovered(again, {**fault, "detected_s": 0.25, "again_s": 0.75})
    grown = tell_steps(recorder, 5, 6, source="survivor")
    plan = {"cause": "grow", "message": "", "planned": True, "workers": [1, 2]}
    recorder.recovered(grown, {**plan, "detected_s": None, "again_s": 0.5})
    recorder.drain()
    samples = scrape(sink.url)
    for name, count, total in (
        ("detection", 1, 0.25),
        ("fault_standstill", 1, 0.75),
        ("planned_standstill", 1, 0.5),
    ):
        assert samples[f"samestep_{name}_seconds_count", (("run", "r"),)] == count
        assert samples[f"samestep_{name}_seconds_sum", (("run", "r"),)] == total
    causes = {"worker_lost": 1, "resized": 1, "resumed": 0}
    for cause, count in causes.items():
        assert value(samples, Metrics.RESTARTS, cause=cause) == count
    sources = {"start": 1, "checkpoint": 1, "survivor": 1, "snapshot": 0}
    for source, count in sources.items():
        assert value(samples, Metrics.RESTORES, source=source) == count
    assert value(samples, Metrics.REDONE_STEPS) == 2


def test_checkpoints_snapshots_and_audits_are_counted_where_a_step_tells_of_one(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    idle = {"step_s": 0.01, "training_s": 0.01, "checkpoint_s": 1e-6, "elapsed_s": 0.01}
    tell_steps(recorder, 0, 2, timing=idle)
    assert Metrics.LAST_SNAPSHOT.name not in {name for name, _ in scrape(sink.url)}
    kept = {"save_s": 0.5, "snapshot_s": 0.25, "snapshot_at_s": 1000.5, "audit_s": 0.125}
    tell_steps(recorder, 2, 3, timing={**idle, **kept})
    samples = scrape(sink.url)
    for name, total in (("checkpoint", 0.5), ("snapshot", 0.25), ("audit", 0.125)):
        assert samples[f"samestep_{name}_seconds_count", (("run", "r"),)] == 1
        assert samples[f"samestep_{name}_seconds_sum", (("run", "r"),)] == total
    assert value(samples, Metrics.LAST_SNAPSHOT) == 1000.5


def test_a_run_that_has_ended_wants_no_workers(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 2)
    recorder.finish(attempt, {"status": "done", "step": 2})
    recorder.drain()
    samples = scrape(sink.url)
    for metric in (Metrics.WORKERS, Metrics.WORKERS_WANTED, Metrics.WORKERS_MIN):
        assert value(samples, metric) == 0


def test_a_driver_that_died_without_a_word_is_a_cause_of_its_own(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, _ = open_page()
    tell_steps(recorder, 0, 2)
    recorder.close()
    recorder, sink = open_page()
    tell_steps(recorder, 2, 4)
    assert value(scrape(sink.url), Metrics.RESTARTS, cause="driver_lost") == 1


def test_saves_that_failed_are_counted(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 3)
    part = {"num_parts": 1, "world_rank": 0, "keep": 1, "files": {}, "digests": []}
    for step in (2, 3):
        given = {**part, "step": step, "try_number": 1, "manifest": None, "error": "no space left"}
        assert recorder.part(attempt, given)["state"] == "failed"
    recorder.drain()
    samples = scrape(sink.url)
    assert value(samples, Metrics.CHECKPOINT_FAILURES) == 2
    assert value(samples, Metrics.CHECKPOINTS) == 0
    assert value(samples, Metrics.INCIDENTS, kind="storage") == 1


def test_metrics_whose_names_never_end_are_so_many_series_at_most(make_step: Any) -> None:
    totals = Totals()
    for step in range(MAX_USERS_METRICS + 20):
        totals.show(make_step(step, metrics={f"loss_{step}": 1.0, "m": 2.0}))
    shown = [labels for metric, labels in totals.values if metric is Metrics.TRAIN]
    assert len(shown) == MAX_USERS_METRICS
    assert ("m",) in shown


def test_a_loss_that_is_nan_is_shown_as_such(open_page: Open, tell_steps: Any) -> None:
    recorder, sink = open_page()
    tell_steps(recorder, 0, 2, loss=math.nan)
    assert math.isnan(value(scrape(sink.url), Metrics.LOSS))


class Gateway(BaseHTTPRequestHandler):
    """A Pushgateway as far as a run sees it."""

    requests: ClassVar[list[tuple[str, str, str]]] = []

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.requests.append((self.command, self.path, body))
        self.send_response(202)
        self.end_headers()

    do_PUT = do_DELETE = _take

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_last_values_go_to_a_pushgateway_that_forgets_them_when_the_run_goes_on(
    open_page: Open, tell_steps: Any
) -> None:
    Gateway.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        recorder, _ = open_page(gateway=f"http://127.0.0.1:{server.server_port}")
        tell_steps(recorder, 0, 4)
        assert [method for method, _, _ in Gateway.requests] == ["DELETE"]
        recorder.close()
        server.shutdown()
        thread.join(5)
    (_, cleared, _), (method, path, body) = Gateway.requests
    assert (method, path) == ("PUT", cleared) == ("PUT", "/metrics/job/samestep/run/r")
    assert 'samestep_steps_total{run="r"} 4.0' in body


def test_a_pushgateway_that_is_away_holds_up_nothing(open_page: Open, tell_steps: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    recorder, _ = open_page(gateway=f"http://127.0.0.1:{port}")
    tell_steps(recorder, 0, 4)
    texts = [item["text"] for item in recorder.status()["messages"]]
    assert any("can't be reached" in text and str(port) in text for text in texts)
    recorder.close()


def test_two_thousand_workers_that_report_every_second_take_little_of_it(
    open_page: Open, tell_steps: Any
) -> None:
    recorder, sink = open_page()
    attempt = tell_steps(recorder, 0, 2)
    report = {
        "attempt": attempt,
        "num_steps": 1,
        "num_samples": 4,
        "own_s": 0.5,
        "host_bytes": 1,
        "host_limit_bytes": 2,
        "device_bytes": 1,
        "device_limit_bytes": 2,
    }
    started_s = time.process_time()
    for world_rank in range(2000):
        recorder.report({**report, "world_rank": world_rank})
    recorder.drain()
    took_s = time.process_time() - started_s
    with urllib.request.urlopen(sink.url, timeout=30) as answer:
        text = answer.read().decode()
    assert text.count("samestep_worker_step_seconds{") == 2000
    assert took_s < 0.5
    assert time.process_time() - started_s - took_s < 1.0
