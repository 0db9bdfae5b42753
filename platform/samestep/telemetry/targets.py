"""Files that lead Prometheus to the pages of the runs in a storage folder.

For its `file_sd_configs`: `files: [<storage>/.prometheus/*.json]`, a file for each run that is
alive. (They can't lie in the run directories: Prometheus takes a pattern in a file's name only.)
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError, StorageError
from samestep.names import TARGET_SUFFIX, TARGETS_DIR
from samestep.telemetry import lease as leases

JOB = "samestep"


def announce(run: Storage, target: str) -> None:
    """Says where a run's page is: `host:port`.

    Its series are told apart by the run directory, not by the port, which is another one after
    each start: so a counter goes on where it was.
    """
    labels = {"job": JOB, "instance": run.uri}
    targets = [{"targets": [target], "labels": labels}]
    storage, name = _place(run)
    storage.write(name, json.dumps(targets).encode())


def withdraw(run: Storage) -> None:
    """Takes back what was said of a run's page, if anything was."""
    storage, name = _place(run)
    if storage.exists(name):
        storage.delete(name)


def withdraw_left(run: Storage) -> None:
    """Takes back what a run said whose process was killed; never raises.

    A run that lives, or whose process is on another machine, is left alone.
    """
    with suppress(SamestepError):  # it lives, or may not be written from here
        storage, name = _place(run)
        if not storage.exists(name):
            return
        present = leases.holder(run)
        if present is None:  # the run itself is gone
            withdraw(run)
        elif not present.alive:
            lease = leases.acquire(run, wait_s=0)  # it might be started again just now
            try:
                withdraw(run)
            finally:
                lease.release()


def withdraw_all_left(storage: Storage) -> None:
    """The same for all runs of a storage folder; takes no time where none is alive or left."""
    with suppress(SamestepError):
        if storage.exists(TARGETS_DIR):
            for name in storage.list(TARGETS_DIR):
                if name.endswith(TARGET_SUFFIX):
                    withdraw_left(storage.child(name.removesuffix(TARGET_SUFFIX)))


def announced(storage: Storage) -> dict[str, str]:
    """The `host:port` of each run in a storage folder that says it is alive, by its name.

    Raises:
        StorageError: a file there is none of ours.
    """
    if not storage.exists(TARGETS_DIR):
        return {}
    found = {}
    for name in storage.list(TARGETS_DIR):
        if not name.endswith(TARGET_SUFFIX):
            continue
        path = f"{TARGETS_DIR}/{name}"
        try:
            (group,) = json.loads(storage.read(path))
            (found[name.removesuffix(TARGET_SUFFIX)],) = group["targets"]
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{storage.uri}/{path} does not name a run's page ({error!r}); delete it, a run "
                "that is alive writes it again when it is started"
            ) from error
    return found


def _place(run: Storage) -> tuple[Storage, str]:
    root, _, name = run.root.rpartition("/")
    return replace(run, root=root), f"{TARGETS_DIR}/{name}{TARGET_SUFFIX}"
