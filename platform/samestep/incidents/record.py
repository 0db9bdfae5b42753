"""The record of an incident: `incidents/<id>/incident.json` in the run directory.

Its format is fixed here. Bundles, which hold what is needed to replay an incident, lie beside it
in the same folder and are named by `evidence`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import INCIDENT_FILE, INCIDENTS_DIR, IncidentKind

FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something that went wrong.

    Attributes:
        kind: which of the closed list.
        step: the step that was being taken, counted from 0.
        attempt: the attempt it happened in, counted from 1; 0 before the first.
        message: what happened, in a sentence or the user's own words.
        world_rank: the worker it happened on; None when it concerns all or none.
        host: the node of that worker; empty when not known.
        time: seconds since the epoch by the clock of the one who noticed.
        seen: what was observed, plain JSON data (values, thresholds, names).
        traceback: the user's own, where there is one.
        evidence: paths inside the run directory where more lies.
        id: name of its folder; given by `write` where it is empty.
    """

    kind: IncidentKind
    step: int
    attempt: int
    message: str
    world_rank: int | None = None
    host: str = ""
    time: float = 0.0
    seen: Mapping[str, Any] = field(default_factory=dict)
    traceback: str | None = None
    evidence: Sequence[str] = ()
    id: str = ""

    def to_json(self) -> dict[str, Any]:
        """The incident as plain JSON data, with the format's version."""
        data = asdict(self)
        data |= {"kind": str(self.kind), "evidence": list(self.evidence), "seen": dict(self.seen)}
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Incident:
        """Inverse of `to_json`; fields with a default may be left out.

        Raises:
            StorageError: another format version, an unknown kind, a missing or unknown field.
        """
        fields = dict(data)
        version = fields.pop("format", FORMAT)
        if version != FORMAT:
            raise StorageError(
                f"an incident has format {version!r}; this samestep reads format {FORMAT}: use "
                "the version that wrote it"
            )
        try:
            return cls(**{**fields, "kind": IncidentKind(fields["kind"])})
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"an incident is malformed ({error!r}); kinds are {', '.join(IncidentKind)}"
            ) from error


def write(run: Storage, incident: Incident) -> Incident:
    """Writes an incident that does not exist yet and returns it with its id.

    The id tells kind, step and attempt, and has a number added where that is taken.
    """
    base = id_of(incident)
    candidate, number = incident.id or base, 1
    while True:
        named = replace(incident, id=candidate)
        data = json.dumps(named.to_json(), indent=2, allow_nan=False).encode()
        if run.create_exclusive(f"{INCIDENTS_DIR}/{candidate}/{INCIDENT_FILE}", data):
            return named
        number += 1
        candidate = f"{incident.id or base}-{number}"


def id_of(incident: Incident) -> str:
    """The id of an incident that is the first of its kind at its step in its attempt."""
    return f"{incident.kind}-step-{incident.step:08d}-attempt-{incident.attempt}"


def read(run: Storage, incident_id: str) -> Incident:
    """Reads one incident.

    Raises:
        StorageError: it is not there, damaged or of another format.
    """
    name = f"{INCIDENTS_DIR}/{incident_id}/{INCIDENT_FILE}"
    if not run.exists(name):
        known = ", ".join(run.list(INCIDENTS_DIR)) or "none"
        raise StorageError(f"{run.uri} has no incident {incident_id!r}; it has: {known}")
    try:
        data = json.loads(run.read(name))
    except ValueError as error:
        raise StorageError(f"{run.uri}/{name} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise StorageError(f"{run.uri}/{name} holds a {type(data).__name__}, not an incident")
    return Incident.from_json(data)


def list_incidents(run: Storage) -> list[Incident]:
    """All incidents of a run, in order of time."""
    found = [
        read(run, name)
        for name in run.list(INCIDENTS_DIR)
        if run.exists(f"{INCIDENTS_DIR}/{name}/{INCIDENT_FILE}")
    ]
    return sorted(found, key=lambda incident: (incident.time, incident.id))
