"""Removing a run for good, and only one that nobody trains."""

from __future__ import annotations

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, RunInUseError
from samestep.names import LEASE_PREFIX, LEDGER_DIR, SPEC_FILE
from samestep.telemetry import lease as leases
from samestep.telemetry.identity import read_spec
from samestep.telemetry.targets import withdraw


def require_removable(run: Storage) -> None:
    """Refuses what is no run directory, or that of a run that is known to be alive.

    Raises:
        InputError: a folder that no recorder ever opened, or whose job can't be read.
        RunInUseError: a process of this machine holds its lease.
    """
    read_spec(run)
    known = [name for name in run.list() if name == LEDGER_DIR or name.startswith(LEASE_PREFIX)]
    if not known:
        raise InputError(
            f"{run.uri} has a {SPEC_FILE}, but neither a ledger nor a lease: it is no run "
            "directory, and is left alone"
        )
    present = leases.holder(run)
    if present is not None and present.is_local and present.alive:
        raise RunInUseError(
            f"the run {run.uri} is alive ({present.where}): stop it first (Ctrl-C, or SIGTERM to "
            "its process)"
        )


def remove_run(run: Storage) -> None:
    """Deletes a run directory while holding its lease.

    Where another machine holds it, this watches for half a minute whether it is renewed. What is
    interrupted can be repeated: what makes the folder a run goes last.

    Raises:
        InputError: it is no run directory.
        RunInUseError: a live process holds the run.
        StorageError: something can't be deleted.
    """
    require_removable(run)
    lease = leases.acquire(run)
    try:
        for name in run.list():
            if name != SPEC_FILE and not name.startswith(LEASE_PREFIX):
                run.delete(name)
        withdraw(run)  # left by a process that was killed
    finally:
        lease.release()
    run.delete("")
