"""One run: is it alive, does it learn, how fast, where does its time go?"""

from __future__ import annotations

from typing import Final

from expressions import (
    ATTEMPTS,
    CHECKPOINT_AGE,
    INCIDENTS,
    MLFLOW_WAITS,
    RESIZES,
    RUN,
    TIME_PARTS,
    age,
    by_run,
    mean,
    mean_so_far,
    quantile,
    rate,
    shares_of_time,
    so_far,
)
from panels import Dashboard, Panel, Query, Row, series, stat, table, without

MLFLOW: Final = {
    "type": "textbox",
    "name": "mlflow",
    "label": "MLflow",
    "query": "http://localhost:5000",
    "current": {"text": "http://localhost:5000", "value": "http://localhost:5000"},
}
OTHER_COLUMNS: Final = without("Time", "Value", "__name__")

ALIVE: Final = Row(
    title="Is it alive?",
    panels=[
        stat(
            "Last step",
            "Since the last step came in.",
            age("samestep_last_step_timestamp_seconds"),
            unit="s",
            thresholds=[(0, "green"), (120, "orange"), (600, "red")],
        ),
        stat(
            "Attempt began",
            "Since the present attempt began.",
            age("samestep_attempt_started_timestamp_seconds"),
            unit="s",
        ),
        stat("Workers", "Workers present.", by_run("samestep_workers")),
        stat(
            "Progress",
            "Steps taken of those planned.",
            f"{by_run('samestep_steps_total')} / {by_run('samestep_planned_steps')}",
            unit="percentunit",
        ),
        stat("Epoch", "Of the last step, from 0.", by_run("samestep_epoch")),
        stat(
            "Goodput",
            "Kept training over all time since the run began.",
            by_run("samestep_goodput_ratio"),
            unit="percentunit",
            thresholds=[(0, "red"), (0.5, "orange"), (0.8, "green")],
        ),
        table(
            "About the run",
            "Attempt, mode, numerics, and where else it is told of.",
            f"samestep_run_info{{{RUN}}}",
            height=4,
            links=[("The run in MLflow", "${mlflow}/#/runs/${__data.fields.mlflow_run_id}")],
            transformations=[OTHER_COLUMNS],
        ),
        table(
            "Versions",
            "What the run's recorder runs with.",
            f"samestep_build_info{{{RUN}}}",
            height=4,
            transformations=[OTHER_COLUMNS],
        ),
    ],
)

LEARNING: Final = Row(
    title="Does it learn?",
    panels=[
        series(
            "Training loss",
            "Of the last step; a loss that is not finite leaves a gap.",
            {"loss": f"samestep_loss{{{RUN}}}"},
            lowest=None,
        ),
        series(
            "Evaluation",
            "Metrics of the last evaluation.",
            {"{{metric}}": f"samestep_evaluation_metric{{{RUN}}}"},
            lowest=None,
        ),
        series(
            "The workload's own metrics",
            "Of the last step.",
            {"{{metric}}": f"samestep_train_metric{{{RUN}}}"},
            lowest=None,
            width=8,
        ),
        series(
            "Gradient norm",
            "Global, of the last step, before clipping.",
            {"gradient norm": f"samestep_grad_norm{{{RUN}}}"},
            width=8,
        ),
        series(
            "Learning rate and skipped updates",
            "Rate by parameter group; updates that were not applied, in all.",
            {
                "group {{group}}": f"samestep_learning_rate{{{RUN}}}",
                "updates skipped": f"samestep_skipped_steps_total{{{RUN}}}",
            },
            width=8,
        ),
    ],
)

SPEED: Final = Row(
    title="How fast?",
    panels=[
        series(
            "Per second",
            "New samples, loss weight (tokens where the workload weighs by them) and steps.",
            {
                "samples": rate("samestep_samples_total"),
                "weight": rate("samestep_loss_weight_total"),
                "steps": rate("samestep_steps_total"),
            },
        ),
        series(
            "A step's time",
            "Mean of what worker 0 does in a step: compute, wait for data, wait for others.",
            {
                "compute": mean("samestep_compute_seconds"),
                "data": mean("samestep_data_wait_seconds"),
                "communication": mean("samestep_communication_seconds"),
            },
            unit="s",
            stacked=True,
        ),
        series(
            "Slow steps",
            "Duration of a step; buckets double, so these are rough.",
            {
                "median": quantile("samestep_step_seconds", 0.5),
                "95 %": quantile("samestep_step_seconds", 0.95),
            },
            unit="s",
        ),
        series(
            "Gradient traffic",
            "What worker 0 sends.",
            {"worker 0": rate("samestep_sent_bytes_total")},
            unit="Bps",
        ),
    ],
)

TIME: Final = Row(
    title="Where does the time go?",
    panels=[
        series(
            "Time by part",
            TIME_PARTS,
            {"{{part}}": shares_of_time()},
            unit="percentunit",
            stacked=True,
            width=16,
        ),
        Panel(
            title="Since the run began",
            about=TIME_PARTS,
            kind="piechart",
            unit="s",
            width=8,
            queries=[
                Query(
                    expr=so_far("samestep_time_seconds_total", "part"),
                    legend="{{part}}",
                    instant=True,
                )
            ],
        ),
    ],
)

FAULTS: Final = Row(
    title="Faults and elasticity",
    panels=[
        series(
            "Budget used",
            "Share of each limit that the job sets; at 1 the run stops with a checkpoint.",
            {"{{limit}}": f"samestep_budget_used_ratio{{{RUN}}}"},
            unit="percentunit",
        ),
        series(
            "Workers",
            "Present, and the limits between which the run may be resized.",
            {
                "present": f"samestep_workers{{{RUN}}}",
                "most": f"samestep_workers_wanted{{{RUN}}}",
                "fewest": f"samestep_workers_min{{{RUN}}}",
            },
        ),
        series(
            "Restarts, incidents, steps redone",
            "Since the run began.",
            {
                "restart: {{cause}}": so_far("samestep_restarts_total", "cause"),
                "incident: {{kind}}": so_far("samestep_incidents_total", "kind"),
                "attempts": f"samestep_attempts_total{{{RUN}}}",
                "steps redone": f"samestep_redone_steps_total{{{RUN}}}",
            },
        ),
        series(
            "Standing still",
            "Since the run began: mean time from a fault, or for what was planned, until every "
            "worker was through a step again.",
            {
                "fault: noticed": mean_so_far("samestep_detection_seconds"),
                "fault: training again": mean_so_far("samestep_fault_standstill_seconds"),
                "planned": mean_so_far("samestep_planned_standstill_seconds"),
            },
            unit="s",
            width=8,
        ),
        series(
            "Audits",
            "Shards computed again elsewhere; one that differs means a machine that computes "
            "wrongly.",
            {
                "done": f"samestep_audit_seconds_count{{{RUN}}}",
                "differing": f'samestep_incidents_total{{{RUN},kind="corruption"}}',
            },
            width=8,
        ),
        series(
            "An audit's time",
            "Mean since the run began; it adds to the step.",
            {"mean": mean_so_far("samestep_audit_seconds")},
            unit="s",
            width=8,
        ),
    ],
)

MEMORY: Final = f"samestep_worker_memory_bytes{{{RUN}}}"
WORKERS: Final = Row(
    title="Workers side by side",
    panels=[
        series(
            "Straggler",
            "Own time per sample of the slowest worker over the median one's; 1 is even.",
            {"ratio": f"samestep_straggler_ratio{{{RUN}}}"},
            width=8,
        ),
        series(
            "Slowest worker",
            "Its world rank. One that stays the slowest is worth a look at its node.",
            {"world rank": f"samestep_slowest_world_rank{{{RUN}}}"},
            width=8,
        ),
        series(
            "A worker's own time of a step",
            "Waiting for others left out.",
            {"worker {{world_rank}}": f"samestep_worker_step_seconds{{{RUN}}}"},
            unit="s",
            width=8,
        ),
        series(
            "Memory",
            "Resident (host) and allocated at most (device).",
            {"worker {{world_rank}}, {{memory}}": MEMORY},
            unit="bytes",
        ),
        series(
            "Memory, of what there is",
            "Of the container or machine (host) and of the device.",
            {
                "worker {{world_rank}}, {{memory}}": (
                    f"{MEMORY} / samestep_worker_memory_limit_bytes{{{RUN}}}"
                )
            },
            unit="percentunit",
        ),
    ],
)

KEPT: Final = Row(
    title="Checkpoints and telemetry",
    panels=[
        series(
            "Age of the last checkpoint",
            CHECKPOINT_AGE,
            {"age": age("samestep_last_checkpoint_timestamp_seconds")},
            unit="s",
            width=8,
        ),
        series(
            "Training held up by a checkpoint",
            "Over the last hour.",
            {
                "mean": mean("samestep_checkpoint_seconds", "1h"),
                "95 %": quantile("samestep_checkpoint_seconds", 0.95, "1h"),
            },
            unit="s",
            width=8,
        ),
        series(
            "Age of the last snapshot",
            "A copy in the shared memory of the nodes: what a loss of all workers would cost while "
            "their nodes live.",
            {"age": age("samestep_last_snapshot_timestamp_seconds")},
            unit="s",
            width=8,
        ),
        series(
            "Training held up by a snapshot",
            "The mean since the run began.",
            {"mean": mean_so_far("samestep_snapshot_seconds")},
            unit="s",
            width=8,
        ),
        series(
            "Where attempts got their state",
            "Since the run began.",
            {"{{source}}": so_far("samestep_restores_total", "source")},
            width=8,
        ),
        stat("Checkpoints", "Committed.", by_run("samestep_checkpoints_total"), height=8),
        stat(
            "Size of the last",
            "On storage.",
            by_run("samestep_last_checkpoint_bytes"),
            unit="bytes",
            height=8,
        ),
        series(
            "What waits for MLflow and for this page",
            MLFLOW_WAITS,
            {
                "steps for MLflow": f"samestep_tracking_waiting_steps{{{RUN}}}",
                "lines of the ledger for {{sink}}": f"samestep_sink_waiting_records{{{RUN}}}",
            },
            width=8,
        ),
        series(
            "MLflow takes what is delivered",
            "1: yes.",
            {"up": f"samestep_tracking_up{{{RUN}}}"},
            width=4,
        ),
        stat(
            "Saves that failed",
            "Of checkpoints; training goes on, and the next one that is due is tried.",
            by_run("samestep_checkpoint_failures_total"),
            thresholds=[(0, "green"), (1, "red")],
            height=8,
        ),
        series(
            "Reports of workers that were dropped",
            "Samples for display only; nothing of the run's record is ever dropped.",
            {"dropped": f"samestep_telemetry_dropped_reports{{{RUN}}}"},
            width=8,
        ),
    ],
)

ONE_RUN: Final = Dashboard(
    uid="samestep-run",
    title="samestep: run",
    about="One run: is it alive, does it learn, how fast, and where does its time go?",
    annotations=[ATTEMPTS, RESIZES, INCIDENTS],
    variables=[MLFLOW],
    links=[
        ("Fleet", "/d/samestep-fleet"),
        ("Incidents", "/d/samestep-incidents?var-run=${run}"),
    ],
    rows=[ALIVE, LEARNING, SPEED, TIME, FAULTS, WORKERS, KEPT],
)
