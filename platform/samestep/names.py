"""Every file, event, incident kind and environment name of samestep, in one place.

Code, docs, dashboards and tests take the names from here; none is spelt out a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SPEC_FILE: Final = "spec.yaml"
NUMERICS_FILE: Final = "numerics.json"
RESULT_FILE: Final = "result.json"
LEDGER_DIR: Final = "ledger"
LEDGER_SUFFIX: Final = ".jsonl"
CHECKPOINTS_DIR: Final = "checkpoints"
CHECKPOINT_PREFIX: Final = "step-"
DAMAGED_DIR: Final = "damaged"
MANIFEST_FILE: Final = "manifest.json"
POINTER_FILE: Final = "samestep-checkpoint.json"
VALUES_FILE: Final = "values.json"
STATE_FILE_PREFIX: Final = "state-"
STATE_FILE_SUFFIX: Final = ".safetensors"
INCIDENTS_DIR: Final = "incidents"
INCIDENT_FILE: Final = "incident.json"
LOGS_DIR: Final = "logs"
OUTPUTS_DIR: Final = "outputs"
ATTEMPT_PREFIX: Final = "attempt-"
WORKER_PREFIX: Final = "worker-"
LOG_SUFFIX: Final = ".log"
TRACKING_FILE: Final = "mlflow.json"
METRICS_FILE: Final = "metrics.json"
MODEL_DIR: Final = "model"
TRACKING_DATABASE: Final = "mlflow.db"
TRACKING_ARTIFACTS_DIR: Final = "mlartifacts"
PARAMS_ARTIFACT: Final = "params.json"
REQUIREMENTS_ARTIFACT: Final = "requirements.txt"
LEASE_PREFIX: Final = "lease-"
LEASE_SUFFIX: Final = ".json"

SHARED_MEMORY_PREFIX: Final = "samestep-"
"""Before the names of runs' folders in a node's shared memory."""

THREAD_LINK: Final = "samestep-link"
THREAD_WATCHDOG: Final = "samestep-watchdog"
THREAD_SAVE: Final = "samestep-save"
THREAD_SNAPSHOT: Final = "samestep-snapshot"
THREAD_WARM: Final = "samestep-warm"
THREAD_LEASE: Final = "samestep-lease"
THREAD_SINK_PREFIX: Final = "samestep-sink-"
THREAD_METRICS_SERVER: Final = "samestep-metrics-server"
THREAD_NOTES: Final = "samestep-notes"
THREAD_TRACKING_CHECK: Final = "samestep-mlflow-check"


class Event(StrEnum):
    """What an event line of the ledger may be about: a closed list."""

    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    EVALUATION = "evaluation"
    STOP_REQUESTED = "stop_requested"
    NUMERICS_CHANGED = "numerics_changed"
    PLACEMENT_DEPENDENT = "placement_dependent"
    RECOVERED = "recovered"
    INCIDENT = "incident"
    MESSAGE = "message"
    FINISHED = "finished"


class IncidentKind(StrEnum):
    """What can go wrong at a step: a closed list."""

    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    GRAD_SPIKE = "grad_spike"
    EXCEPTION = "exception"
    CRASH = "crash"
    HANG = "hang"
    OUT_OF_MEMORY = "out_of_memory"
    STRAGGLER = "straggler"
    BAD_BATCH = "bad_batch"
    DIVERGENCE = "divergence"
    CORRUPTION = "corruption"
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    STORAGE = "storage"


class RunState(StrEnum):
    """What a run's recorder says the run is doing."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    FENCED = "fenced"


class Env(StrEnum):
    """Environment variables that samestep sets or reads."""

    OMP_NUM_THREADS = "OMP_NUM_THREADS"
    MKL_NUM_THREADS = "MKL_NUM_THREADS"
    OPENBLAS_NUM_THREADS = "OPENBLAS_NUM_THREADS"
    MKL_CBWR = "MKL_CBWR"
    CUBLAS_WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
    TORCHINDUCTOR_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"
    ATEN_CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
    ONEDNN_MAX_CPU_ISA = "ONEDNN_MAX_CPU_ISA"
    MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
    MLFLOW_DISABLE_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
    SAMESTEP_SHARED_MEMORY = "SAMESTEP_SHARED_MEMORY"
    RAY_ADDRESS = "RAY_ADDRESS"
    RAY_AUTH_MODE = "RAY_AUTH_MODE"
    RAY_AUTH_TOKEN = "RAY_AUTH_TOKEN"
    RAY_JOB_ID = "RAY_JOB_ID"
    RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    RAY_OVERRIDE_JOB_RUNTIME_ENV = "RAY_OVERRIDE_JOB_RUNTIME_ENV"


MLFLOW_ENV_PREFIX: Final = "MLFLOW_"


class Tag(StrEnum):
    """Tags of a run in MLflow; those that start with `mlflow.` are MLflow's own."""

    KEY = "samestep.key"
    RUN = "samestep.run"
    RUN_DIRECTORY = "samestep.run_directory"
    VERSION = "samestep.version"
    ATTEMPT = "samestep.attempt"
    MODE = "samestep.mode"
    WORKERS = "samestep.workers"
    NUMERICS = "samestep.numerics"
    STATE_DIGEST = "samestep.state_digest"
    INCIDENTS = "samestep.incidents"
    STATUS = "samestep.status"
    MESSAGE = "samestep.message"
    JOB_ID = "samestep.job_id"
    GIT_CHANGED = "samestep.git_changed"
    GIT_COMMIT = "mlflow.source.git.commit"
    SOURCE_NAME = "mlflow.source.name"
    SOURCE_TYPE = "mlflow.source.type"
    USER = "mlflow.user"


TAG_VERSION_PREFIX: Final = "samestep.version."
TAG_SPEC_PREFIX: Final = "samestep.spec."
"""Before the path of a field that was changed after the run began: MLflow's params can't."""


class Series(StrEnum):
    """Metrics of a run in MLflow, all by step; the names are made by `tracking_names`."""

    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    LEARNING_RATE = "lr"
    SKIPPED = "skipped"
    TRAIN_PREFIX = "train/"
    EVALUATION_PREFIX = "eval/"


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


class Metrics:
    """Every Prometheus metric; counters are sums over the ledger, so no restart resets them."""

    STEPS: Final = Metric(
        name="samestep_steps_total",
        type=MetricType.COUNTER,
        help="Steps taken, each counted once.",
    )
    SAMPLES: Final = Metric(
        name="samestep_samples_total",
        type=MetricType.COUNTER,
        help="Samples of the steps taken, each step counted once.",
    )
    STEP_SECONDS: Final = Metric(
        name="samestep_step_seconds",
        type=MetricType.HISTOGRAM,
        unit="seconds",
        help="Duration of a step, as worker 0 sees it.",
    )
    DATA_WAIT_SECONDS: Final = Metric(
        name="samestep_data_wait_seconds_total",
        type=MetricType.COUNTER,
        unit="seconds",
        help="Time worker 0 waited for data.",
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
        help="The workload's own metrics of the last step.",
    )
    EVALUATION: Final = Metric(
        name="samestep_evaluation_metric",
        type=MetricType.GAUGE,
        labels=("metric",),
        help="Metrics of the last evaluation.",
    )
    WORKERS: Final = Metric(
        name="samestep_workers", type=MetricType.GAUGE, help="Workers of the present attempt."
    )
    ATTEMPTS: Final = Metric(
        name="samestep_attempts_total",
        type=MetricType.COUNTER,
        help="Attempts begun: one more than the restarts of the worker group.",
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
    LAST_STEP: Final = Metric(
        name="samestep_last_step_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the last step came in, steps taken again included; seconds since the epoch.",
    )
    LAST_CHECKPOINT: Final = Metric(
        name="samestep_last_checkpoint_timestamp_seconds",
        type=MetricType.GAUGE,
        unit="seconds",
        help="When the last checkpoint was committed; seconds since the epoch.",
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
    RUN_INFO: Final = Metric(
        name="samestep_run_info",
        type=MetricType.GAUGE,
        labels=("attempt", "mode", "mlflow_run_id", "job_id", "version"),
        help="Always 1; its labels tell which run this is.",
    )


METRICS: Final = tuple(item for item in vars(Metrics).values() if isinstance(item, Metric))
STEP_SECONDS_BUCKETS: Final = tuple(2.0**power for power in range(-10, 11))
"""Upper bounds in seconds: about 1 ms to 17 minutes."""
