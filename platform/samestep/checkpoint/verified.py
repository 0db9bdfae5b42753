"""Reading the files of one checkpoint: nothing is used that does not verify, nothing unpickled."""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from samestep import names
from samestep.checkpoint.layout import from_stored
from samestep.checkpoint.manifest import READABLE_FORMATS, FileEntry, Manifest, TensorEntry
from samestep.checkpoint.state import State, unflatten
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.strict_json import parse_json
from samestep.errors import CheckpointError

PART_BYTES: Final = 16 << 20


def read_folder(folder: Storage, step: int | None) -> tuple[State, Manifest]:
    """The state in a checkpoint's folder, verified by size and SHA-256, in new tensors on the CPU.

    Args:
        folder: of the checkpoint.
        step: that it must be of; None: of any.

    Raises:
        CheckpointError: there is none, or it is damaged; names the file and says why.
        StorageError: storage can't be read.
    """
    manifest = _manifest(folder, step)
    contents = {name: _verified(folder, name, entry) for name, entry in manifest.files.items()}
    try:
        return _state(manifest, contents), manifest
    except (CheckpointError, SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.uri} can't be read: {error}") from error


def verify_folder(folder: Storage, step: int | None) -> Manifest:
    """Compares every file of a checkpoint with its manifest, holding a piece of one at a time.

    Raises:
        CheckpointError: there is none, or it is damaged; names the file and says why.
        StorageError: storage can't be read.
    """
    manifest = _manifest(folder, step)
    for name, entry in manifest.files.items():
        if not folder.exists(name):
            raise CheckpointError(f"{folder.uri}/{name} is missing")
        digest, num_bytes = hashlib.sha256(), 0
        while data := folder.read_part(name, num_bytes, PART_BYTES):
            digest.update(data)
            num_bytes += len(data)
        _compare(folder, name, entry, FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest()))
    return manifest


def _manifest(folder: Storage, step: int | None) -> Manifest:
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
    return manifest


def _verified(folder: Storage, name: str, entry: FileEntry) -> bytes:
    if not folder.exists(name):
        raise CheckpointError(f"{folder.uri}/{name} is missing")
    data = folder.read(name)
    _compare(folder, name, entry, FileEntry.of(data))
    return data


def _compare(folder: Storage, name: str, entry: FileEntry, found: FileEntry) -> None:
    if not found.num_bytes and entry.num_bytes:
        reason = f"zero bytes, should have {entry.num_bytes}"
    elif found.num_bytes < entry.num_bytes:
        reason = f"cut: {found.num_bytes} of {entry.num_bytes} bytes"
    elif found.num_bytes > entry.num_bytes:
        reason = f"too long: {found.num_bytes} bytes, should have {entry.num_bytes}"
    elif found.sha256 != entry.sha256:
        reason = f"SHA-256 is {found.sha256}, should be {entry.sha256}"
    else:
        return
    raise CheckpointError(f"{folder.uri}/{name} is damaged: {reason}")


def _state(manifest: Manifest, contents: dict[str, bytes]) -> State:
    stored = {
        name: load(contents.pop(name))
        for name in list(contents)
        if name.endswith(names.STATE_FILE_SUFFIX)
    }
    tensors: dict[str, Tensor] = {}
    for name, entry in manifest.tensors.items():
        for file in entry.files:
            if name not in stored.get(file, {}):
                raise CheckpointError(f"{name} is missing from {file}")
        entry.layout.check(name=name)
        tensors[name] = from_stored(_joined(name, entry, stored), entry.layout, name=name)
    values = parse_json(contents[names.VALUES_FILE].decode("ascii"))
    if values["format"] not in READABLE_FORMATS:
        raise CheckpointError(
            f"{names.VALUES_FILE} has format {values['format']!r}; this version of samestep reads "
            f"the formats {', '.join(map(str, READABLE_FORMATS))}"
        )
    return unflatten(manifest.step, tensors, values["values"])


def _joined(name: str, entry: TensorEntry, stored: dict[str, dict[str, Tensor]]) -> Tensor:
    """A tensor as `to_stored` gave it, put together where it was cut; lets go of what it takes."""
    if entry.file:
        return stored[entry.file].pop(name)
    end = 0
    for piece in entry.pieces:
        if piece.start != end or len(stored[piece.file][name]) != piece.stop - piece.start:
            raise CheckpointError(f"{name}: the piece in {piece.file} does not fit the manifest")
        end = piece.stop
    flat = torch.cat([stored[piece.file].pop(name) for piece in entry.pieces])
    shape = list(entry.layout.shape)
    return flat.reshape(shape + list(flat.shape[1:]))
