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
LOGS_DIR: Final = "logs"
OUTPUTS_DIR: Final = "outputs"
ATTEMPT_PREFIX: Final = "attempt-"
WORKER_PREFIX: Final = "worker-"
LOG_SUFFIX: Final = ".log"
LEASE_PREFIX: Final = "lease-"
LEASE_SUFFIX: Final = ".json"

THREAD_LINK: Final = "samestep-link"
THREAD_LEASE: Final = "samestep-lease"


class Event(StrEnum):
    """What an event line of the ledger may be about: a closed list."""

    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    EVALUATION = "evaluation"
    STOP_REQUESTED = "stop_requested"
    NUMERICS_CHANGED = "numerics_changed"
    PLACEMENT_DEPENDENT = "placement_dependent"
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
    RAY_ADDRESS = "RAY_ADDRESS"
    RAY_AUTH_MODE = "RAY_AUTH_MODE"
    RAY_AUTH_TOKEN = "RAY_AUTH_TOKEN"
    RAY_JOB_ID = "RAY_JOB_ID"
    RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    RAY_OVERRIDE_JOB_RUNTIME_ENV = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
