"""Which runs MLflow must be told of by others, and what is noted of a try."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from recording import job

from samestep.checkpoint.storage import Storage
from samestep.names import SPEC_FILE
from samestep.telemetry import lease as leases
from samestep.telemetry.mlflow_client import TrackingError
from samestep.telemetry.settling import RETRY_S, is_due, settle
from samestep.telemetry.tracking_file import Tracked, read_tracked, write_tracked

TRACKED = Tracked(key="k", uri="http://h", experiment="e", run_id="r", status="RUNNING")


@pytest.fixture
def left(run: Storage) -> Storage:
    """A run that nobody holds any more."""
    run.write(SPEC_FILE, job().encode())
    leases.acquire(run).release()
    return run


@pytest.mark.parametrize(
    ("tracked", "due"),
    [
        (TRACKED, True),
        (replace(TRACKED, run_id=None), True),  # made there, but its id was lost
        (replace(TRACKED, status=None), True),  # of a version that did not note it
        (replace(TRACKED, status=None, run_id=None), False),
        (replace(TRACKED, status="KILLED"), False),
        (replace(TRACKED, status="FINISHED"), False),
        (replace(TRACKED, settled_try_s=950.0), False),
        (replace(TRACKED, settled_try_s=1000.0 - RETRY_S), True),
        (replace(TRACKED, settled_try_s=2000.0), True),  # a clock that was wrong
    ],
)
def test_a_run_that_nobody_holds_is_due_until_mlflow_knows(
    left: Storage, tracked: Tracked, due: bool
) -> None:
    write_tracked(left, tracked)
    assert is_due(left, now=lambda: 1000.0) is due


def test_a_run_that_is_alive_or_was_never_tracked_or_is_damaged_is_not_due(left: Storage) -> None:
    assert not is_due(left)
    write_tracked(left, TRACKED)
    lease = leases.acquire(left)
    assert not is_due(left)
    lease.release()
    assert is_due(left)
    left.write("mlflow.json", b"{")
    assert not is_due(left)


def test_a_server_that_is_away_is_asked_once_a_minute(left: Storage) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        write_tracked(left, replace(TRACKED, uri=uri))
        with pytest.raises(TrackingError, match="no answer"):
            settle(left, environ={}, now=lambda: 5000.0)
    tracked = read_tracked(left)
    assert tracked == replace(TRACKED, uri=uri, settled_try_s=5000.0)
    assert not is_due(left, now=lambda: 5001.0)
    assert is_due(left, now=lambda: 5000.0 + RETRY_S)


def test_a_database_that_is_gone_is_not_made_anew(left: Storage, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    write_tracked(left, replace(TRACKED, uri=f"sqlite:///{database}"))
    with pytest.raises(TrackingError, match=r"there is no file .*mlflow\.db"):
        settle(left, environ={})
    assert not database.exists()


def test_a_password_that_is_not_written_down_comes_from_the_environment(left: Storage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_tracked(left, replace(TRACKED, uri=f"http://127.0.0.1:{port}"))
    environ = {"MLFLOW_TRACKING_URI": f"http://me:secret@127.0.0.1:{port}"}
    with pytest.raises(TrackingError) as caught:
        settle(left, environ=environ)
    assert "secret" not in str(caught.value)
