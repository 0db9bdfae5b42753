"""What Ray Train's exceptions mean, in the terms of `policy`. Checked with Ray 2.60."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from samestep.cluster.policy import Cause, Fault
from samestep.errors import AttemptFailedError, ExitStatus, PlacementError


def faults_of(error: TrainingFailedError, hosts: Mapping[int, str]) -> list[Fault]:
    """What the workers met, or the controller.

    Args:
        error: as the failure policy gets it.
        hosts: of the workers, by world rank.
    """
    if isinstance(error, WorkerGroupError):
        return [
            fault_of(failure, world_rank, hosts.get(world_rank, ""))
            for world_rank, failure in error.worker_failures.items()
        ]
    if isinstance(error, ControllerError):
        return [_of_controller(error.controller_failure)]
    return [Fault(cause=Cause.INTERNAL, message=str(error), kind=type(error).__name__)]


def fault_of(error: BaseException, world_rank: int, host: str) -> Fault:
    """What one worker met."""
    where = f"worker {world_rank} on {host or 'an unknown node'}"
    if isinstance(error, AttemptFailedError):
        return _of_attempt(error)
    if isinstance(error, WorkerHealthCheckFailedError):
        return fault_of_dead(error.health_check_failure, where, world_rank=world_rank, host=host)
    cause, what = Cause.USER, f"{type(error).__name__}: {error}"
    if isinstance(error, WorkerHealthCheckTimeoutError):
        cause, what = Cause.HANG, f"{where} does not answer: {error}"
    return Fault(
        cause=cause, message=what, kind=type(error).__name__, world_rank=world_rank, host=host
    )


def fault_of_dead(
    error: Exception, where: str, *, world_rank: int | None = None, host: str = ""
) -> Fault:
    """What ended a process, by what Ray told instead of its answer.

    Args:
        error: of Ray.
        where: the process, for the message.
        world_rank: of its worker, if it is one of several.
        host: its node.
    """
    if isinstance(error, OutOfMemoryError):
        cause = Cause.OUT_OF_MEMORY
        message = (
            f"{where} was killed because its node ran out of memory: give the job more shards "
            f"(smaller ones; it changes the bits), fewer workers per node, or more memory\n"
            f"{_short(error)}"
        )
    elif isinstance(error, RayActorError):
        cause = Cause.CRASH
        message = f"{where} was lost: its process died, or its node did\n{_short(error)}"
    else:
        cause = Cause.CRASH
        message = f"{where} failed: {type(error).__name__}: {error}"
    return Fault(
        cause=cause, message=message, kind=type(error).__name__, world_rank=world_rank, host=host
    )


def is_echo(error: BaseException) -> bool:
    """Whether a worker only says that another one is lost."""
    return isinstance(error, AttemptFailedError) and bool(error.details["is_echo"])


def is_dead(error: BaseException | None) -> bool:
    """Whether a worker's process is gone, by what polling it brought."""
    return isinstance(error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


def _of_attempt(error: AttemptFailedError) -> Fault:
    details: Mapping[str, Any] = error.details
    if details["is_echo"]:
        cause = Cause.LOST
    elif details["is_final"]:
        cause = Cause.FINAL
    elif details["is_corruption"]:
        cause = Cause.CORRUPTION
    else:
        cause = Cause.OUT_OF_MEMORY if details["is_memory"] else Cause.USER
    return Fault(
        cause=cause,
        message=str(error),
        kind=str(details["kind"]),
        world_rank=int(details["world_rank"]),
        host=str(details["host"]),
        step=int(details["step"]),
        attempt=int(details["attempt"]),
        exit_status=int(details["exit_status"]),
        told=True,
        wrong_host=str(details["wrong_host"]),
    )


def _of_controller(error: BaseException) -> Fault:
    kind = type(error).__name__
    if isinstance(error, PlacementError):
        return Fault(
            cause=Cause.NO_ROOM,
            message=str(error),
            kind=kind,
            exit_status=int(ExitStatus.BAD_INPUT),
        )
    if isinstance(error.__cause__, OutOfMemoryError):
        return fault_of_dead(error.__cause__, "a worker that was to start")
    if isinstance(error, WorkerGroupStartupFailedError | RayActorError):
        return Fault(cause=Cause.START, message=f"the group did not start: {error}", kind=kind)
    return Fault(cause=Cause.INTERNAL, message=f"{kind}: {error}", kind=kind)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
