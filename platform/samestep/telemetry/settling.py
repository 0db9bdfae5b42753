"""Ends in MLflow what ended here: a run whose recorder was killed is RUNNING there for ever.

Nobody of the run is left to say it, so the next command that sees the run does. A run that is
resumed is RUNNING again by its own doing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError
from samestep.names import DIED, RunState, Tag
from samestep.telemetry import lease as leases
from samestep.telemetry.identity import read_result
from samestep.telemetry.mlflow_client import NoSuchRunError
from samestep.telemetry.mlflow_delivery import KILLED, RUNNING, STATUS
from samestep.telemetry.tracked_run import find_in_mlflow
from samestep.telemetry.tracking_file import Tracked, read_tracked, write_tracked

RETRY_S: Final = 60.0
"""Least time between two tries at a run whose MLflow is away."""


def is_due(run: Storage, *, now: Callable[[], float] = time.time) -> bool:
    """Whether a run is over and MLflow may not know it; reads two small files, and never raises."""
    try:
        tracked = read_tracked(run)
        if tracked is None or not _is_open(tracked):
            return False
        if 0 <= now() - tracked.settled_try_s < RETRY_S:
            return False
        present = leases.holder(run)
    except SamestepError:  # what is wrong with the run is told by whoever looks at it
        return False
    writable = not run.is_local or os.access(run.root, os.W_OK)
    return writable and present is not None and not present.alive


def settle(
    run: Storage,
    *,
    environ: Mapping[str, str] = os.environ,
    now: Callable[[], float] = time.time,
) -> bool:
    """Gives a run the status in MLflow that it has here, and notes it; holds the run meanwhile.

    Returns:
        Whether that is done now, by this call.

    Raises:
        SamestepError: MLflow is away, or the run is not: somebody holds it.
    """
    lease = leases.acquire(run, wait_s=0)
    try:
        tracked = read_tracked(run)
        if tracked is None or not _is_open(tracked):
            return False
        tracked = replace(tracked, settled_try_s=now())
        write_tracked(run, tracked)
        status, tag = _ending(run)
        _end_in_mlflow(run, tracked, status, tag, environ, now)
        write_tracked(run, replace(tracked, status=status))
        return True
    finally:
        lease.release()


def _is_open(tracked: Tracked) -> bool:
    """Whether a run may be RUNNING in MLflow; files of before have no status, but an id."""
    return tracked.status == RUNNING or (tracked.status is None and tracked.run_id is not None)


def _ending(run: Storage) -> tuple[str, str]:
    result = read_result(run)
    if result is None:
        return KILLED, DIED
    state = RunState(str(result.get("status", RunState.FAILED)))
    return STATUS.get(state, "FAILED"), str(state)


def _end_in_mlflow(
    run: Storage,
    tracked: Tracked,
    status: str,
    tag: str,
    environ: Mapping[str, str],
    now: Callable[[], float],
) -> None:
    try:
        there = find_in_mlflow(run, tracked, environ=environ)
    except NoSuchRunError:  # deleted there, or never made: nothing is left open
        return
    there.set_tags({str(Tag.STATUS): tag})
    there.set_status(status, tracked.time_ms or int(now() * 1000))


def main(uris: list[str]) -> None:
    """Settles runs one after another, in silence."""
    for uri in uris:
        with suppress(SamestepError):  # the next command tries again
            settle(Storage.at(uri))


if __name__ == "__main__":
    main(sys.argv[1:])
