"""One cause, one incident: what of several that are told is the same thing seen again.

Several workers meet the same exception, or run out of memory together; the processes of a hang are
ended, and then look lost; survivors say that somebody is gone before it is known who.
"""

from __future__ import annotations

from typing import Final

from samestep.incidents.record import Incident
from samestep.names import IncidentKind

ECHO: Final = "echo"
"""In `seen` of a crash: only the other workers say so, whose connection to somebody broke."""

SEEN_AGAIN: Final = frozenset(
    {IncidentKind.NON_FINITE, IncidentKind.LOSS_SPIKE, IncidentKind.GRAD_SPIKE}
)
"""Kinds that follow from a step's values: when it is taken again they are seen again."""

AT_ONCE_S: Final = 60.0
"""What is told so soon after a hang comes of it."""

_RAISED: Final = frozenset(
    {IncidentKind.EXCEPTION, IncidentKind.BAD_BATCH, IncidentKind.DIVERGENCE}
)


def may_tell(incident_id: str, now: Incident) -> bool:
    """Whether the incident of an id, which nobody need have read yet, may be the same as another.

    Args:
        incident_id: as `record.id_of` makes it, with or without a number added.
        now: what is told.
    """
    kind, _, rest = incident_id.partition("-step-")
    step, _, attempt = rest.partition("-attempt-")
    if now.kind in SEEN_AGAIN:
        return (kind, step) == (now.kind, f"{now.step:08d}")
    kinds = [now.kind, IncidentKind.HANG] if now.kind is IncidentKind.CRASH else [now.kind]
    return kind in kinds and attempt.partition("-")[0] == str(now.attempt)


def tells(before: Incident, now: Incident) -> bool:
    """Whether an incident tells of what is told now; both as far as `may_tell` says."""
    if now.kind in SEEN_AGAIN:
        return bool(now.seen) and dict(before.seen) == dict(now.seen)
    if now.kind in _RAISED:
        return before.step == now.step and _last_line(before) == _last_line(now)
    if before.kind is IncidentKind.HANG:  # unless training got through it and went on
        return now.step <= before.step + 1 or abs(now.time - before.time) <= AT_ONCE_S
    if now.kind is IncidentKind.CRASH:
        same = (before.world_rank, before.host) == (now.world_rank, now.host)
        return same or bool(before.seen.get(ECHO) or now.seen.get(ECHO))
    if now.kind is IncidentKind.OUT_OF_MEMORY:
        return True
    return _told(before) == _told(now)


def _told(incident: Incident) -> tuple[object, ...]:
    """The same where something is told again, as nobody knew whether it was heard."""
    return incident.step, incident.world_rank, incident.message, incident.time


def _last_line(incident: Incident) -> str:
    """Class and message of the exception, without the worker and the shard that met it."""
    return incident.message.strip().rpartition("\n")[2]
