"""Incidents: what went wrong, and what it cost."""

from __future__ import annotations

from typing import Final

from expressions import ATTEMPTS, INCIDENTS, RUN, lately, so_far
from panels import Dashboard, Row, series, table, without

RECOVERY: Final = "samestep_recovery_seconds"

WHAT: Final = Row(
    title="What",
    panels=[
        table(
            "Incidents",
            "By run and kind, since each run began.",
            so_far("samestep_incidents_total", "run, kind"),
            transformations=[without("Time")],
        ),
        table(
            "Restarts",
            "By run and cause, since each run began.",
            so_far("samestep_restarts_total", "run, cause"),
            transformations=[without("Time")],
        ),
        series(
            "Incidents over time",
            "In ten minutes, by kind.",
            {"{{kind}}": lately("samestep_incidents_total", "kind", "10m")},
        ),
        series(
            "Loss around it",
            "A gap is a loss that is not finite, or no step at all.",
            {"{{run}}": f"samestep_loss{{{RUN}}}"},
            lowest=None,
        ),
    ],
)

COST: Final = Row(
    title="What it cost",
    panels=[
        series(
            "Recovery",
            "From the last step of an attempt to the next attempt, detection included; the mean.",
            {"{{run}}": f"{RECOVERY}_sum{{{RUN}}} / ({RECOVERY}_count{{{RUN}}} > 0)"},
            unit="s",
            width=8,
        ),
        series(
            "Slow recoveries, last day",
            "95 % of them were faster; buckets double, so this is rough.",
            {
                "{{run}}": (
                    "histogram_quantile(0.95, "
                    f"sum by (le, run) (increase({RECOVERY}_bucket{{{RUN}}}[1d])))"
                )
            },
            unit="s",
            width=8,
        ),
        series(
            "Steps redone",
            "Since the run began.",
            {"{{run}}": f"samestep_redone_steps_total{{{RUN}}}"},
            width=8,
        ),
        series(
            "Time lost",
            "Redone, starting, waiting and idle since the run began.",
            {
                "{{part}}": (
                    "sum by (part) (samestep_time_seconds_total"
                    f'{{{RUN},part=~"redone|starting|waiting|idle"}})'
                )
            },
            unit="s",
            stacked=True,
        ),
        series(
            "Workers",
            "Present; 0 between attempts.",
            {"{{run}}": f"samestep_workers{{{RUN}}}"},
        ),
    ],
)

INCIDENT: Final = Dashboard(
    uid="samestep-incidents",
    title="samestep: incidents",
    about=(
        "What went wrong, and what it cost. `samestep show RUN` names each incident's folder in "
        "the run directory, with the message and the traceback."
    ),
    one_run=False,
    annotations=[ATTEMPTS, INCIDENTS],
    links=[
        ("Fleet", "/d/samestep-fleet"),
        ("Run", "/d/samestep-run?var-run=${run}"),
    ],
    rows=[WHAT, COST],
)
