"""Shows a run to Prometheus: one page, served by the recorder's process.

Counters are sums over the ledger, so workers, attempts and recorders may come and go without
resetting one. While a recorder that came back is still adding up, the page answers 503 rather
than with too little, which would look like a reset and a jump.
"""

from __future__ import annotations

import errno
import json
import math
import socket
import threading
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from samestep.errors import InputError
from samestep.names import (
    LABEL_RUN,
    METRICS_FILE,
    STEP_SECONDS_BUCKETS,
    THREAD_METRICS_SERVER,
    Event,
    IncidentKind,
    Metric,
    Metrics,
    MetricType,
    Tag,
)
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.spool import START, Line, Position

INTERVAL_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 1.0
PATH: Final = "/metrics"

Labels = tuple[str, ...]


class Totals:
    """The values of all metrics, as sums over the lines of a ledger; for one thread at a time."""

    def __init__(self) -> None:
        self.values: dict[tuple[Metric, Labels], float] = {}
        self.buckets = [0] * (len(STEP_SECONDS_BUCKETS) + 1)
        self.step_seconds = 0.0
        self.num_steps = 0
        self.attempt = 0
        self.mode = ""
        self._started: tuple[int, int] | None = None
        for metric in (Metrics.STEPS, Metrics.SAMPLES, Metrics.ATTEMPTS, Metrics.REDONE_STEPS):
            self.values[metric, ()] = 0.0
        self.values[Metrics.DATA_WAIT_SECONDS, ()] = 0.0
        for kind in IncidentKind:
            self.values[Metrics.INCIDENTS, (str(kind),)] = 0.0

    def add(self, record: StepRecord | EventRecord) -> None:
        """Takes in a line of the ledger."""
        if isinstance(record, EventRecord):
            self._add_event(record)
            return
        self.show(record)
        if record.step < self.num_steps:
            return  # written again under other numerics
        self.num_steps = record.step + 1
        self._count(Metrics.STEPS)
        self._count(Metrics.SAMPLES, record.samples)
        self._count(Metrics.DATA_WAIT_SECONDS, record.timing.get("data_wait_s", 0.0))
        seconds = record.timing.get("step_s")
        if seconds is not None:
            self.buckets[bisect_left(STEP_SECONDS_BUCKETS, seconds)] += 1
            self.step_seconds += seconds
        if self._started is not None:  # through with what was there when the attempt began
            start_step, known_steps = self._started
            self._count(Metrics.REDONE_STEPS, max(0, known_steps - start_step))
            self._started = None

    def show(self, record: StepRecord) -> None:
        """Shows the values of a step, without counting it."""
        self._show(Metrics.LOSS, record.loss)
        self._show(Metrics.GRAD_NORM, record.grad_norm)
        self._show(Metrics.LAST_STEP, record.time)
        for group, rate in enumerate(record.lr):
            self._show(Metrics.LEARNING_RATE, rate, str(group))
        for name, value in record.metrics.items():
            self._show(Metrics.TRAIN, value, name)

    def _add_event(self, record: EventRecord) -> None:
        fields = record.fields
        match record.event:
            case Event.ATTEMPT_STARTED:
                self._count(Metrics.ATTEMPTS)
                self._show(Metrics.WORKERS, fields.get("world_size", 0))
                self.attempt, self.mode = record.attempt, str(fields.get("mode", ""))
                start_step = int(fields.get("start_step", record.step))
                self._started = start_step, int(fields.get("known_steps", start_step))
            case Event.ATTEMPT_ENDED:
                if self._started is not None:
                    self._count(Metrics.REDONE_STEPS, fields.get("redone", 0))
                    self._started = None
                self._show(Metrics.WORKERS, 0)
            case Event.CHECKPOINT_COMMITTED:
                self._show(Metrics.LAST_CHECKPOINT, record.time)
            case Event.EVALUATION:
                for name, value in fields.get("metrics", {}).items():
                    self._show(Metrics.EVALUATION, value, name)
            case Event.INCIDENT:
                self._count(Metrics.INCIDENTS, 1, str(fields.get("kind", "")))
            case _:
                pass

    def _count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        self.values[metric, labels] = self.values.get((metric, labels), 0.0) + amount

    def _show(self, metric: Metric, value: float | None, *labels: str) -> None:
        if value is not None:
            self.values[metric, labels] = float(value)


@dataclass(kw_only=True, eq=False)
class _Page(Collector):
    """Turns totals into families for a scrape."""

    run: str
    totals: Totals
    about: Mapping[str, str]
    tracking: Callable[[], Mapping[str, Any] | None]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def collect(self) -> Iterator[Family]:
        """All series at one moment."""
        with self.lock:
            values = dict(self.totals.values)
            buckets, seconds = list(self.totals.buckets), self.totals.step_seconds
            num_steps = self.totals.num_steps
            attempt, mode = str(self.totals.attempt), self.totals.mode
        tracking = (self.tracking() or {}).get("mlflow") or {}
        if tracking:
            if tracking["up"] is not None:
                values[Metrics.TRACKING_UP, ()] = float(tracking["up"])
            waiting = max(0, num_steps - int(tracking["num_steps"]))
            values[Metrics.TRACKING_WAITING, ()] = float(waiting)
        labels = (
            attempt,
            mode,
            str(tracking.get("run_id") or ""),
            self.about.get(Tag.JOB_ID, ""),
            self.about.get(Tag.VERSION, ""),
        )
        values[Metrics.RUN_INFO, labels] = 1.0
        yield from self._families(values)
        yield self._histogram(buckets, seconds)

    def _families(self, values: Mapping[tuple[Metric, Labels], float]) -> Iterable[Family]:
        found: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for (metric, labels), value in values.items():
            if metric not in found:
                make = (
                    CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
                )
                found[metric] = make(metric.name, metric.help, labels=(LABEL_RUN, *metric.labels))
            found[metric].add_metric((self.run, *labels), value)
        return found.values()

    def _histogram(self, counts: Sequence[int], seconds: float) -> Family:
        family = HistogramMetricFamily(
            Metrics.STEP_SECONDS.name, Metrics.STEP_SECONDS.help, labels=(LABEL_RUN,)
        )
        total, buckets = 0, []
        for bound, count in zip((*STEP_SECONDS_BUCKETS, math.inf), counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        family.add_metric((self.run,), buckets, seconds)
        return family


class PrometheusSink:
    """A sink of the recorder, see `sink.Sink`.

    Args:
        host: address to listen on.
        port: TCP port; 0 for a free one.
        tracking: status of the MLflow sink, None where there is none.
    """

    name = "prometheus"

    def __init__(
        self,
        *,
        host: str,
        port: int,
        tracking: Callable[[], Mapping[str, Any] | None] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.interval_s = interval_s
        self._host = host
        self._port = port
        self._tracking = tracking
        self._totals = Totals()
        self._ready = False

    def started(self, info: RunInfo) -> Position:
        """Opens the page, so that a taken port is told before anything runs.

        Raises:
            InputError: the port is taken by something that is no run of samestep, or the address
                is none of this machine.
        """
        self._info = info
        self._page = _Page(
            run=info.name, totals=self._totals, about=info.about, tracking=self._tracking
        )
        registry = CollectorRegistry()
        registry.register(self._page)
        app = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if not self._ready:
                start_response("503 Service Unavailable", [("Retry-After", "5")])
                return [b"the counters are being added up from the ledger\n"]
            return app(environ, start_response)

        self._server = self._listen(answer)
        port = self._server.server_port
        shown = socket.gethostname() if self._host in ("0.0.0.0", "::", "") else self._host
        self.target = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        self.url = f"http://{self.target}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name=THREAD_METRICS_SERVER,
            daemon=True,
        )
        self._thread.start()
        self._write_target()
        info.say(f"metrics for Prometheus: {self.url}")
        return START

    def take(self, lines: Sequence[Line], *, more: bool) -> None:
        """Adds lines up; the page is served once the first look at the ledger is through."""
        with self._page.lock:
            for line in lines:
                self._totals.add(line.record)
        self._ready = self._ready or not more

    def live(self, record: StepRecord) -> None:
        """Shows the last step."""
        with self._page.lock:
            self._totals.show(record)

    def status(self) -> dict[str, Any]:
        """`metrics_url`: where the page is."""
        return {"metrics_url": self.url}

    def explain(self, error: BaseException) -> str:
        """What becomes of the page."""
        return f"the metrics at {self.url} stand still ({error}); training goes on"

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        self._info.run.delete(METRICS_FILE)

    def _listen(self, answer: Any) -> WSGIServer:
        try:
            return self._bind(answer, self._port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
                raise InputError(
                    f"can't serve metrics on {self._host}:{self._port} ({reason}); set "
                    "metrics.host to an address of this machine (127.0.0.1, 0.0.0.0) and "
                    "metrics.port to 0 or a port above 1023"
                ) from error
            owner = self._run_at_port()
            if owner is None and not self._info.returning:
                raise InputError(
                    f"port {self._port} on {self._host} is taken by another program; set "
                    "metrics.port to a free port, or to 0 for any"
                ) from error
        server = self._bind(answer, 0)
        taken_by = f"the run {owner}" if owner else "another program"
        self._info.say(
            f"metrics.port {self._port} is taken by {taken_by}; this run takes another port"
        )
        return server

    def _bind(self, answer: Any, port: int) -> WSGIServer:
        family = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0][0]
        # Without reuse_port, which newer Pythons set: two runs would share a port unnoticed.
        settings = {"address_family": family, "allow_reuse_port": False}
        kind = type("_Server", (ThreadingWSGIServer,), settings)
        return make_server(self._host, port, answer, kind, _Silent)

    def _run_at_port(self) -> str | None:
        """Name of the run whose page is at the taken port, if it is one's."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::", "") else self._host
        host = f"[{host}]" if ":" in host else host
        try:
            with urllib.request.urlopen(
                f"http://{host}:{self._port}{PATH}", timeout=PROBE_TIMEOUT_S
            ) as answer:
                text = answer.read(10_000_000).decode()
        except (OSError, ValueError):
            return None
        for line in text.splitlines():
            if line.startswith(f"{Metrics.RUN_INFO.name}{{"):
                return str(line.partition(f'{LABEL_RUN}="')[2].partition('"')[0])
        return None

    def _write_target(self) -> None:
        """For Prometheus' `file_sd_configs`: `files: [<storage>/*/metrics.json]`."""
        targets = [{"targets": [self.target], "labels": {"job": "samestep"}}]
        self._info.run.write(METRICS_FILE, json.dumps(targets).encode())


class _Silent(WSGIRequestHandler):
    """Does not write a line for each scrape."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
