"""Reading the files of one checkpoint: nothing is used that does not verify, nothing unpickled."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from samestep import names
from samestep.checkpoint.encode import parse_json
from samestep.checkpoint.layout import from_stored
from samestep.checkpoint.manifest import FORMAT, FileEntry, Manifest
from samestep.checkpoint.state import State, unflatten
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError


def read_folder(folder: Storage, step: int | None) -> tuple[State, Manifest]:
    """The state in a checkpoint's folder, verified by size and SHA-256, in new tensors on the CPU.

    Args:
        folder: of the checkpoint.
        step: that it must be of; None: of any.

    Raises:
        CheckpointError: there is none, or it is damaged; names the file and says why.
        StorageError: storage can't be read.
    """
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
