"""The fleet: does everybody's time become training?"""

from __future__ import annotations

from typing import Final

from expressions import (
    CHECKPOINT_AGE,
    INCIDENTS,
    MLFLOW_WAITS,
    RUN,
    TIME_PARTS,
    age,
    by_run,
    lately,
    rate,
    shares_of_time,
)
from panels import Dashboard, Row, series, stat, table

COLUMNS: Final = {
    "goodput": "samestep_goodput_ratio",
    "workers": "samestep_workers",
    "wanted": "samestep_workers_wanted",
    "steps": "samestep_steps_total",
    "of": "samestep_planned_steps",
    "loss": "samestep_loss",
}
KEPT: Final = f'sum(samestep_time_seconds_total{{{RUN},part="kept"}})'

RUNS: Final = table(
    "Runs",
    "Every run that is alive; the name leads to its dashboard.",
    *map(by_run, COLUMNS.values()),
    width=24,
    links=[("Dashboard", "/d/samestep-run?var-run=${__data.fields.run}")],
    transformations=[
        {"id": "joinByField", "options": {"byField": "run", "mode": "outer"}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {f"Time {n}": True for n in range(1, len(COLUMNS) + 1)},
                "renameByName": {
                    f"Value #{letter}": name for letter, name in zip("ABCDEF", COLUMNS, strict=True)
                },
            },
        },
    ],
)

NOW: Final = Row(
    title="Now",
    panels=[
        stat("Runs", "Runs that are alive.", f"count(samestep_run_info{{{RUN}}})"),
        stat(
            "Goodput",
            "Kept training over all time, of all runs together.",
            f"{KEPT} / sum(samestep_time_seconds_total{{{RUN}}})",
            unit="percentunit",
            thresholds=[(0, "red"), (0.5, "orange"), (0.8, "green")],
        ),
        stat("Workers", "Workers present.", f"sum(samestep_workers{{{RUN}}})"),
        stat(
            "Workers wanted",
            "Workers that the runs would take.",
            f"sum(samestep_workers_wanted{{{RUN}}})",
        ),
        stat(
            "Restarts, last day",
            "Attempts after faults.",
            f'sum(increase(samestep_restarts_total{{{RUN},cause!~"resumed|resized"}}[1d]))',
            thresholds=[(0, "green"), (5, "orange"), (20, "red")],
        ),
        stat(
            "Incidents, last day",
            "Of all kinds.",
            f"sum(increase(samestep_incidents_total{{{RUN}}}[1d]))",
            thresholds=[(0, "green"), (1, "orange")],
        ),
        stat(
            "Failed, last day",
            "Runs that ended with a failure.",
            f"sum(max by (run) (max_over_time(samestep_failed{{{RUN}}}[1d])))",
            thresholds=[(0, "green"), (1, "red")],
        ),
        RUNS,
    ],
)

OVER_TIME: Final = Row(
    title="Over time",
    panels=[
        series(
            "Goodput",
            "Kept training over all time since the run began.",
            {"{{run}}": by_run("samestep_goodput_ratio")},
            unit="percentunit",
        ),
        series(
            "Where the fleet's time goes",
            TIME_PARTS,
            {"{{part}}": shares_of_time()},
            unit="percentunit",
            stacked=True,
        ),
        series(
            "Workers",
            "Workers present, by run; 0 between attempts.",
            {"{{run}}": f"sum by (run) (samestep_workers{{{RUN}}})"},
            stacked=True,
        ),
        series(
            "Samples per second",
            "New samples, by run; steps taken again do not count.",
            {"{{run}}": rate("samestep_samples_total")},
        ),
        series(
            "Restarts by cause",
            "Attempts after the first, in an hour.",
            {"{{cause}}": lately("samestep_restarts_total", "cause", "1h")},
        ),
        series(
            "Incidents by kind",
            "In an hour.",
            {"{{kind}}": lately("samestep_incidents_total", "kind", "1h")},
        ),
        series(
            "Age of the last checkpoint",
            CHECKPOINT_AGE,
            {"{{run}}": age("samestep_last_checkpoint_timestamp_seconds")},
            unit="s",
        ),
        series(
            "Budget used",
            "The limit of each run that is nearest to its end.",
            {"{{run}}": by_run("samestep_budget_used_ratio")},
            unit="percentunit",
        ),
        series(
            "Steps that wait for MLflow",
            MLFLOW_WAITS,
            {"{{run}}": by_run("samestep_tracking_waiting_steps")},
        ),
    ],
)

FLEET: Final = Dashboard(
    uid="samestep-fleet",
    title="samestep: fleet",
    about="All runs: does the fleet's time become training?",
    one_run=False,
    annotations=[INCIDENTS],
    links=[("Incidents", "/d/samestep-incidents"), ("Ray", "/d/rayTrainDashboard")],
    rows=[NOW, OVER_TIME],
)
