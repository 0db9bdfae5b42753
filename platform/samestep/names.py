"""Every file, event, incident kind and environment name of samestep, in one place.

Code, docs, dashboards and tests take the names from here; none is spelt out a second time.
"""

from __future__ import annotations

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
VALUES_FILE: Final = "values.json"
STATE_FILE_PREFIX: Final = "state-"
STATE_FILE_SUFFIX: Final = ".safetensors"
INCIDENTS_DIR: Final = "incidents"
INCIDENT_FILE: Final = "incident.json"
BUNDLE_FILE: Final = "bundle.json"
"""In an incident's folder: what a bundle consists of, and the proof that it is whole."""
BUNDLE_STATE_DIR: Final = "state"
BUNDLE_SAMPLES_DIR: Final = "samples"
BUNDLE_CODE_DIR: Final = "code"
BUNDLE_LEDGER_FILE: Final = "ledger.jsonl"
BUNDLE_STEP_FILE: Final = "step.json"
REPORT_FILE: Final = "report.html"
PACKED_SUFFIX: Final = ".zip"
LOGS_DIR: Final = "logs"
OUTPUTS_DIR: Final = "outputs"
ATTEMPT_PREFIX: Final = "attempt-"
WORKER_PREFIX: Final = "worker-"
LOG_SUFFIX: Final = ".log"
TRACKING_FILE: Final = "mlflow.json"
TARGETS_DIR: Final = ".prometheus"
"""In the storage folder, beside the runs, none of which can be called so."""
TARGET_SUFFIX: Final = ".json"
MODEL_DIR: Final = "model"
BEST_MODEL_DIR: Final = "best_model"
TRACKING_DATABASE: Final = "mlflow.db"
TRACKING_ARTIFACTS_DIR: Final = "mlartifacts"
PARAMS_ARTIFACT: Final = "params.json"
REQUIREMENTS_ARTIFACT: Final = "requirements.txt"
LEDGER_ARTIFACT: Final = "ledger.jsonl.gz"
LEASE_PREFIX: Final = "lease-"
LEASE_SUFFIX: Final = ".json"

SHARED_MEMORY_PREFIX: Final = "samestep-"
"""Before the names of runs' folders in a node's shared memory."""

THREAD_LINK: Final = "samestep-link"
THREAD_WATCHDOG: Final = "samestep-watchdog"
THREAD_SAVE: Final = "samestep-save"
THREAD_SAVE_GIVEN_UP: Final = "samestep-save-given-up"
THREAD_BUNDLE: Final = "samestep-bundle"
THREAD_SNAPSHOT: Final = "samestep-snapshot"
THREAD_WARM: Final = "samestep-warm"
THREAD_IMPORT: Final = "samestep-import"
THREAD_REPORTS: Final = "samestep-reports"
THREAD_LEASE: Final = "samestep-lease"
THREAD_SIGTERM: Final = "samestep-sigterm"
THREAD_SINK_PREFIX: Final = "samestep-sink-"
THREAD_METRICS_SERVER: Final = "samestep-metrics-server"
THREAD_NOTES: Final = "samestep-notes"
THREAD_CONNECTIONS: Final = "samestep-connections"
THREAD_TRACKING_CHECK: Final = "samestep-mlflow-check"


class Event(StrEnum):
    """What an event line of the ledger may be about: a closed list."""

    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    EVALUATION = "evaluation"
    STOP_REQUESTED = "stop_requested"
    NUMERICS_CHANGED = "numerics_changed"
    PLACEMENT_DEPENDENT = "placement_dependent"
    RECOVERED = "recovered"
    ROLLED_BACK = "rolled_back"
    FORKED = "forked"
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
    NO_ROOM = "no_room"


class RunState(StrEnum):
    """What a run's recorder says the run is doing."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    INTERRUPTED = "interrupted"
    BUDGET_EXHAUSTED = "budget_exhausted"
    FAILED = "failed"
    FENCED = "fenced"


DIED: Final = "died"
"""The state of a run whose recorder is gone without having ended it."""


class Activity(StrEnum):
    """What a worker does at a moment; between steps, where nothing else is told, it is idle."""

    TRAINING = "training"
    DATA = "data"
    COMMUNICATION = "communication"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    IDLE = "idle"


class TimePart(StrEnum):
    """What a run's wall-clock time went to: a closed list whose parts add up to it."""

    KEPT = "kept"
    REDONE = "redone"
    STARTING = "starting"
    WAITING = "waiting"
    DATA = "data"
    COMMUNICATION = "communication"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    IDLE = "idle"


class RestartCause(StrEnum):
    """Why an attempt after the first began, where no incident's kind tells: a closed list."""

    RESIZED = "resized"
    WORKER_LOST = "worker_lost"
    DRIVER_LOST = "driver_lost"
    RESUMED = "resumed"


class Env(StrEnum):
    """Environment variables that samestep sets or reads."""

    OMP_NUM_THREADS = "OMP_NUM_THREADS"
    MKL_NUM_THREADS = "MKL_NUM_THREADS"
    OPENBLAS_NUM_THREADS = "OPENBLAS_NUM_THREADS"
    MKL_CBWR = "MKL_CBWR"
    CUBLAS_WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
    TORCHINDUCTOR_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"
    GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
    ATEN_CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
    ONEDNN_MAX_CPU_ISA = "ONEDNN_MAX_CPU_ISA"
    MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
    MLFLOW_EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
    MLFLOW_DISABLE_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
    SAMESTEP_JOB_ID = "SAMESTEP_JOB_ID"
    SAMESTEP_SHARED_MEMORY = "SAMESTEP_SHARED_MEMORY"
    SAMESTEP_REPLAY_NOTES = "SAMESTEP_REPLAY_NOTES"
    RAY_ADDRESS = "RAY_ADDRESS"
    RAY_AUTH_MODE = "RAY_AUTH_MODE"
    RAY_AUTH_TOKEN = "RAY_AUTH_TOKEN"
    RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    RAY_OVERRIDE_JOB_RUNTIME_ENV = "RAY_OVERRIDE_JOB_RUNTIME_ENV"


MLFLOW_ENV_PREFIX: Final = "MLFLOW_"
MLFLOW_EXPERIMENT: Final = "samestep"
"""The experiment of runs whose job and environment name none."""


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
    BRANCH = "samestep.branch"
    PARENT = "samestep.parent"
    PARENT_RUN_ID = "samestep.parent_run_id"
    STATUS = "samestep.status"
    MESSAGE = "samestep.message"
    ATTEMPTS = "samestep.attempts"
    CLUSTER = "samestep.cluster"
    JOB_ID = "samestep.job_id"
    GIT_CHANGED = "samestep.git_changed"
    GIT_COMMIT = "mlflow.source.git.commit"
    SOURCE_NAME = "mlflow.source.name"
    SOURCE_TYPE = "mlflow.source.type"
    USER = "mlflow.user"


TAG_VERSION_PREFIX: Final = "samestep.version."
TAG_SPEC_PREFIX: Final = "samestep.spec."
"""Before the path of a field that was changed after the run began: MLflow's params can't."""
TAG_PACKAGE: Final = "samestep.package"
"""Of a model in MLflow: the digest of its package, by which one that was made is found again."""


class Series(StrEnum):
    """Metrics of a run in MLflow, all by step; the names are made by `tracking_names`."""

    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    LEARNING_RATE = "lr"
    SKIPPED = "skipped"
    TRAIN_PREFIX = "train/"
    EVALUATION_PREFIX = "eval/"
    SYSTEM_PREFIX = "system/"
