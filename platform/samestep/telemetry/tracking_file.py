"""`mlflow.json` in the run directory: which MLflow run this is, and how far it was delivered."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit, urlunsplit

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import TRACKING_FILE
from samestep.telemetry.spool import START, Position

FORMAT = 2
READABLE = (1, FORMAT)
"""Files of format 1 do not tell what MLflow refused."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """How far a run was delivered.

    Attributes:
        key: names the run alone, in any store, before it has an id there; also a tag of it.
        uri: tracking URI, without user and password.
        experiment: name of the experiment.
        run_id: of the run in MLflow; None until it exists.
        position: in the ledger; everything before it arrived.
        next_step: steps before it have their points.
        next_evaluation: evaluations at fewer steps have theirs.
        num_incidents: incidents delivered.
        time_ms: of the last record, for records that bear no time.
        files: artifacts delivered: SHA-256 by name.
        model_id: of the final model in MLflow; None until it is there.
        best_model_id: of the best model, where that is another.
        registered: id of the model that was registered, or refused by the registry.
        lacks_files: MLflow refused a file; it is offered again.
        lacks_end: it refused the ledger or a model at an end of the run; they are offered again
            while the run has not gone on, and at its next end.
        history: what the attempts ran as, for people.
        status: the run's in MLflow, as far as it was set from here; RUNNING is written down
            before it is set, so that no run is RUNNING there without being so here.
        settled_try_s: seconds since the epoch of the last try to settle a run that died.
    """

    key: str
    uri: str
    experiment: str
    run_id: str | None = None
    position: Position = START
    next_step: int = 0
    next_evaluation: int = 0
    num_incidents: int = 0
    time_ms: int = 0
    files: dict[str, str] = field(default_factory=dict)
    model_id: str | None = None
    best_model_id: str | None = None
    registered: str | None = None
    lacks_files: bool = False
    lacks_end: bool = False
    history: str = ""
    status: str | None = None
    settled_try_s: float = 0.0


def read_tracked(run: Storage) -> Tracked | None:
    """What the file tells; None where there is none.

    Raises:
        StorageError: it is damaged or of another format.
    """
    if not run.exists(TRACKING_FILE):
        return None
    path = f"{run.uri}/{TRACKING_FILE}"
    try:
        data = json.loads(run.read(TRACKING_FILE))
        version = data.pop("format")
        if version in READABLE:
            return Tracked(**{**data, "position": Position(**data["position"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged ({error!r}); delete it: the run is then delivered to MLflow again, "
            "as another MLflow run"
        ) from error
    raise StorageError(
        f"{path} has format {version!r}; this samestep reads {READABLE[0]} to {FORMAT}: use the "
        "version that wrote it"
    )


def write_tracked(run: Storage, tracked: Tracked) -> None:
    """Replaces the file."""
    run.write(TRACKING_FILE, json.dumps({"format": FORMAT, **asdict(tracked)}, indent=1).encode())


def tracked_for(run: Storage, uri: str, experiment: str) -> Tracked:
    """What was delivered to this store: nothing, where the run went to another one before.

    A key is written at once, before anything is made in MLflow under it: whoever dies in between
    finds what was made by its key.
    """
    before = read_tracked(run)
    shown = without_password(uri)
    if before is not None and (before.uri, before.experiment) == (shown, experiment):
        return before
    tracked = Tracked(
        key=before.key if before else uuid.uuid4().hex, uri=shown, experiment=experiment
    )
    write_tracked(run, tracked)
    return tracked


def without_password(uri: str) -> str:
    """The URI as it may be written and shown."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
