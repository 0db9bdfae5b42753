"""A real Prometheus watches a real run that crashes, fails and goes on with fewer workers.

Every query of every panel and alert is put to it afterwards.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep.metric_names import METRICS, Metrics, MetricType, series_of

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
RULES = DASHBOARDS / "prometheus" / "rules.yaml"
RUN = "story"
PAUSE_S = 0.05
FAULTS = {"crash_at": 30, "raise_at": 70, "position": 15, "pause_s": 0.1}

# Alerts that this run gives no reason for; each is seen to fire in test_rules.py.
QUIET = {
    "SamestepRunStalled": "steps come all the time",
    "SamestepTooFewWorkers": "one worker is enough for it",
    "SamestepRestartStorm": "two restarts only",
    "SamestepBudgetNearlyUsed": "a hundred hours are far",
    "SamestepCheckpointTooOld": "a checkpoint every ten steps",
    "SamestepCheckpointsFail": "each save works",
    "SamestepLossNotFinite": "the loss is finite",
    "SamestepStraggler": "both workers run on this machine",
    "SamestepTrackingBacklog": "MLflow is there",
    "SamestepWorkerMemoryHigh": "the model is tiny",
    "SamestepDivergence": "nothing differs",
    "SamestepTargetDown": "each page is announced when it is there and not longer",
}

# Queries that this run gives nothing to, beside those of QUIET alerts.
EMPTY = {
    "samestep_planned_standstill_seconds": "its number of workers changes between two commands",
}

pytestmark = pytest.mark.timeout(900)


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        pause.wait(PAUSE_S)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """One that scrapes every second."""

    url: str
    started: float

    def get(self, what: str, **given: Any) -> Any:
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]

    def now(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The present value of each series."""
        found = self.get("query", query=expr)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}

    def value(self, expr: str) -> float:
        """The present value of the only series; 0 without one."""
        values = list(self.now(expr).values())
        assert len(values) < 2, values
        return values[0] if values else 0.0

    def points(self, expr: str) -> list[list[float]]:
        """The values of each series since the beginning, a second apart."""
        given = {"start": self.started, "end": time.time(), "step": 1}
        found = self.get("query_range", query=expr, **given)["result"]
        return [[float(value) for _, value in one["values"]] for one in found]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def prometheus(storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = RULES.read_text(encoding="utf-8").replace("interval: 30s", "interval: 1s")
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    config = yaml.safe_load((RULES.with_name("prometheus.yml")).read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    (pattern,) = discovery["files"]
    discovery |= {
        "files": [pattern.replace("../../runs", str(storage))],
        "refresh_interval": "1s",
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    found = Prometheus(url=f"http://{address}", started=time.time())

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{found.url}/-/ready", timeout=2):
                return True
        except OSError:
            return False

    try:
        wait_until(ready, 60, "Prometheus answers")
        yield found
    finally:
        process.terminate()
        process.wait(30)


def train(storage: Path, workers: int) -> subprocess.Popen[str]:
    settings = [f"args.{name}={value}" for name, value in FAULTS.items()]
    settings += [f"storage={storage}", f"args.marker={storage / 'marks'}", "epochs=1000"]
    settings += ["budget.worker_hours=100", "incidents.audit_every=5"]
    settings += ["checkpoint.snapshot_every=5"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "samestep", "train"),
            *(str(ROOT / "workloads" / "faulty" / "job.yaml"), "--name", RUN),
            *("--workers", str(workers)),
            *(word for setting in settings for word in ("--set", setting)),
        ],
        cwd=storage,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform"), "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stop(process: subprocess.Popen[str]) -> str:
    """Plans a stop, if it lives; the output."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return output


@pytest.fixture(scope="module")
def watched(prometheus: Prometheus, storage: Path) -> Iterator[Prometheus]:
    """The Prometheus while the run has one worker, after it had two, a crash and an exception."""
    (storage / "marks").mkdir()
    steps = f'samestep_steps_total{{run="{RUN}"}}'
    outputs = []
    for workers, until in ((2, 80), (1, 110)):
        process = train(storage, workers)
        try:
            wait_until(
                lambda: process.poll() is not None or prometheus.value(steps) >= until,  # noqa: B023
                300,
                f"{until} steps with {workers} workers",
            )
            if workers == 1:
                assert process.poll() is None, process.communicate()
                yield prometheus
        finally:
            outputs.append(stop(process))
    assert "crash at step 30" in outputs[0]
    assert process.returncode == 3, outputs[-1]


def expression(template: str) -> str:
    """As Grafana would ask it."""
    values = {"$__rate_interval": "15s", "$run": RUN, "$cluster": ".*"}
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def test_every_query_of_every_panel_returns_data(watched: Prometheus) -> None:
    empty, num_queries = [], 0
    for path in sorted((DASHBOARDS / "grafana").glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        asked = [
            (panel["title"], target["expr"])
            for panel in dashboard["panels"]
            for target in panel.get("targets", [])
        ]
        asked += [(item["name"], item["expr"]) for item in dashboard["annotations"]["list"]]
        for title, template in asked:
            num_queries += 1
            points = watched.points(expression(template))
            if not any(map(math.isfinite, (value for line in points for value in line))):
                empty.append(f"{path.stem}: {title}: {template}")
    unexpected = [line for line in empty if not any(name in line for name in EMPTY)]
    assert unexpected == []
    assert len(empty) == 2
    assert num_queries > 60


def test_every_alert_is_evaluated_and_what_it_looks_at_is_there(watched: Prometheus) -> None:
    groups = watched.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    silent = set()
    for rule in rules:
        for selector in re.findall(r"(?:\w+:)*samestep_\w+(?::\w+)*(?:\{[^}]*\})?", rule["query"]):
            if "divergence|corruption" not in selector and "attempt_started)" not in selector:
                assert watched.points(selector), f"{rule['name']}: {selector}"
        if rule["type"] == "alerting" and not watched.points(rule["query"]):
            silent.add(rule["name"])
        elif rule["type"] == "recording":
            assert watched.points(rule["name"]), rule["name"]
    assert silent <= set(QUIET)


def test_no_counter_ever_goes_back(watched: Prometheus) -> None:
    counted = [
        name
        for metric in METRICS
        if metric.type is not MetricType.GAUGE
        for name in series_of(metric)
    ]
    for name in counted:
        found = watched.points(f"{name} + 0")
        assert found, name
        for values in found:
            assert values == sorted(values), name
        assert set(watched.now(f"resets({name}[1h])").values()) == {0.0}, name


def test_the_run_is_told_as_it_was(watched: Prometheus) -> None:
    selector = f'{{run="{RUN}"}}'
    assert watched.value(f"{Metrics.WORKERS.name}{selector}") == 1
    assert watched.value(f"max_over_time({Metrics.WORKERS.name}{selector}[1h])") == 2
    assert watched.value(f"{Metrics.ATTEMPTS.name}{selector}") >= 3
    assert watched.value(f"sum({Metrics.RESTARTS.name}{selector})") >= 2
    assert watched.value(f"sum({Metrics.INCIDENTS.name}{selector})") >= 1
    assert watched.value(f"{Metrics.STRAGGLER.name}{selector} offset 1s") == 0  # one worker only
    assert watched.points(f"{Metrics.STRAGGLER.name}{selector}")
    # Parts of the time, of which the run's own clock and Prometheus' agree.
    accounted = watched.points(f"sum({Metrics.TIME.name}{selector})")[0]
    assert 0 < accounted[-1] <= time.time() - watched.started
    assert 0 < watched.value(f"{Metrics.GOODPUT.name}{selector}") < 1


def test_nothing_is_left_of_workers_that_are_gone(watched: Prometheus) -> None:
    ranks = watched.now(f'{Metrics.WORKER_MEMORY.name}{{run="{RUN}"}}')
    assert {dict(labels)["world_rank"] for labels in ranks} == {"0"}
    assert len(watched.now(f'{Metrics.RUN_INFO.name}{{run="{RUN}"}}')) == 1
    assert len(watched.now('up{job="samestep"}')) == 1


def test_a_scrape_takes_well_under_a_second(watched: Prometheus) -> None:
    assert watched.value('avg_over_time(scrape_duration_seconds{job="samestep"}[1h])') < 0.5


def test_the_dashboard_can_be_drawn(
    watched: Prometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "run.png"
    times = ["--start", str(watched.started), "--end", str(time.time())]
    arguments = ["draw.py", watched.url, RUN, *times, "--out", str(picture)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(DASHBOARDS / "draw.py"), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    keep = os.environ.get("SAMESTEP_TEST_PICTURE")
    if keep:
        Path(keep).write_bytes(picture.read_bytes())
