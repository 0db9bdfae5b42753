"""Which incidents get a bundle, and when one becomes real: the recorder's part of it.

Workers write a bundle's files; `bundle.json`, which makes them count, is written here. So a run
never keeps more than it should, and no incident has two.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import RecorderError
from samestep.incidents.bundle import Bundle, folder_of, has_bundle
from samestep.incidents.record import Incident, list_incidents
from samestep.names import BUNDLE_FILE, IncidentKind
from samestep.telemetry.tenure import Tenure

CLAIM_S: Final = 180.0
"""How long nobody else may write an incident's bundle after somebody said they would."""

REPLAYABLE: Final = frozenset(
    {
        IncidentKind.NON_FINITE,
        IncidentKind.LOSS_SPIKE,
        IncidentKind.GRAD_SPIKE,
        IncidentKind.EXCEPTION,
        IncidentKind.CRASH,
        IncidentKind.HANG,
        IncidentKind.OUT_OF_MEMORY,
        IncidentKind.BAD_BATCH,
        IncidentKind.CORRUPTION,
    }
)
"""Kinds of incidents that taking the step again says something about."""


@dataclass(kw_only=True)
class BundleDesk:
    """Hands out leave to write bundles.

    Args:
        run: the run directory.
        keep: bundles of the run at most.
        monotonic: clock in seconds.
    """

    run: Storage
    keep: int
    monotonic: Callable[[], float] = time.monotonic
    _claims: dict[str, tuple[str, float]] = field(default_factory=dict)
    _incidents: dict[str, Incident] | None = None
    _written: set[str] = field(default_factory=set)

    def note(self, incident: Incident) -> None:
        """An incident was recorded."""
        if self._incidents is not None:
            self._incidents[incident.id] = incident

    def claim(self, incident_id: str) -> dict[str, Any]:
        """Leave to write an incident's bundle.

        Returns:
            `token`, to be given to `commit`; None where there shall be none, and `why`: "full"
            (the run has all it may have), "has one", "under way".
        """
        if not self.keep:
            return {"token": None, "why": "full"}
        incident = self._known()[incident_id]
        if self._is_told_by(self._written, incident):
            return {"token": None, "why": "has one"}
        if self._is_told_by(self._busy(), incident):
            return {"token": None, "why": "under way"}
        if self._is_full():
            return {"token": None, "why": "full"}
        token = secrets.token_hex(8)
        self._claims[incident_id] = (token, self.monotonic())
        return {"token": token, "why": ""}

    def drop(self, incident_id: str, token: str) -> None:
        """Gives leave back: the bundle could not be written."""
        if self._claims.get(incident_id, ("", 0.0))[0] == token:
            del self._claims[incident_id]

    def commit(self, incident_id: str, token: str, bundle_json: str) -> bool:
        """Makes a bundle real whose files are written; False: somebody else writes it by now.

        Raises:
            BundleError: it is no bundle.
            StorageError: it can't be written.
        """
        if self._claims.get(incident_id, (token, 0.0))[0] != token:
            return False
        self._known()
        if incident_id not in self._written:
            data = bundle_json.encode("ascii")
            if Bundle.from_json(data).incident != incident_id:
                raise RecorderError(f"the bundle of {incident_id} says it is another's")
            folder_of(self.run, incident_id).write(BUNDLE_FILE, data)
            self._written.add(incident_id)
        self._claims.pop(incident_id, None)
        return True

    def lacking(self) -> list[dict[str, Any]]:
        """Incidents that should have a bundle and have none, nor is one under way."""
        known, busy = self._known(), self._busy()
        if self._is_full():
            return []
        return [
            incident.to_json()
            for incident in known.values()
            if incident.kind in REPLAYABLE and not self._is_told_by(self._written | busy, incident)
        ]

    def _known(self) -> dict[str, Incident]:
        """All incidents by id, read once: nobody but the recorder writes one, or a bundle."""
        if self._incidents is None:
            self._incidents = {incident.id: incident for incident in list_incidents(self.run)}
            self._written = {
                name for name in self._incidents if has_bundle(folder_of(self.run, name))
            }
        return self._incidents

    def _is_told_by(self, bundles: set[str], incident: Incident) -> bool:
        """One bundle tells of all incidents of a kind at a step: what it holds is the run's."""
        known = self._known()
        return any(
            (known[name].kind, known[name].step) == (incident.kind, incident.step)
            for name in bundles
        )

    def _is_full(self) -> bool:
        return len(self._written | self._busy()) >= self.keep

    def _busy(self) -> set[str]:
        now = self.monotonic()
        return {name for name, (_, at) in self._claims.items() if now - at < CLAIM_S}


class BundleCalls:
    """The part of the recorder that workers call about bundles."""

    _bundles: BundleDesk
    _tenure: Tenure

    def claim_bundle(self, incident_id: str) -> dict[str, Any]:
        """See `BundleDesk.claim`."""
        self._tenure.require()
        return self._bundles.claim(incident_id)

    def drop_bundle(self, incident_id: str, token: str) -> None:
        """See `BundleDesk.drop`."""
        self._bundles.drop(incident_id, token)

    def commit_bundle(self, incident_id: str, token: str, bundle_json: str) -> bool:
        """See `BundleDesk.commit`; of any attempt, for an incident outlives its own."""
        self._tenure.require()
        return self._bundles.commit(incident_id, token, bundle_json)

    def lacking_bundles(self) -> list[dict[str, Any]]:
        """See `BundleDesk.lacking`."""
        self._tenure.require()
        return self._bundles.lacking()
