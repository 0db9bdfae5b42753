"""What a worker tells of the failure that ends its attempt."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from samestep.errors import (
    AttemptFailedError,
    BadBatchError,
    CheckpointError,
    CorruptionError,
    DivergenceError,
    IncidentError,
    InputError,
    PeerLostError,
    RecorderError,
    SamestepError,
    UserCodeError,
)
from samestep.faults.progress import Position
from samestep.incidents.record import Incident
from samestep.names import IncidentKind


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as plain data, so that none of the frames it held is kept alive.

    Attributes:
        kind: name of the exception's class.
        message: for the user.
        traceback: of the exception.
        incident: the kind of incident that it is.
        step: the step that was being taken.
        attempt: the attempt it ends.
        world_rank: the worker.
        exit_status: what a command ends with, should it be final.
        is_echo: another worker was lost; the cause lies there.
        is_final: no retry can help.
        is_users: the workload's own code raised.
        is_told: the incident is recorded already, or another worker does it.
        seen: what was observed, for the incident.
        position: where in its step the worker was; None outside of training.
    """

    kind: str
    message: str
    traceback: str
    incident: IncidentKind
    step: int
    attempt: int
    world_rank: int
    exit_status: int
    is_echo: bool
    is_final: bool
    is_users: bool
    is_told: bool = False
    seen: Mapping[str, Any] = field(default_factory=dict)
    position: Position | None = None

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        step: int,
        attempt: int,
        world_rank: int,
        world_size: int,
        position: Position | None = None,
    ) -> Failure:
        """Takes down what an exception says, and where the worker was in its step."""
        kind = type(error).__name__
        seen = error.seen if isinstance(error, CorruptionError) else {}
        message = str(error) if isinstance(error, SamestepError) else f"{kind}: {error}"
        if isinstance(error, UserCodeError) and world_size > 1:
            message = f"worker {world_rank} on {os.uname().nodename}: {message}"
        return cls(
            kind=kind,
            message=message,
            traceback="".join(traceback.format_exception(error)),
            incident=_incident_kind(error),
            step=step,
            attempt=attempt,
            world_rank=world_rank,
            exit_status=int(error.exit_status) if isinstance(error, SamestepError) else 1,
            is_echo=isinstance(error, PeerLostError),
            is_final=isinstance(error, InputError | DivergenceError | RecorderError | IncidentError)
            or seen.get("policy") == "stop",
            is_users=isinstance(error, UserCodeError),
            # What all workers found alike is told by one of them.
            is_told=isinstance(error, IncidentError) or (bool(seen) and world_rank != 0),
            seen=seen,
            position=position,
        )

    def to_incident(self) -> Incident:
        """The incident that it is."""
        is_corruption = self.incident is IncidentKind.CORRUPTION
        return Incident(
            kind=self.incident,
            step=self.step,
            attempt=self.attempt,
            world_rank=self.seen["culprit"] if is_corruption else self.world_rank,
            host=self.seen["host"] if is_corruption else os.uname().nodename,
            seen={**_told(self.position), **self.seen},
            time=time.time(),
            message=self.message,
            traceback=self.traceback,
        )

    def to_error(self) -> AttemptFailedError:
        """A fresh exception, for whoever decides whether to retry."""
        is_corruption = self.incident is IncidentKind.CORRUPTION
        details: dict[str, Any] = {
            "kind": self.kind,
            "step": self.step,
            "attempt": self.attempt,
            "world_rank": self.world_rank,
            "host": os.uname().nodename,
            "exit_status": self.exit_status,
            "is_echo": self.is_echo,
            "is_final": self.is_final,
            "is_memory": self.incident is IncidentKind.OUT_OF_MEMORY,
            "is_corruption": is_corruption,
            "wrong_host": str(self.seen["host"]) if is_corruption else "",
            "time": time.time(),
        }
        return AttemptFailedError(self.message, details)


def _told(position: Position | None) -> dict[str, Any]:
    if position is None:
        return {}
    shard = {"shard": position.shard} if position.shard >= 0 else {}
    return {"phase": str(position.phase), **shard}


def _incident_kind(error: BaseException) -> IncidentKind:
    if isinstance(error, IncidentError):
        return IncidentKind(error.kind)
    if isinstance(error, CorruptionError):
        return IncidentKind.CORRUPTION
    if isinstance(error, DivergenceError):
        return IncidentKind.DIVERGENCE
    if isinstance(error, BadBatchError):
        return IncidentKind.BAD_BATCH
    if isinstance(error, CheckpointError):
        return IncidentKind.DAMAGED_CHECKPOINT
    # What the workload raised is the cause of the UserCodeError that tells it.
    if any(isinstance(e, MemoryError | torch.OutOfMemoryError) for e in (error, error.__cause__)):
        return IncidentKind.OUT_OF_MEMORY
    return IncidentKind.EXCEPTION
