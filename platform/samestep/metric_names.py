"""Every Prometheus metric of samestep: name, type, unit, labels and meaning, in one place.

The page, the dashboards, the alert rules and docs/metrics.md take them from here; tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricType(StrEnum):
    """Kinds of Prometheus metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A Prometheus metric.

    Attributes:
        name: as it is scraped; of a histogram without `_bucket`, `_sum` and `_count`.
        type: its kind.
        unit: base unit; empty for counts and plain values.
        labels: beside `run`, which every metric has.
        help: what it tells.
    """

    name: str
    type: MetricType
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()


LABEL_RUN: Final = "run"
STEP_SECONDS_BUCKETS: Final = tuple(2.0**power for power in range(-10, 11))
"""Upper bounds in seconds of all histograms: about 1 ms to 17 minutes."""
HOST: Final = "host"
DEVICE: Final = "device"


class Metrics:
    """Every metric; counters are sums over the ledger, so no restart resets them."""

    STEPS: Final = Metric(
        name="samestep_steps_total",
        type=MetricType.COUNTER,
        help="Steps taken, each counted once.",
    )
    PLANNED_STEPS: Final = Metric(
        name="samestep_planned_steps",
        type=MetricType.GAUGE,
        help="Steps that the run is to take in all.",
    )
    EPOCH: Final = Metric(
        name="samestep_epoch", type=MetricType.GAUGE, help="Epoch of the last step, from 0."
    )
    SAMPLES: Final = Metric(
        name="samestep_samples_total",
        type=MetricType.COUNTER,
        help="Samples of the steps taken, each step counted once.",
    )
    LOSS_WEIGHT: Final = Metric(
        name="samestep_loss_weight_total",
        type=MetricType.COUNTER,
        help=(
            "Weights of the shards of the steps taken: tokens where the workload weighs by tokens, "
            "else samples."
        ),
    )
    SKIPPED_STEPS: Final = Metric(
        name="samestep_skipped_steps_total",
        type=MetricType.COUNTER,
        help="Steps whose update was not applied.",
    )
    STEP_SECONDS: Final = Metric(
        name="samestep_step_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Duration of a step, as worker 0 sees it.",
    )
    DATA_WAIT_SECONDS: Final = Metric(
        name="samestep_data_wait_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Time of a step in which worker 0 waited for data.",
    )
    COMPUTE_SECONDS: Final = Metric(
        name="samestep_compute_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Time of a step in which worker 0 waited for nobody: forward, backward, update.",
    )
    COMMUNICATION_SECONDS: Final = Metric(
        name="samestep_communication_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help=(
            "Time of a step in which worker 0 waited for other workers; what overlaps with "
            "backward is not in it."
        ),
    )
    SENT_BYTES: Final = Metric(
        name="samestep_sent_bytes_total",
        type=MetricType.COUNTER,
        unit="bytes",
        help="Gradient bytes that worker 0 sent.",
    )
    CHECKPOINT_SECONDS: Final = Metric(
        name="samestep_checkpoint_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Time for which a checkpoint held training up.",
    )
    RECOVERY_SECONDS: Final = Metric(
        name="samestep_recovery_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help=(
            "Time from an attempt's last step to the beginning of the next attempt, detection "
            "included, where a fault lay between."
        ),
    )
    DETECTION_SECONDS: Final = Metric(
        name="samestep_detection_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Time from a fault until it was noticed; mode ddp.",
    )
    FAULT_STANDSTILL_SECONDS: Final = Metric(
        name="samestep_fault_standstill_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help=(
            "Time from a fault until every worker was through a step again, detection included; "
            "mode ddp."
        ),
    )
    PLANNED_STANDSTILL_SECONDS: Final = Metric(
        name="samestep_planned_standstill_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help=(
            "Time from the end of training for what was planned (grow, shrink, drain, leave, "
            "rollback) until every worker was through a step again; mode ddp."
        ),
    )
    SNAPSHOT_SECONDS: Final = Metric(
        name="samestep_snapshot_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Time for which a snapshot (a copy of the state in shared memory) held training up.",
    )
    AUDIT_SECONDS: Final = Metric(
        name="samestep_audit_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help=(
            "Time that an audit took in its step: a shard computed again, and the comparison; one "
            "that found a difference is an incident of kind corruption instead."
        ),
    )
    TIME: Final = Metric(
        name="samestep_time_seconds_total",
        type=MetricType.COUNTER,
        unit="seconds",
        labels=("part",),
        help=(
            "What the run's time went to; the parts add up to the time it was being run: kept and "
            "redone training, starting, waiting for resources, data, communication, checkpoint, "
            "evaluation, idle."
        ),
    )
    GOODPUT: Final = Metric(
        name="samestep_goodput_ratio",
        type=MetricType.GAUGE,
        unit="ratio",
        help="Seconds of kept training over the time the run was being run, up to now.",
    )
    STRAGGLER: Final = Metric(
        name="samestep_straggler_ratio",
        type=MetricType.GAUGE,
        unit="ratio",
        help=(
            "Own time per sample (waiting for others left out) of the slowest worker over the "
            "median worker's, over the last half minute; from two workers on."
        ),
    )
    SLOWEST: Final = Metric(
        name="samestep_slowest_world_rank",
        type=MetricType.GAUGE,
        help="World rank of the worker that samestep_straggler_ratio is about.",
    )
    WORKER_STEP_SECONDS: Final = Metric(
        name="samestep_worker_step_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        labels=("world_rank",),
        help="A worker's own time of a step, waiting for others left out; mean of half a minute.",
    )
    WORKER_MEMORY: Final = Metric(
        name="samestep_worker_memory_bytes",
        type=MetricType.GAUGE,
        unit="bytes",
        labels=("world_rank", "memory"),
        help="Memory of a worker: resident (host) and allocated at most (device).",
    )
    WORKER_MEMORY_LIMIT: Final = Metric(
        name="samestep_worker_memory_limit_bytes",
        type=MetricType.GAUGE,
        unit="bytes",
        labels=("world_rank", "memory"),
        help="Memory of the worker's container or machine (host) and of its device.",
    )
    LOSS: Final = Metric(
        name="samestep_loss", type=MetricType.GAUGE, help="Training loss of the last step."
    )
    GRAD_NORM: Final = Metric(
        name="samestep_grad_norm",
        type=MetricType.GAUGE,
        help="Global norm of the last step's gradient, before clipping.",
    )
    LEARNING_RATE: Final = Metric(
        name="samestep_learning_rate",
        type=MetricType.GAUGE,
        labels=("group",),
        help="Learning rate of the last step, by parameter group.",
    )
    TRAIN: Final = Metric(
        name="samestep_train_metric",
        type=MetricType.GAUGE,
        labels=("metric",),
        help="The workload's own metrics of the last step; the first 200 names.",
    )
    EVALUATION: Final = Metric(
        name="samestep_evaluation_metric",
        type=MetricType.GAUGE,
        labels=("metric",),
        help="Metrics of the last evaluation; the first 200 names.",
    )
    WORKERS: Final = Metric(
        name="samestep_workers",
        type=MetricType.GAUGE,
        help="Workers of the present attempt; 0 between attempts.",
    )
    WORKERS_WANTED: Final = Metric(
        name="samestep_workers_wanted",
        type=MetricType.GAUGE,
        help=(
            "Workers that the run takes where there is room for them (workers.max); 0 once it has "
            "ended."
        ),
    )
    WORKERS_MIN: Final = Metric(
        name="samestep_workers_min",
        type=MetricType.GAUGE,
        help="Workers below which the run does not go on (workers.min); 0 once it has ended.",
    )
    ATTEMPTS: Final = Metric(
        name="samestep_attempts_total",
        type=MetricType.COUNTER,
        help="Attempts begun.",
    )
    RESTARTS: Final = Metric(
        name="samestep_restarts_total",
        type=MetricType.COUNTER,
        labels=("cause",),
        help=(
            "Attempts after the first, by what ended the one before: the kind of its last "
            "incident; without one resized, worker_lost or driver_lost; resumed where the run had "
            "ended."
        ),
    )
    RESTORES: Final = Metric(
        name="samestep_restores_total",
        type=MetricType.COUNTER,
        labels=("source",),
        help=(
            "Attempts begun, by where their state came from: survivor (processes of the attempt "
            "before), snapshot (shared memory), checkpoint (storage), start (none: step 0)."
        ),
    )
    REDONE_STEPS: Final = Metric(
        name="samestep_redone_steps_total",
        type=MetricType.COUNTER,
        help="Steps taken again after restarts, counted once an attempt is through with them.",
    )
    INCIDENTS: Final = Metric(
        name="samestep_incidents_total",
        type=MetricType.COUNTER,
        labels=("kind",),
        help="Incidents, by kind.",
    )
    LAST_INCIDENT: Final = Metric(
        name="samestep_last_incident_timestamp_seconds",
        type=MetricType.GAUGE,
        labels=("kind",),
        unit="seconds",
        help="When the last incident of a kind was recorded; seconds since the epoch.",
    )
    FAILED: Final = Metric(
        name="samestep_failed",
        type=MetricType.GAUGE,
        help="1 once the run has ended with a failure, until somebody goes on with it; else 0.",
    )
    BUDGET_USED: Final = Metric(
        name="samestep_budget_used_ratio",
        type=MetricType.GAUGE,
        labels=("limit",),
        unit="ratio",
        help=(
            "Share of each limit of the run's budget that is used, over all attempts; only limits "
            "that the job sets."
        ),
    )
    ATTEMPT_STARTED: Final = Metric(
        name="samestep_attempt_started_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the last attempt began; seconds since the epoch.",
    )
    LAST_STEP: Final = Metric(
        name="samestep_last_step_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the last step came in, steps taken again included; seconds since the epoch.",
    )
    CHECKPOINTS: Final = Metric(
        name="samestep_checkpoints_total",
        type=MetricType.COUNTER,
        help="Checkpoints committed.",
    )
    CHECKPOINT_FAILURES: Final = Metric(
        name="samestep_checkpoint_failures_total",
        type=MetricType.COUNTER,
        help="Saves of a checkpoint that failed; those while the ledger is away are told later.",
    )
    LAST_CHECKPOINT: Final = Metric(
        name="samestep_last_checkpoint_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the last checkpoint was committed; seconds since the epoch.",
    )
    LAST_SNAPSHOT: Final = Metric(
        name="samestep_last_snapshot_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the state of the last whole snapshot was copied; seconds since the epoch.",
    )
    LAST_CHECKPOINT_BYTES: Final = Metric(
        name="samestep_last_checkpoint_bytes",
        type=MetricType.GAUGE,
        unit="bytes",
        help="Size of the last checkpoint.",
    )
    TRACKING_UP: Final = Metric(
        name="samestep_tracking_up",
        type=MetricType.GAUGE,
        help="1 while MLflow takes what is delivered, else 0.",
    )
    TRACKING_WAITING: Final = Metric(
        name="samestep_tracking_waiting_steps",
        type=MetricType.GAUGE,
        help="Steps in the ledger that MLflow has not got yet.",
    )
    SINK_WAITING: Final = Metric(
        name="samestep_sink_waiting_records",
        type=MetricType.GAUGE,
        labels=("sink",),
        help=(
            "Lines of the ledger (steps and events) that a sink has not taken yet: mlflow, or "
            "prometheus, which is this page."
        ),
    )
    DROPPED: Final = Metric(
        name="samestep_telemetry_dropped_reports",
        type=MetricType.GAUGE,
        help=(
            "Workers' reports (samples for display) that were dropped in the present attempt, "
            "because the recorder was away or busy."
        ),
    )
    RUN_INFO: Final = Metric(
        name="samestep_run_info",
        type=MetricType.GAUGE,
        labels=("attempt", "mode", "numerics", "mlflow_run_id", "job_id"),
        help="Always 1; its labels tell which run this is.",
    )
    BUILD_INFO: Final = Metric(
        name="samestep_build_info",
        type=MetricType.GAUGE,
        labels=("version", "python", "torch", "ray"),
        help="Always 1; its labels tell the versions that the run's recorder has.",
    )


METRICS: Final = tuple(item for item in vars(Metrics).values() if isinstance(item, Metric))
HISTOGRAMS: Final = tuple(metric for metric in METRICS if metric.type is MetricType.HISTOGRAM)


def series_of(metric: Metric) -> tuple[str, ...]:
    """The names under which a metric is scraped."""
    if metric.type is MetricType.HISTOGRAM:
        return tuple(f"{metric.name}_{end}" for end in ("bucket", "sum", "count"))
    return (metric.name,)
