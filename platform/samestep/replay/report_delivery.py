"""Where the page of an incident goes: beside its record in the run, and to MLflow."""

from __future__ import annotations

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError, StorageError
from samestep.names import INCIDENTS_DIR, REPORT_FILE
from samestep.telemetry.tracked_run import find_in_mlflow
from samestep.telemetry.tracking_file import read_tracked


def deliver(run: Storage, incident_id: str, page: str) -> list[str]:
    """Puts a page where people look for it; lines that say where it is, or why it is not.

    A page made once more replaces the one before.
    """
    name = f"{INCIDENTS_DIR}/{incident_id}/{REPORT_FILE}"
    data = page.encode()
    try:
        run.write(name, data)
        notes = [f"report: {run.uri}/{name}"]
    except StorageError as error:
        notes = [f"the run's own copy of the report is not written: {error}"]
    return notes + _to_mlflow(run, name, data)


def _to_mlflow(run: Storage, name: str, data: bytes) -> list[str]:
    try:
        tracked = read_tracked(run)
        if tracked is None or tracked.run_id is None:
            return []
        find_in_mlflow(run, tracked).log_file(name, data)
    except SamestepError as error:
        return [f"the report is not in MLflow: {error}"]
    return [f"report: artifact {name} of MLflow run {tracked.run_id} at {tracked.uri}"]
