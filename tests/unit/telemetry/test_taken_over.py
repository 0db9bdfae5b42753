"""A recorder whose run another took over ends, and what it showed of the run stays the other's."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from recording import begin, job, take_over

from samestep.checkpoint.storage import Storage
from samestep.names import TRACKING_FILE
from samestep.telemetry.mlflow_sink import MlflowSink
from samestep.telemetry.prometheus_sink import PrometheusSink
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.sink import Sink
from samestep.telemetry.targets import announce, announced


class TrackedRun:
    """A run in MLflow that takes whatever it is given."""

    run_id, status, start_ms = "m", "RUNNING", 0

    def __init__(self) -> None:
        self.params: dict[str, str] = {}

    def set_status(self, status: str, time_ms: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[str]]]:
    """Where a Pushgateway is, and the methods of the requests that it got."""
    methods: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def _take(self) -> None:
            methods.append(self.command)
            self.send_response(202)
            self.end_headers()

        do_PUT = do_DELETE = _take

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", methods
        server.shutdown()
        thread.join(5)


@pytest.fixture
def taken_over(run: Storage, push: Any) -> Callable[[Sink], Recorder]:
    """A recorder that has delivered four steps to a sink, and lost the run then."""

    def make(sink: Sink) -> Recorder:
        recorder = Recorder(run.uri, run="r", spec_yaml=job(), sinks=[sink])
        push(recorder, begin(recorder), 1, 0, 3)
        assert recorder.drain() == []
        take_over(run, recorder)
        return recorder

    return make


def test_the_page_that_is_announced_stays_and_nothing_is_pushed(
    run: Storage, taken_over: Any, gateway: tuple[str, list[str]]
) -> None:
    url, methods = gateway
    sink = PrometheusSink(host="127.0.0.1", port=0, gateway=url, interval_s=0.0)
    recorder = taken_over(sink)
    announce(run, "elsewhere:1234")
    recorder.close()
    assert methods == ["DELETE"]  # at its start: what an earlier end had left there
    root, _, name = run.uri.rpartition("/")
    assert announced(Storage.at(root)) == {name: "elsewhere:1234"}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(sink.url, timeout=5)


def test_the_run_in_mlflow_goes_on_from_where_the_other_has_delivered_it_to(
    run: Storage, taken_over: Any
) -> None:
    tracked = TrackedRun()

    def connect(uri: str, **_: Any) -> Any:
        return tracked

    recorder = taken_over(MlflowSink("http://m", experiment="e", connect=connect, interval_s=0.0))
    there = json.dumps({**json.loads(run.read(TRACKING_FILE)), "next_step": 9}).encode()
    run.write(TRACKING_FILE, there)
    recorder.close()
    assert tracked.status == "RUNNING"
    assert run.read(TRACKING_FILE) == there
