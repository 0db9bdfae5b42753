"""Which checkpoints stay: the newest ones, the best, and those that somebody still needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from samestep import names
from samestep.checkpoint.committed import CheckpointInfo, best_of, list_checkpoints
from samestep.checkpoint.manifest import step_name
from samestep.checkpoint.storage import Storage


def apply_retention(
    run: Storage, keep: int, protect: Collection[int] = (), *, back_steps: int | None = None
) -> list[int]:
    """Deletes whole checkpoints except the `keep` newest, the best and those in `protect`.

    Where the run may go back by `back_steps`, those that it needs then stay too (`way_back`).

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
    if back_steps is not None:
        stay |= way_back(whole, back_steps)
    gone = [info.step for info in whole[:-keep] if info.step not in stay]
    checkpoints = run.child(names.CHECKPOINTS_DIR)
    for step in gone:
        checkpoints.delete(f"{step_name(step)}/{names.MANIFEST_FILE}")
        checkpoints.delete(step_name(step))
    return gone


def way_back(whole: Sequence[CheckpointInfo], back_steps: int) -> set[int]:
    """Steps of the checkpoints that are needed to go back from the newest one.

    One lies so many steps or more before it, and not many more: the oldest in each stretch of
    `back_steps` steps is kept until a later one will do, so that there are a few at most, however
    dense they lie. And each is kept that was the best in its time, for it is so again.

    Args:
        whole: by step.
        back_steps: how far back.
    """
    if not whole:
        return set()
    floor = whole[-1].step - back_steps
    oldest: dict[int, int] = {}
    for info in whole:
        oldest.setdefault(info.step // max(back_steps, 1), info.step)
    base = max((step for step in oldest.values() if step <= floor), default=0)
    ranking = whole[-1].ranking
    bests = [
        best_of(whole[: place + 1], ranking)
        for place, info in enumerate(whole)
        if ranking is not None and info.step >= base
    ]
    return {
        *(step for step in oldest.values() if step >= base),
        *(best.step for best in bests if best is not None),
    }


def take_back(run: Storage, after_step: int) -> list[int]:
    """Deletes the checkpoints of steps that were taken back, and what is left of such.

    Args:
        run: the run directory.
        after_step: those of more steps.

    Returns:
        Their steps, the newest first: whoever looks meanwhile finds no hole.
    """
    gone = [info.step for info in list_checkpoints(run) if info.step > after_step]
    checkpoints = run.child(names.CHECKPOINTS_DIR)
    for step in reversed(gone):
        checkpoints.delete(f"{step_name(step)}/{names.MANIFEST_FILE}")
        checkpoints.delete(step_name(step))
    return gone[::-1]


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
