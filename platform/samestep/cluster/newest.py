"""The newest checkpoint of a run, by names: to read one loads torch, which a driver need not."""

from __future__ import annotations

from samestep.checkpoint.storage import Storage
from samestep.names import CHECKPOINT_PREFIX, CHECKPOINTS_DIR, MANIFEST_FILE


def newest_checkpoint(run: Storage) -> Storage | None:
    """The folder of the newest whole one; None where there is none.

    Raises:
        StorageError: the run directory can't be read.
    """
    named = [name for name in run.list(CHECKPOINTS_DIR) if name.startswith(CHECKPOINT_PREFIX)]
    for name in sorted(named, key=lambda name: (len(name), name), reverse=True):
        folder = run.child(CHECKPOINTS_DIR).child(name)
        if folder.exists(MANIFEST_FILE):
            return folder
    return None
