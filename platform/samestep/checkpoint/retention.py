"""Which checkpoints stay: the newest ones, the best, and those that somebody still needs."""

from __future__ import annotations

from collections.abc import Collection

from samestep import names
from samestep.checkpoint.committed import best_of, list_checkpoints
from samestep.checkpoint.manifest import step_name
from samestep.checkpoint.storage import Storage


def apply_retention(run: Storage, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Deletes whole checkpoints except the `keep` newest, the best and those in `protect`.

    The best is so by what the newest one says that the run ranks by. The manifest goes first: what
    is half deleted does not exist. Unfinished ones and those set aside are left alone.

    Returns:
        The steps whose checkpoints were deleted, oldest first.

    Raises:
        ValueError: `keep` is below 1, which would delete the only way back.
        StorageError: a file can't be deleted.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
    whole = [info for info in list_checkpoints(run) if info.whole]
    best = best_of(whole)
    stay = {*protect, *([best.step] if best else [])}
    gone = [info.step for info in whole[:-keep] if info.step not in stay]
    checkpoints = run.child(names.CHECKPOINTS_DIR)
    for step in gone:
        checkpoints.delete(f"{step_name(step)}/{names.MANIFEST_FILE}")
        checkpoints.delete(step_name(step))
    return gone


def clear_unfinished(run: Storage, before_step: int) -> list[int]:
    """Deletes what saves of earlier steps left that never became checkpoints.

    For whoever commits, when a later one is real: a worker that was killed in the middle of a
    save leaves its files, and nobody else would take them away.

    Returns:
        The steps whose remains were deleted.
    """
    gone = [
        info.step for info in list_checkpoints(run) if not info.whole and info.step < before_step
    ]
    for step in gone:
        run.child(names.CHECKPOINTS_DIR).delete(step_name(step))
    return gone
