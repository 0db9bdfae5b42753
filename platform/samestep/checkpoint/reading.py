"""Finding checkpoints of a run and reading them back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import names
from samestep.checkpoint.committed import (
    CheckpointInfo,
    best_of,
    folder_of,
    list_checkpoints,
    steps_of,
)
from samestep.checkpoint.manifest import Manifest, step_name, step_of
from samestep.checkpoint.model_state import averaged, state_dict_of
from samestep.checkpoint.state import State, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.verified import read_folder
from samestep.errors import CheckpointError, InputError
from samestep.spec_training import BEST, LATEST

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that verified."""

    step: int
    state: State
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A checkpoint that can't be used.

    Attributes:
        step: its step.
        uri: its folder, untouched.
        reason: which file, and what is wrong with it.
        unfinished: it has no manifest, as after a writer that was killed.
    """

    step: int
    uri: str
    reason: str
    unfinished: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A checkpoint that was asked for.

    Attributes:
        step: its step.
        warning: why it is the latest although the best was asked for; None otherwise.
    """

    step: int
    warning: str | None = None


def choose(run: Storage, which: str | int = LATEST) -> Choice:
    """The whole checkpoint that is meant by "latest", "best" or a number of steps.

    Where the run ranks its checkpoints, but none has a score (never evaluated, or always NaN), the
    latest stands for the best, with a warning.

    Raises:
        InputError: it is none of these.
        CheckpointError: the run has no such checkpoint; names those it has.
    """
    whole = [info for info in list_checkpoints(run) if info.whole]
    steps = [info.step for info in whole]
    has = f"it has whole ones after {', '.join(map(str, steps))} steps"
    if not whole:
        raise CheckpointError(
            f"{run.uri} has no whole checkpoint (in {names.CHECKPOINTS_DIR}/): give the path of a "
            "run that has one"
        )
    if which == LATEST:
        return Choice(step=steps[-1])
    if which == BEST:
        return _best(run, whole, has)
    if isinstance(which, str) and not (which.isascii() and which.isdigit()):
        raise InputError(f"a checkpoint is {LATEST}, {BEST} or a number of steps; got {which!r}")
    if int(which) not in steps:
        raise CheckpointError(f"{run.uri} has no checkpoint after {int(which)} steps; {has}")
    return Choice(step=int(which))


def _best(run: Storage, whole: Sequence[CheckpointInfo], has: str) -> Choice:
    ranking, latest = whole[-1].ranking, whole[-1].step
    if ranking is None:
        raise CheckpointError(
            f"{run.uri} ranks its checkpoints by nothing, so none is the best; {has}: give "
            f"{LATEST} or one of these steps, or set checkpoint.best.metric and train on"
        )
    best = best_of(whole, ranking)
    if best is not None:
        return Choice(step=best.step)
    return Choice(
        step=latest,
        warning=(
            f"no checkpoint of {run.uri} has a score to be the best by ({ranking.metric} was NaN, "
            f"or never evaluated): taking the latest, after {latest} steps"
        ),
    )


def load_checkpoint(run: Storage, step: int) -> tuple[State, Manifest]:
    """The state after `step` steps, verified by size and SHA-256, in new tensors on the CPU.

    Raises:
        CheckpointError: it does not exist or is damaged; names the file and says why.
        StorageError: storage can't be read.
    """
    return read_folder(folder_of(run, step), step)


def newest_whole(
    run: Storage, at_most_step: int | None = None
) -> tuple[Loaded | None, list[Damaged]]:
    """The newest checkpoint that verifies, and those that are newer and don't; moves nothing.

    Raises:
        StorageError: storage can't be read: that is no damage, and is worth another try.
    """
    damaged: list[Damaged] = []
    for step in reversed(steps_of(run)):
        if at_most_step is not None and step > at_most_step:
            continue
        try:
            state, manifest = load_checkpoint(run, step)
        except CheckpointError as error:
            folder = folder_of(run, step)
            unfinished = not folder.exists(names.MANIFEST_FILE)
            damaged.append(
                Damaged(step=step, uri=folder.uri, reason=str(error), unfinished=unfinished)
            )
        else:
            return Loaded(step=step, state=state, manifest=manifest), damaged
    return None, damaged


def set_aside(run: Storage, damaged: Damaged) -> str:
    """Moves a damaged checkpoint to where it counts no more but stays as evidence.

    Returns:
        Its new folder, `checkpoints/damaged/step-<step>-<n>`, as a URI.
    """
    checkpoints = run.child(names.CHECKPOINTS_DIR)
    name, n = step_name(damaged.step), 1
    while checkpoints.exists(f"{names.DAMAGED_DIR}/{name}-{n}"):
        n += 1
    target = f"{names.DAMAGED_DIR}/{name}-{n}"
    checkpoints.rename(name, target)
    return checkpoints.child(target).uri


def load_weights(
    path: str | Path, *, checkpoint: str | int = LATEST, ema: bool | None = None
) -> dict[str, Any]:
    """The weights of a run's checkpoint for plain torch.

    Args:
        path: a run directory or a checkpoint's folder; a path or a URI.
        checkpoint: of a run: "latest", "best", or the number of steps before it.
        ema: True: the averages of the weights; False: the weights themselves; None: the averages
            where the run keeps them.

    Returns:
        What `model.load_state_dict(..., strict=True)` takes: parameters and persistent buffers
        on the CPU under the model's own keys, tied keys and extra state included.

    Raises:
        CheckpointError: there is none, it is damaged, or has no averages.
        StorageError: storage can't be read.
    """
    state, manifest = read_at(path, checkpoint)
    return weights_of(state, ema=ema, source=f"{path}, step {manifest.step}")


def weights_of(state: State, *, ema: bool | None = None, source: str) -> dict[str, Any]:
    """The model's state_dict in a state; `ema` as for `load_weights`, `source` for messages.

    Raises:
        CheckpointError: averages are asked for, and there are none.
    """
    has_averages = "ema" in state.values
    if ema and not has_averages:
        raise CheckpointError(
            f"{source}: the checkpoint has no averages of weights: the run's ema.decay was null; "
            "ask for the weights themselves (ema=False)"
        )
    found = state_dict_of(state.values["model"], state.tensors)
    if ema is False or not has_averages:
        return found
    return averaged(found, state.values["model"], state.tensors)


def digest_of(path: str | Path) -> str:
    """SHA-256 of weights, optimizer state and position in a run's newest checkpoint, or in one.

    Computed from what was read, and compared with what the manifest says.

    Raises:
        CheckpointError: there is none, or it is damaged.
        StorageError: storage can't be read.
    """
    state, manifest = read_at(path)
    digest = state_sha256(state)
    if digest != manifest.digest:
        raise CheckpointError(
            f"{path}: step {state.step} has the digest {digest}, but its manifest says "
            f"{manifest.digest}; the checkpoint was altered"
        )
    return digest


def read_at(path: str | Path, which: str | int = LATEST) -> tuple[State, Manifest]:
    """The state of a run's checkpoint, or of the checkpoint whose folder is given.

    Raises:
        CheckpointError: there is none, or it is damaged.
        InputError: `which` is no way to name a checkpoint.
        StorageError: storage can't be read.
    """
    place = Storage.at(str(path))
    if place.exists(names.MANIFEST_FILE):
        if which not in (LATEST, step := step_of(place.root.rpartition("/")[2])):
            raise InputError(
                f"{place.uri} is a checkpoint itself (after {step} steps), so {which!r} can't be "
                "chosen from it; give the run directory"
            )
        return read_folder(place, None)
    whole = [step for step in steps_of(place) if folder_of(place, step).exists(names.MANIFEST_FILE)]
    if not whole:
        raise CheckpointError(
            f"{place.uri} is neither a checkpoint (no {names.MANIFEST_FILE}) nor a run that has a "
            f"whole one (in {names.CHECKPOINTS_DIR}/); give the path of either"
        )
    choice = choose(place, which)
    if choice.warning is not None:
        logger.warning("%s", choice.warning)
    try:
        return load_checkpoint(place, choice.step)
    except CheckpointError as error:
        older = [folder_of(place, step).uri for step in whole if step < choice.step]
        hint = f"the one before is {older[-1]}" if older else "there is no older one"
        raise CheckpointError(f"{error}; {hint}") from error
