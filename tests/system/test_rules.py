"""The alert rules as Prometheus itself reads them, each seen to fire and not to fire."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards" / "prometheus" / "rules.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series, and whether they make an alert fire at a minute: what it then says, and of what."""

    alert: str
    about: str
    series: dict[str, str]
    at: int
    description: str = ""
    labels: dict[str, str] = field(default_factory=lambda: {"run": "a"})

    @property
    def fires(self) -> bool:
        return bool(self.description)


def flat(value: float, minutes: int) -> str:
    return f"{value}x{minutes}"


def timed(name: str) -> str:
    """A series of the run in question."""
    return f'{name}{{run="a"}}'


BUDGET = 'samestep_budget_used_ratio{run="a",limit="worker_hours"}'
LIVES = {timed("samestep_workers_min"): flat(1, 240)}
ENDED = {timed("samestep_workers_min"): flat(0, 240), timed("samestep_workers"): flat(0, 240)}
STALLED = {
    timed("samestep_workers"): flat(2, 90),
    timed("samestep_step_seconds_sum"): flat(100, 90),
    timed("samestep_step_seconds_count"): flat(100, 90),
    timed("samestep_attempt_started_timestamp_seconds"): flat(60, 90),
}
TIME = "samestep_time_seconds_total"
LAST = 'samestep_last_incident_timestamp_seconds{{run="a",kind="{kind}"}}'
NOT_FINITE = (
    "Run a has a loss, gradient or weight that is not finite, and goes on with it or has ended."
)

CASES = [
    Case(
        alert="SamestepRunStalled",
        about="no step for twenty minutes",
        series={**STALLED, timed("samestep_last_step_timestamp_seconds"): flat(600, 90)},
        at=30,
        description="Run a has workers, but its last sign of progress is 20m 0s old.",
    ),
    Case(
        alert="SamestepRunStalled",
        about="no first step for an hour",
        series=STALLED,
        at=60,
        description="Run a has workers, but its last sign of progress is 59m 0s old.",
    ),
    Case(
        alert="SamestepRunStalled",
        about="steps come",
        series={**STALLED, timed("samestep_last_step_timestamp_seconds"): "0+60x90"},
        at=30,
    ),
    Case(
        alert="SamestepRunStalled",
        about="a step takes five minutes",
        series={
            **STALLED,
            timed("samestep_step_seconds_sum"): flat(30_000, 90),
            timed("samestep_last_step_timestamp_seconds"): flat(600, 90),
        },
        at=30,
    ),
    Case(
        alert="SamestepRunStalled",
        about="there are no workers",
        series={
            **STALLED,
            timed("samestep_workers"): flat(0, 90),
            timed("samestep_last_step_timestamp_seconds"): flat(600, 90),
        },
        at=30,
    ),
    Case(
        alert="SamestepTooFewWorkers",
        about="one of two for twenty minutes",
        series={
            timed("samestep_workers"): flat(1, 30),
            timed("samestep_workers_min"): flat(2, 30),
        },
        at=20,
        description=(
            "Run a has 1 workers, fewer than it can run with (workers.min), and takes no steps."
        ),
    ),
    Case(
        alert="SamestepTooFewWorkers",
        about="as few as it takes",
        series={
            timed("samestep_workers"): flat(2, 30),
            timed("samestep_workers_min"): flat(2, 30),
        },
        at=20,
    ),
    Case(
        alert="SamestepTooFewWorkers",
        about="the run has ended",
        series=ENDED,
        at=20,
    ),
    Case(
        alert="SamestepCheckpointTooOld",
        about="the run has ended",
        series={**ENDED, timed("samestep_last_checkpoint_timestamp_seconds"): flat(0, 240)},
        at=180,
    ),
    Case(
        alert="SamestepCheckpointsFail",
        about="three saves failed in a row",
        series={
            timed("samestep_checkpoint_failures_total"): "0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3",
            timed("samestep_checkpoints_total"): flat(7, 20),
        },
        at=16,
        description=("Saves of checkpoints of run a fail, and none worked in the last half hour."),
    ),
    Case(
        alert="SamestepCheckpointsFail",
        about="two failed and the next one worked",
        series={
            timed("samestep_checkpoint_failures_total"): "0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 2 2",
            timed("samestep_checkpoints_total"): "7 7 7 7 7 7 7 7 7 7 7 7 8 8 8 8 8",
        },
        at=16,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="the run has ended",
        series={**ENDED, timed("samestep_loss"): "1 1 NaN NaN NaN NaN NaN"},
        at=5,
    ),
    Case(
        alert="SamestepRestartStorm",
        about="a crash every minute",
        series={
            'samestep_restarts_total{run="a",cause="crash"}': "0 0 0 0 0+1x6 6x30",
        },
        at=12,
        description="Run a was restarted 6 times in half an hour.",
    ),
    Case(
        alert="SamestepRestartStorm",
        about="somebody stops and resumes it often",
        series={'samestep_restarts_total{run="a",cause="resumed"}': "0+1x30"},
        at=20,
    ),
    Case(
        alert="SamestepRestartStorm",
        about="its cluster grows and shrinks",
        series={
            'samestep_restarts_total{run="a",cause="resized"}': "0+1x30",
        },
        at=20,
    ),
    Case(
        alert="SamestepGoodputLow",
        about="a quarter is training",
        series={
            f'{TIME}{{run="a",part="kept"}}': "0+15x180",
            f'{TIME}{{run="a",part="data"}}': "0+45x180",
        },
        at=120,
        description="25% of the last hour of run a was training that is kept.",
    ),
    Case(
        alert="SamestepGoodputLow",
        about="three quarters are training",
        series={
            f'{TIME}{{run="a",part="kept"}}': "0+45x180",
            f'{TIME}{{run="a",part="data"}}': "0+15x180",
        },
        at=120,
    ),
    Case(
        alert="SamestepBudgetNearlyUsed",
        about="95 % of the worker hours",
        series={
            **LIVES,
            'samestep_budget_used_ratio{run="a",limit="worker_hours"}': flat(0.95, 30),
        },
        at=20,
        description=(
            "Run a has used 95% of its budget in worker_hours; at 100% it stops with a checkpoint."
        ),
        labels={"run": "a", "limit": "worker_hours"},
    ),
    Case(
        alert="SamestepBudgetNearlyUsed",
        about="half of it",
        series={**LIVES, BUDGET: flat(0.5, 30)},
        at=20,
    ),
    Case(
        alert="SamestepCheckpointTooOld",
        about="the last was three hours ago",
        series={**LIVES, timed("samestep_last_checkpoint_timestamp_seconds"): flat(0, 240)},
        at=180,
        description=(
            "Run a has had no checkpoint for 3h 0m 0s; losing all workers and "
            "their nodes would cost that much."
        ),
    ),
    Case(
        alert="SamestepCheckpointTooOld",
        about="there never was one",
        series={**LIVES, timed("samestep_attempt_started_timestamp_seconds"): flat(0, 240)},
        at=180,
        description=(
            "Run a has had no checkpoint for 3h 0m 0s; losing all workers and "
            "their nodes would cost that much."
        ),
    ),
    Case(
        alert="SamestepCheckpointTooOld",
        about="the attempt is old and its checkpoint new",
        series={
            **LIVES,
            timed("samestep_attempt_started_timestamp_seconds"): flat(0, 240),
            timed("samestep_last_checkpoint_timestamp_seconds"): "0+60x240",
        },
        at=180,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="NaN",
        series={**LIVES, timed("samestep_loss"): "1 1 NaN NaN NaN NaN NaN"},
        at=5,
        description=NOT_FINITE,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="infinite",
        series={**LIVES, timed("samestep_loss"): "1 1 Inf Inf Inf Inf Inf"},
        at=5,
        description=NOT_FINITE,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="the run has ended with it, and its page is gone",
        series={
            timed("samestep_workers_min"): "1 1 0 stale",
            timed("samestep_loss"): "1 1 1 stale",
            timed("samestep_failed"): "0 0 1 stale",
            LAST.format(kind="non_finite"): "_ _ 90 stale",
        },
        at=6,
        description=NOT_FINITE,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="such a step was skipped, and the run goes on",
        series={
            **LIVES,
            timed("samestep_loss"): flat(1, 20),
            timed("samestep_failed"): flat(0, 20),
            LAST.format(kind="non_finite"): "_ _ 90x18",
        },
        at=6,
    ),
    Case(
        alert="SamestepRunFailed",
        about="it ended, and its page is gone",
        series={timed("samestep_failed"): "0 0 1 stale"},
        at=6,
        description="Run a has ended with a failure.",
    ),
    Case(
        alert="SamestepRunFailed",
        about="it was done",
        series={timed("samestep_failed"): "0 0 0 stale"},
        at=6,
    ),
    Case(
        alert="SamestepLossNotFinite",
        about="large",
        series={**LIVES, timed("samestep_loss"): "1 1 1e30 1e30 1e30 1e30"},
        at=5,
    ),
    Case(
        alert="SamestepStraggler",
        about="twice the median",
        series={timed("samestep_straggler_ratio"): flat(2, 30)},
        at=20,
        description=(
            "The slowest worker of run a takes 2 times as long for a sample as the median one."
        ),
    ),
    Case(
        alert="SamestepStraggler",
        about="now and then",
        series={timed("samestep_straggler_ratio"): "2 2 2 2 2 1 2 2 2 2 2 1 2 2 2 2 2 1 2 2 2 2"},
        at=20,
    ),
    Case(
        alert="SamestepTrackingBacklog",
        about="it grows",
        series={timed("samestep_tracking_waiting_steps"): "0+60x60"},
        at=40,
        description="2400 steps of run a wait for MLflow, and their number grows.",
    ),
    Case(
        alert="SamestepTrackingBacklog",
        about="it is worked off",
        series={timed("samestep_tracking_waiting_steps"): "9000-60x60"},
        at=40,
    ),
    Case(
        alert="SamestepWorkerMemoryHigh",
        about="nearly all of it",
        series={
            'samestep_worker_memory_bytes{run="a",world_rank="3",memory="host"}': flat(95, 30),
            'samestep_worker_memory_limit_bytes{run="a",world_rank="3",memory="host"}': (
                flat(100, 30)
            ),
        },
        at=20,
        description="Worker 3 of run a uses 95% of its host memory.",
        labels={"run": "a", "world_rank": "3", "memory": "host"},
    ),
    Case(
        alert="SamestepWorkerMemoryHigh",
        about="half of it",
        series={
            'samestep_worker_memory_bytes{run="a",world_rank="3",memory="host"}': flat(50, 30),
            'samestep_worker_memory_limit_bytes{run="a",world_rank="3",memory="host"}': (
                flat(100, 30)
            ),
        },
        at=20,
    ),
    Case(
        alert="SamestepDivergence",
        about="one",
        series={LAST.format(kind="divergence"): "_ _ _ 170x20"},
        at=6,
        description=(
            "Run a has an incident of kind divergence; nothing of the differing "
            "state was committed."
        ),
        labels={"run": "a", "kind": "divergence"},
    ),
    Case(
        alert="SamestepDivergence",
        about="one that the only scrape of the run has seen",
        series={LAST.format(kind="divergence"): "_ _ 90 stale"},
        at=8,
        description=(
            "Run a has an incident of kind divergence; nothing of the differing "
            "state was committed."
        ),
        labels={"run": "a", "kind": "divergence"},
    ),
    Case(
        alert="SamestepDivergence",
        about="another incident",
        series={LAST.format(kind="crash"): "_ _ _ 170x20"},
        at=6,
    ),
    Case(
        alert="SamestepDivergence",
        about="the run was resumed long after it",
        series={LAST.format(kind="divergence"): "_x90 10x20"},
        at=100,
    ),
    Case(
        alert="SamestepIncident",
        about="one",
        series={LAST.format(kind="crash"): "_ _ _ 170x20"},
        at=6,
        description="Run a has an incident of kind crash.",
        labels={"run": "a", "kind": "crash"},
    ),
    Case(
        alert="SamestepIncident",
        about="none for more than an hour",
        series={LAST.format(kind="crash"): flat(0, 120)},
        at=70,
    ),
    Case(
        alert="SamestepTargetDown",
        about="no answer",
        series={'up{job="samestep",instance="/runs/a"}': flat(0, 20)},
        at=10,
        description=(
            "The page of /runs/a is announced but does not answer: the run's driver or "
            "its node is gone, or the network between is."
        ),
        labels={"job": "samestep", "instance": "/runs/a"},
    ),
    Case(
        alert="SamestepTargetDown",
        about="an answer, and another job's target away",
        series={
            'up{job="samestep",instance="/runs/a"}': flat(1, 20),
            'up{job="other",instance="/runs/b"}': flat(0, 20),
        },
        at=10,
    ),
]


def promtool(*arguments: object) -> None:
    result = subprocess.run(
        ["promtool", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_takes_the_rules_and_its_linter_finds_nothing() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_prometheus_takes_the_configuration() -> None:
    promtool("check", "config", RULES.with_name("prometheus.yml"))


def test_every_alert_has_cases_in_which_it_fires_and_in_which_it_does_not() -> None:
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == set(ALERTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.about}")
def test_an_alert_fires_when_it_should(case: Case, tmp_path: Path) -> None:
    alert: dict[str, Any] = {"eval_time": f"{case.at}m", "alertname": case.alert}
    if case.fires:
        rule = ALERTS[case.alert]
        told = {**rule["annotations"], "description": case.description}
        labels = {**case.labels, **rule["labels"]}
        alert["exp_alerts"] = [{"exp_labels": labels, "exp_annotations": told}]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        # Else either group may come first, and alerts see what was recorded a minute before.
        "group_eval_order": ["samestep-records", "samestep-alerts"],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in case.series.items()
                ],
                "alert_rule_test": [alert],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", path)
