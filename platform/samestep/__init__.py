"""samestep: elastic PyTorch training on Ray that takes the same step at any size.

Importing this package loads neither Ray nor MLflow, nor torch: the environment that numerics
depend on must be set before torch is loaded, which is the launcher's work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.errors import (
    BudgetError,
    CheckpointError,
    DivergenceError,
    ExitStatus,
    InputError,
    NotExactError,
    PlacementError,
    RunConflictError,
    RunInUseError,
    SamestepError,
    SpecError,
    StorageError,
    UserCodeError,
    WorkloadError,
)
from samestep.spec import JobSpec, Mode, load_spec, parse_spec

if TYPE_CHECKING:
    from samestep.checkpoint.reading import load_weights
    from samestep.cluster.launch import Outcome, train
    from samestep.workload import Loss, Schedule, Values, Workload

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "DivergenceError",
    "ExitStatus",
    "InputError",
    "JobSpec",
    "Loss",
    "Mode",
    "NotExactError",
    "Outcome",
    "PlacementError",
    "RunConflictError",
    "RunInUseError",
    "SamestepError",
    "Schedule",
    "SpecError",
    "StorageError",
    "UserCodeError",
    "Values",
    "Workload",
    "WorkloadError",
    "load_spec",
    "load_weights",
    "parse_spec",
    "train",
]

_LAZY = {
    "Loss": "samestep.workload",
    "Outcome": "samestep.cluster.launch",
    "Schedule": "samestep.workload",
    "Values": "samestep.workload",
    "Workload": "samestep.workload",
    "load_weights": "samestep.checkpoint.reading",
    "train": "samestep.cluster.launch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")
