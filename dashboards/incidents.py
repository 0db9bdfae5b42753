"""Incidents: what went wrong, and what it cost."""

from __future__ import annotations

from typing import Final

from expressions import ATTEMPTS, INCIDENTS, RUN, by_run, lately, mean_so_far, so_far
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
            {"{{run}}": mean_so_far(RECOVERY)},
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
            "Since the run began, and for each restart.",
            {
                "{{run}}": f"samestep_redone_steps_total{{{RUN}}}",
                "{{run}}, per restart": (
                    f"{by_run('samestep_redone_steps_total')} / "
                    f"(sum by (run) (samestep_restarts_total{{{RUN}}}) > 0)"
                ),
            },
            width=8,
        ),
        series(
            "Faults: noticed after, training again after",
            "From the fault, as the controller of mode ddp has timed it; the means.",
            {
                "{{run}}: noticed": mean_so_far("samestep_detection_seconds"),
                "{{run}}: training again": mean_so_far("samestep_fault_standstill_seconds"),
            },
            unit="s",
            width=8,
        ),
        series(
            "Held up by what was planned",
            "Resizes, drains and rollbacks: until every worker was through a step again; the mean.",
            {"{{run}}": mean_so_far("samestep_planned_standstill_seconds")},
            unit="s",
            width=8,
        ),
        series(
            "Where the state came from",
            "Of attempts, since the run began. Survivors and snapshots lose few steps or none; a "
            "checkpoint all since it was taken.",
            {"{{run}}: {{source}}": so_far("samestep_restores_total", "run, source")},
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
