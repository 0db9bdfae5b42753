"""Shows a run to Prometheus: one page, served by the recorder's process.

Counters are sums over the ledger, so workers, attempts and recorders may come and go without
resetting one. While a recorder that came back is still adding up, the page answers 503 rather
than with too little, which would look like a reset and a jump.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    delete_from_gateway,
    make_wsgi_app,
    push_to_gateway,
)
from prometheus_client.exposition import ThreadingWSGIServer

from samestep.errors import InputError
from samestep.metric_names import LABEL_RUN, Metrics
from samestep.names import THREAD_METRICS_SERVER
from samestep.telemetry import targets
from samestep.telemetry.prometheus_page import Page
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.spool import START, Line, Position

INTERVAL_S: Final = 0.25
POLL_S: Final = 0.25
"""How often the server looks whether it is to end."""
PROBE_TIMEOUT_S: Final = 1.0
PUSH_TIMEOUT_S: Final = 5.0
PATH: Final = "/metrics"
SCRAPE_S: Final = 15.0
"""Between two scrapes, as long as no two of them have told."""
MAX_SCRAPE_S: Final = 60.0
LATE_S: Final = 5.0
"""How long a scrape that is due is waited for."""
GATEWAY_ERRORS: Final = (OSError, ValueError, HTTPException)

logger = logging.getLogger(__name__)


class PrometheusSink:
    """A sink of the recorder, see `sink.Sink`.

    Args:
        host: address to listen on.
        port: TCP port; 0 for a free one.
        gateway: URL of a Pushgateway, which gets the last values when the run ends; None: none.
        tracking: status of the MLflow sink, None where there is none.
    """

    name = "prometheus"

    def __init__(
        self,
        *,
        host: str,
        port: int,
        gateway: str | None = None,
        tracking: Callable[[], Mapping[str, Any] | None] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.interval_s = interval_s
        self._host = host
        self._port = port
        self._gateway = gateway
        self._tracking = tracking
        self._ready = self._gateway_cleared = False
        self._scraped = threading.Condition()
        self._scraped_at: float | None = None
        self._scrape_s = SCRAPE_S
        self._num_seen = 0

    def started(self, info: RunInfo) -> Position:
        """Opens the page, so that a taken port is told before anything runs.

        Raises:
            InputError: the port is taken by something that is no run of samestep, or the address
                is none of this machine.
        """
        self._info = info
        self._page = Page(info=info, tracking=self._tracking)
        self._registry = CollectorRegistry()
        self._registry.register(self._page)
        app = make_wsgi_app(self._registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if not self._ready:
                start_response("503 Service Unavailable", [("Retry-After", "5")])
                return [b"the counters are being added up from the ledger\n"]
            self._note_scrape()
            return app(environ, start_response)

        self._server = self._listen(answer)
        port = self._server.server_port
        shown = socket.gethostname() if self._host in ("0.0.0.0", "::", "") else self._host
        self.target = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        self.url = f"http://{self.target}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": POLL_S},
            name=THREAD_METRICS_SERVER,
            daemon=True,
        )
        self._thread.start()
        targets.announce(info.run, self.target)
        info.say(f"metrics for Prometheus: {self.url}")
        return START

    def take(self, lines: Sequence[Line], *, more: bool) -> None:
        """Adds lines up; the page is served once the first look at the ledger is through."""
        with self._page.lock:
            for line in lines:
                self._page.totals.add(line.record)
            # Between attempts there are no workers, whatever late reports say.
            self._page.ranks.start(self._page.totals.present_attempt)
        self._ready = self._ready or not more
        if self._gateway is not None and not self._gateway_cleared:
            self._gateway_cleared = True
            self._clear_gateway(self._gateway)

    def live(self, record: StepRecord) -> None:
        """Shows the last step."""
        with self._page.lock:
            self._page.totals.show(record)

    def wants(self, report: WorkerReport) -> bool:
        """Every one."""
        return True

    def reports(self, found: Sequence[WorkerReport], num_dropped: int) -> None:
        """Shows the present workers."""
        with self._page.lock:
            for report in found:
                self._page.ranks.add(report)
            self._page.ranks.drop(num_dropped)

    def status(self) -> dict[str, Any]:
        """`metrics_url`: where the page is."""
        return {"metrics_url": self.url}

    def explain(self, error: BaseException) -> str:
        """What becomes of the page."""
        return f"the metrics at {self.url} stand still ({error}); training goes on"

    def wait_until_seen(self) -> bool:
        """Where an incident has happened since the last scrape, waits for the next one.

        Else the page of a run that ends with it would be gone before Prometheus could see it, and
        no alert could fire. A page that nobody has ever fetched is not waited for.
        """
        with self._page.lock:
            num_incidents = self._page.totals.num_incidents
        with self._scraped:
            if self._scraped_at is None:
                return False
            return self._scraped.wait_for(
                lambda: self._num_seen >= num_incidents,
                max(0.0, self._scraped_at + self._scrape_s + LATE_S - time.monotonic()),
            )

    def _note_scrape(self) -> None:
        with self._page.lock:
            num_incidents = self._page.totals.num_incidents
        now = time.monotonic()
        with self._scraped:
            if self._scraped_at is not None:
                self._scrape_s = min(now - self._scraped_at, MAX_SCRAPE_S)
            self._scraped_at, self._num_seen = now, num_incidents
            self._scraped.notify_all()

    def close(self) -> None:
        """Hands the last values to the Pushgateway, where there is one, and ends the server."""
        if self._gateway is not None and self._ready:
            self._push(self._gateway)
        targets.withdraw(self._info.run)  # first: nobody is to ask a page that is gone
        self.abandon()

    def abandon(self) -> None:
        """Ends the server alone: what leads to a page leads to another's by now."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _push(self, gateway: str) -> None:
        try:
            push_to_gateway(
                gateway,
                job=targets.JOB,
                registry=self._registry,
                grouping_key={LABEL_RUN: self._info.name},
                timeout=PUSH_TIMEOUT_S,
            )
        except GATEWAY_ERRORS as error:
            logger.warning(
                "run=%s the last values did not reach the Pushgateway %s: %s",
                self._info.name,
                gateway,
                error,
            )
            self._info.say(
                f"the Pushgateway at {gateway} did not take the last values ({error}); correct "
                "metrics.pushgateway"
            )

    def _clear_gateway(self, gateway: str) -> None:
        """Takes away what an earlier end of this run left there: the page has it all again."""
        try:
            delete_from_gateway(
                gateway,
                job=targets.JOB,
                grouping_key={LABEL_RUN: self._info.name},
                timeout=PUSH_TIMEOUT_S,
            )
        except GATEWAY_ERRORS as error:
            self._info.say(
                f"the Pushgateway at {gateway} can't be reached ({error}); training goes on, and "
                "the last values are sent there at the end"
            )

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
        except GATEWAY_ERRORS:  # also who answers, but not in HTTP
            return None
        for line in text.splitlines():
            if line.startswith(f"{Metrics.RUN_INFO.name}{{"):
                return str(line.partition(f'{LABEL_RUN}="')[2].partition('"')[0])
        return None


class _Silent(WSGIRequestHandler):
    """Does not write a line for each scrape."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
