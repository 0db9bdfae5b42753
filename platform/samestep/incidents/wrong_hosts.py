"""Nodes of which an audit found that they compute wrongly: the list is the run's incidents."""

from __future__ import annotations

from samestep.checkpoint.storage import Storage
from samestep.incidents.record import Incident, read
from samestep.names import INCIDENT_FILE, INCIDENTS_DIR, IncidentKind


def wrong_hosts(run: Storage) -> tuple[str, ...]:
    """Their names, each once, in order of time.

    Raises:
        StorageError: an incident can't be read.
    """
    found = [
        read(run, name)
        for name in run.list(INCIDENTS_DIR)
        if name.startswith(f"{IncidentKind.CORRUPTION}-")
        and run.exists(f"{INCIDENTS_DIR}/{name}/{INCIDENT_FILE}")
    ]
    return hosts_of(sorted(found, key=lambda incident: incident.time))


def hosts_of(incidents: list[Incident]) -> tuple[str, ...]:
    """The same out of incidents of any kind, in their order."""
    corruptions = [each for each in incidents if each.kind is IncidentKind.CORRUPTION]
    return tuple(dict.fromkeys(each.host for each in corruptions if each.host))
