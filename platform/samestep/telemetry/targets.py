"""Files that lead Prometheus to the pages of the runs in a storage folder.

For its `file_sd_configs`: `files: [<storage>/.prometheus/*.json]`, a file for each run that is
alive. (They can't lie in the run directories: Prometheus takes a pattern in a file's name only.)
"""

from __future__ import annotations

import json
from dataclasses import replace

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import TARGET_SUFFIX, TARGETS_DIR

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
