"""Reading checkpoints back: only what verifies is used, and nothing is ever unpickled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from samestep import names
from samestep.checkpoint.encode import parse_json
from samestep.checkpoint.layout import from_stored
from samestep.checkpoint.manifest import FORMAT, FileEntry, Manifest, step_name, step_of
from samestep.checkpoint.model_state import state_dict_of
from samestep.checkpoint.state import State, state_sha256, unflatten
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as a listing shows it, not verified.

    Attributes:
        step: number of steps taken before it.
        uri: its folder.
        num_bytes: size of all its files.
        created_s: Unix time; None where there is no manifest that can be read.
        whole: it has a manifest: its write was finished.
    """

    step: int
    uri: str
    num_bytes: int
    created_s: float | None
    whole: bool


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


def list_checkpoints(run: Storage) -> list[CheckpointInfo]:
    """All checkpoints of a run by step, unfinished ones too."""
    found = []
    for step in _steps(run):
        folder = _folder(run, step)
        whole = folder.exists(names.MANIFEST_FILE)
        found.append(
            CheckpointInfo(
                step=step,
                uri=folder.uri,
                num_bytes=folder.size_bytes(),
                created_s=_created_s(folder) if whole else None,
                whole=whole,
            )
        )
    return found


def load_checkpoint(run: Storage, step: int) -> tuple[State, Manifest]:
    """The state after `step` steps, verified by size and SHA-256, in new tensors on the CPU.

    Raises:
        CheckpointError: it does not exist or is damaged; names the file and says why.
        StorageError: storage can't be read.
    """
    return _read(_folder(run, step), step)


def newest_whole(
    run: Storage, at_most_step: int | None = None
) -> tuple[Loaded | None, list[Damaged]]:
    """The newest checkpoint that verifies, and those that are newer and don't; moves nothing.

    Raises:
        StorageError: storage can't be read: that is no damage, and is worth another try.
    """
    damaged: list[Damaged] = []
    for step in reversed(_steps(run)):
        if at_most_step is not None and step > at_most_step:
            continue
        try:
            state, manifest = load_checkpoint(run, step)
        except CheckpointError as error:
            folder = _folder(run, step)
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


def load_weights(path: str | Path) -> dict[str, Any]:
    """The weights of a run's newest checkpoint, or of a checkpoint, for plain torch.

    Args:
        path: a run directory or a checkpoint's folder; a path or a URI.

    Returns:
        What `model.load_state_dict(..., strict=True)` takes: parameters and persistent buffers
        on the CPU under the model's own keys, tied keys and extra state included.

    Raises:
        CheckpointError: there is none, or it is damaged.
        StorageError: storage can't be read.
    """
    state, _ = _read_at(path)
    return state_dict_of(state.values["model"], state.tensors)


def digest_of(path: str | Path) -> str:
    """SHA-256 of weights, optimizer state and position in a run's newest checkpoint, or in one.

    Computed from what was read, and compared with what the manifest says.

    Raises:
        CheckpointError: there is none, or it is damaged.
        StorageError: storage can't be read.
    """
    state, manifest = _read_at(path)
    digest = state_sha256(state)
    if digest != manifest.digest:
        raise CheckpointError(
            f"{path}: step {state.step} has the digest {digest}, but its manifest says "
            f"{manifest.digest}; the checkpoint was altered"
        )
    return digest


def _steps(run: Storage) -> list[int]:
    found = (step_of(name) for name in run.list(names.CHECKPOINTS_DIR))
    return sorted(step for step in found if step is not None)


def _folder(run: Storage, step: int) -> Storage:
    return run.child(names.CHECKPOINTS_DIR).child(step_name(step))


def _created_s(folder: Storage) -> float | None:
    try:
        return Manifest.from_json(folder.read(names.MANIFEST_FILE)).meta.created_s
    except CheckpointError:
        return None


def _read_at(path: str | Path) -> tuple[State, Manifest]:
    place = Storage.at(str(path))
    if place.exists(names.MANIFEST_FILE):
        return _read(place, None)
    whole = [step for step in _steps(place) if _folder(place, step).exists(names.MANIFEST_FILE)]
    if not whole:
        raise CheckpointError(
            f"{place.uri} is neither a checkpoint (no {names.MANIFEST_FILE}) nor a run that has a "
            f"whole one (in {names.CHECKPOINTS_DIR}/); give the path of either"
        )
    try:
        return load_checkpoint(place, whole[-1])
    except CheckpointError as error:
        older = [_folder(place, step).uri for step in whole[:-1]]
        hint = f"the one before is {older[-1]}" if older else "there is no older one"
        raise CheckpointError(f"{error}; {hint}") from error


def _read(folder: Storage, step: int | None) -> tuple[State, Manifest]:
    if not folder.exists(names.MANIFEST_FILE):
        raise CheckpointError(
            f"{folder.uri}: no {names.MANIFEST_FILE}: it was never finished, or does not exist"
        )
    where = f"{folder.uri}/{names.MANIFEST_FILE}"
    data = folder.read(names.MANIFEST_FILE)
    try:
        manifest = Manifest.from_json(data)
    except CheckpointError as error:
        reason = "zero bytes" if not data else str(error)
        raise CheckpointError(f"{where} is damaged: {reason}") from error
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{where} is that of step {manifest.step}, not of {step}")
    contents = {name: _verified(folder, name, entry) for name, entry in manifest.files.items()}
    try:
        return _state(manifest, contents), manifest
    except (CheckpointError, SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.uri} can't be read: {error}") from error


def _verified(folder: Storage, name: str, entry: FileEntry) -> bytes:
    if not folder.exists(name):
        raise CheckpointError(f"{folder.uri}/{name} is missing")
    data = folder.read(name)
    found = FileEntry.of(data)
    if not data and entry.num_bytes:
        reason = f"zero bytes, should have {entry.num_bytes}"
    elif found.num_bytes < entry.num_bytes:
        reason = f"cut: {found.num_bytes} of {entry.num_bytes} bytes"
    elif found.num_bytes > entry.num_bytes:
        reason = f"too long: {found.num_bytes} bytes, should have {entry.num_bytes}"
    elif found.sha256 != entry.sha256:
        reason = f"SHA-256 is {found.sha256}, should be {entry.sha256}"
    else:
        return data
    raise CheckpointError(f"{folder.uri}/{name} is damaged: {reason}")


def _state(manifest: Manifest, contents: dict[str, bytes]) -> State:
    stored: dict[str, Tensor] = {}
    for name in list(contents):
        if name.endswith(names.STATE_FILE_SUFFIX):
            stored.update(load(contents.pop(name)))
    tensors: dict[str, Tensor] = {}
    for name, entry in manifest.tensors.items():
        if name not in stored:
            raise CheckpointError(f"{name} is missing from {entry.file}")
        entry.layout.check(name=name)
        tensors[name] = from_stored(stored.pop(name), entry.layout, name=name)
    values = parse_json(contents[names.VALUES_FILE].decode("ascii"))
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"{names.VALUES_FILE} has format {values['format']!r}; this version of samestep reads "
            f"format {FORMAT}"
        )
    return unflatten(manifest.step, tensors, values["values"])
