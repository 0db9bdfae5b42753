"""A real Prometheus watches a real run that fails, grows, is killed and shrinks.

Every query of every panel and alert is put to it while the run lives.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.cluster.processes import session_of
from samestep.errors import ExitStatus
from samestep.metric_names import METRICS, Metrics, MetricType, series_of
from samestep.replay.summary import summarize
from samestep.telemetry.lease import holder
from samestep.telemetry.past import read_past
from samestep.telemetry.targets import announced

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
RUN = "story"
NUM_STEPS = 15  # of each act at least
STEPS = f'samestep_steps_total{{run="{RUN}"}}'
JOB = ROOT / "workloads" / "faulty" / "job.yaml"
SETTINGS = [
    *("args.raise_at=5", "args.position=15", "args.pause_s=0.1", "epochs=1000"),
    *("budget.worker_hours=100", "incidents.audit_every=5", "checkpoint.snapshot_every=5"),
]

# Alerts that this run gives no reason for; each is seen to fire in test_rules.py.
QUIET = {
    "SamestepRunStalled": "steps come all the time",
    "SamestepTooFewWorkers": "one worker is enough for it",
    "SamestepRestartStorm": "three restarts only",
    "SamestepBudgetNearlyUsed": "a hundred hours are far",
    "SamestepCheckpointTooOld": "a checkpoint every ten steps",
    "SamestepCheckpointsFail": "each save works",
    "SamestepLossNotFinite": "the loss is finite",
    "SamestepRunFailed": "it goes on",
    "SamestepStraggler": "both workers run on this machine",
    "SamestepTrackingBacklog": "MLflow is there",
    "SamestepWorkerMemoryHigh": "the model is tiny",
    "SamestepDivergence": "nothing differs",
    "SamestepTargetDown": "each page is announced when it is there and not longer",
}

# Queries that this run gives nothing to, beside those of QUIET alerts, and why.
EMPTY: dict[str, str] = {}

pytestmark = pytest.mark.timeout(900)


@dataclass(kw_only=True)
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


@dataclass(kw_only=True)
class Watched(Prometheus):
    """One whose run has one worker at last.

    Attributes:
        page: the run's page, since its second recorder.
        ranks: of the workers that this page showed when there were two.
        run: its directory.
        nodes: sessions of the nodes on which the two recorders were.
    """

    run: Storage
    page: str = ""
    ranks: set[str] = field(default_factory=set)
    nodes: list[int] = field(default_factory=list)


def ranks_of(page: str) -> set[str]:
    """Of the workers that a page tells of."""
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=30) as answer:
        return set(re.findall(r'world_rank="(\d+)"', answer.read().decode()))


def test_a_run_that_ends_with_an_incident_is_seen_to_have_failed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its page stays until the next scrape: else nobody would be told."""
    storage = tmp_path_factory.mktemp("runs")
    told = runpy.run_path(str(DASHBOARDS / "story.py"))
    settings = [
        f"storage={storage}",
        "tracking.enabled=false",
        "args.nan_at=20",
        "args.pause_s=0.2",
    ]
    command = [sys.executable, "-m", "samestep", "train", str(JOB), "--name", "ends"]
    command += ["--mode", "local", *(part for each in settings for part in ("--set", each))]
    with told["prometheus"](tmp_path_factory.mktemp("prometheus"), storage) as url:
        found = Prometheus(url=url, started=time.time())
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == ExitStatus.FAILED, done.stdout + done.stderr
        [incident] = summarize(Storage.at(str(storage / "ends"))).incidents
        when = f'{Metrics.LAST_INCIDENT.name}{{run="ends",kind="non_finite"}}'
        told["wait_until"](
            lambda: 0 <= found.value(f"max_over_time({when}[15m])") - incident.time < 60,
            "Prometheus knows of the incident",
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The Prometheus while the run has one worker, after all that befell it."""
    storage = tmp_path_factory.mktemp("runs")
    place = Storage.at(str(storage))
    (storage / "marks").mkdir()
    told = runpy.run_path(str(DASHBOARDS / "story.py"))
    wait_until = told["wait_until"]
    folder = tmp_path_factory.mktemp("prometheus")
    settings = [*SETTINGS, f"args.marker={storage / 'marks'}"]
    with told["prometheus"](folder, storage) as url:
        found = Watched(url=url, started=time.time(), run=place.child(RUN))

        def more_steps() -> None:
            wanted = found.value(STEPS) + NUM_STEPS
            wait_until(lambda: found.value(STEPS) >= wanted, f"Prometheus sees step {wanted}")

        def recorder() -> int:
            present = holder(found.run)
            assert present is not None
            return present.pid

        def rest(act: str) -> None:
            more_steps()
            if act == "grown":
                page = announced(place)[RUN]
                found.nodes.append(session_of(recorder()))
                os.kill(recorder(), signal.SIGKILL)
                wait_until(lambda: announced(place)[RUN] != page, "the page of another recorder")
                more_steps()
                found.nodes.append(session_of(recorder()))
                found.page = announced(place)[RUN]
                wait_until(lambda: len(ranks_of(found.page)) == 2, "a page of two workers")
                found.ranks = ranks_of(found.page)

        with told["story"](JOB, storage=storage, run=RUN, settings=settings, rest=rest):
            yield found


def expression(template: str) -> str:
    """As Grafana would ask it."""
    values = {"$__rate_interval": "15s", "$run": RUN, "$cluster": ".*"}
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def test_every_query_of_every_panel_returns_data(watched: Watched) -> None:
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
    assert len(empty) == len(EMPTY)
    assert num_queries > 60


def test_every_alert_is_evaluated_and_what_it_looks_at_is_there(watched: Watched) -> None:
    groups = watched.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    silent = set()
    for rule in rules:
        for selector in re.findall(r"(?:\w+:)*samestep_\w+(?::\w+)*(?:\{[^}]*\})?", rule["query"]):
            never = ("divergence|corruption", "attempt_started)", 'kind="non_finite"')
            if not any(text in selector for text in never):
                assert watched.points(selector), f"{rule['name']}: {selector}"
        if rule["type"] == "alerting" and not watched.points(rule["query"]):
            silent.add(rule["name"])
        elif rule["type"] == "recording":
            assert watched.points(rule["name"]), rule["name"]
    assert silent <= set(QUIET)


def test_no_counter_ever_goes_back(watched: Watched) -> None:
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


def test_the_run_is_told_as_it_was(watched: Watched) -> None:
    selector = f'{{run="{RUN}"}}'
    assert watched.value(f"{Metrics.WORKERS.name}{selector}") == 1
    assert watched.value(f"max_over_time({Metrics.WORKERS.name}{selector}[1h])") == 2
    causes = watched.now(f"sum by (cause) ({Metrics.RESTARTS.name}{selector} > 0)")
    assert {dict(labels)["cause"] for labels in causes} >= {"exception", "resized", "crash"}
    assert causes[("cause", "resized"),] >= 2
    assert watched.value(f"{Metrics.ATTEMPTS.name}{selector}") == 1 + sum(causes.values())
    assert watched.value(f"sum({Metrics.INCIDENTS.name}{selector})") >= 1
    assert watched.value(f"{Metrics.STRAGGLER.name}{selector} offset 1s") == 0  # one worker only
    assert watched.points(f"{Metrics.STRAGGLER.name}{selector}")
    # Parts of the time, of which the run's own clock and Prometheus' agree.
    accounted = watched.points(f"sum({Metrics.TIME.name}{selector})")[0]
    assert 0 < accounted[-1] <= time.time() - watched.started
    assert 0 < watched.value(f"{Metrics.GOODPUT.name}{selector}") < 1


def test_nothing_is_left_of_workers_that_are_gone(watched: Watched) -> None:
    """On the page of a recorder that showed them."""
    (target,) = watched.get("targets")["activeTargets"]
    assert target["scrapeUrl"] == f"http://{watched.page}/metrics"
    assert watched.ranks == {"0", "1"}
    assert ranks_of(watched.page) == {"0"}
    ranks = watched.now(f'{Metrics.WORKER_MEMORY.name}{{run="{RUN}"}}')
    assert {dict(labels)["world_rank"] for labels in ranks} == {"0"}
    assert len(watched.now(f'{Metrics.RUN_INFO.name}{{run="{RUN}"}}')) == 1
    assert len(watched.now('up{job="samestep"}')) == 1


def test_a_recorder_is_on_its_drivers_node_after_a_kill_too(watched: Watched) -> None:
    last = read_past(watched.run).attempts[-1]
    (worker,) = last.fields["pids"]
    assert watched.nodes[0] == watched.nodes[1] != session_of(worker)


def test_a_scrape_takes_well_under_a_second(watched: Watched) -> None:
    assert watched.value('avg_over_time(scrape_duration_seconds{job="samestep"}[1h])') < 0.5


def test_the_dashboard_can_be_drawn(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
