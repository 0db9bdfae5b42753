"""Every exception of samestep, and the exit status a command ends with for each.

    SamestepError                1   something went wrong
    ├── InputError               2   what the user gave can't be used as it is
    │   ├── SpecError                the job file or a --set
    │   ├── WorkloadError            the workload can't be loaded, or breaks its contract
    │   │   └── BadBatchError        a batch is not what the workload says it is
    │   ├── NotExactError            it would train, but not with the promised bits
    │   ├── RunConflictError         the run belongs to another spec, data or numerics
    │   ├── CheckpointError          a checkpoint is damaged, or none is whole
    │   ├── BundleError              a bundle is damaged, or is none
    │   ├── StorageError             storage can't be read or written from a node
    │   └── PlacementError           the cluster has no room for the workers asked for
    ├── RunInUseError            5   a live run holds the run directory
    ├── BudgetError              4   the run has used up what it may use
    ├── UserCodeError            1   the workload raised; carries its traceback
    ├── PeerLostError            1   another worker went away (infrastructure: retried)
    ├── AttemptFailedError       1   why a worker left its group, told to whoever decides on retries
    ├── DivergenceError          1   a step or a state differs from what it must equal
    ├── CorruptionError          1   a machine computed wrongly, as an audit found
    ├── IncidentError            1   something odd in a step, where the job says to stop
    ├── RecorderError            1   the run's recorder can't be reached or refused us
    └── CannotReplayError       12   a step can't be taken again here; says what is missing

Every message says what happened, the value, and what to do. Each exception takes plain data and
so survives pickling between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class ExitStatus(IntEnum):
    """Exit statuses of all commands; docs and scripts may rely on them."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 3
    BUDGET_EXHAUSTED = 4
    IN_USE = 5
    EQUAL_WITHIN_TOLERANCE = 10
    DIFFERENT = 11
    CANNOT_REPLAY = 12


class SamestepError(Exception):
    """Root of the tree."""

    exit_status: ExitStatus = ExitStatus.FAILED


class InputError(SamestepError):
    """The user can mend it; nothing was lost and nothing is retried."""

    exit_status = ExitStatus.BAD_INPUT


class SpecError(InputError):
    """A job file or an override is malformed; names the field, the value and what is allowed."""


class WorkloadError(InputError):
    """A workload can't be loaded or does not keep its side of the interface."""


class BadBatchError(WorkloadError):
    """A batch is of another kind than the first, or not as the workload declares it."""


class NotExactError(InputError):
    """The workload does something whose bits can't be kept; says what to use instead."""


class RunConflictError(InputError):
    """A run of this name exists and can't be continued with what was given."""


class CheckpointError(InputError):
    """A checkpoint does not verify or does not fit the workload."""


class BundleError(InputError):
    """A bundle, or a file that it was packed into, is damaged, or was made by something else."""


class StorageError(InputError):
    """The run directory can't be read or written from a node that needs it."""


class PlacementError(InputError):
    """The cluster can't place the minimum number of workers."""


class RunInUseError(SamestepError):
    """Another live process holds the run's lease."""

    exit_status = ExitStatus.IN_USE


class BudgetError(SamestepError):
    """What the run may use is used up; says of what, and how to go on."""

    exit_status = ExitStatus.BUDGET_EXHAUSTED


class UserCodeError(SamestepError):
    """The workload's own code raised; the message holds the user's message and traceback."""


class PeerLostError(SamestepError):
    """The exchange with another worker failed; the cause lies with that worker."""


class DivergenceError(SamestepError):
    """Values that must be equal bit for bit are not."""


class CorruptionError(SamestepError):
    """An audit found that a worker's machine computed wrongly; the step was not applied.

    Attributes:
        seen: `culprit` (world rank, None where that can't be told), `host` (its node), `parameter`,
            `shard`, `computed` (that shard, after the one it is added to in place), `owner`,
            `auditor`, `digests` (of these two), `repeats` and `hosts` (by world rank), `right`
            (digest; None as with `culprit`), `transient`, `policy`.
    """

    def __init__(self, message: str, seen: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(message, dict(seen))
        self.seen = dict(seen)

    def __str__(self) -> str:
        return str(self.args[0])


class IncidentError(SamestepError):
    """A step gave something odd, and the job says to stop; the incident is recorded already.

    Attributes:
        kind: of the incident.
    """

    def __init__(self, message: str, kind: str = "non_finite") -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class RecorderError(SamestepError):
    """The recorder is away for too long, or refuses an attempt that is no longer current."""


class CannotReplayError(SamestepError):
    """A step can't be taken again here; says what is missing, and how to get it."""

    exit_status = ExitStatus.CANNOT_REPLAY


class AttemptFailedError(SamestepError):
    """A worker left its group; what it met is told as plain data.

    Attributes:
        details: `kind` (of the exception), `step` (that was being taken), `attempt`,
            `world_rank`, `host`, `exit_status`, `is_echo` (another worker was lost: the cause
            lies there), `is_final` (no retry can help), `is_memory` (it ran out of memory),
            `is_corruption` (a machine computed wrongly: the step is taken again), `wrong_host`
            (that machine; empty where there is none, or nobody can tell),
            `time` (seconds since the epoch).
    """

    def __init__(self, message: str, details: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(message, dict(details))
        self.details = dict(details)

    def __str__(self) -> str:
        return str(self.args[0])
