"""A run that MLflow has already, for whoever adds to it from outside of the run: none is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from samestep.checkpoint.storage import Storage
from samestep.names import Env
from samestep.telemetry.identity import read_spec
from samestep.telemetry.mlflow_client import MlflowRun, TrackingError
from samestep.telemetry.tracking_file import Tracked, without_password


def find_in_mlflow(
    run: Storage, tracked: Tracked, *, environ: Mapping[str, str] = os.environ
) -> MlflowRun:
    """The run in the store that it was delivered to.

    Raises:
        NoSuchRunError: it was deleted there, or never made.
        SamestepError: the store is away, or the run directory is damaged.
    """
    uri = _address(run, tracked, environ)
    if not _may_exist(uri):
        raise TrackingError(f"there is no file {uri}")
    return MlflowRun(
        uri,
        experiment=tracked.experiment,
        artifact_root=None,
        key=tracked.key,
        name="",
        run_id=tracked.run_id,
        make=False,
    )


def _address(run: Storage, tracked: Tracked, environ: Mapping[str, str]) -> str:
    """The store's URI with its password, as far as that is still to be had."""
    given = (read_spec(run).tracking.uri, environ.get(Env.MLFLOW_TRACKING_URI))
    return next((u for u in given if u and without_password(u) == tracked.uri), tracked.uri)


def _may_exist(uri: str) -> bool:
    """False for a SQLite file that is gone, which looking for the run would make anew."""
    if not uri.startswith("sqlite:"):
        return True
    return Path("/" + urlsplit(uri).path.lstrip("/")).exists()
