"""Writing a checkpoint: the files first, then, by whoever may commit, the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from safetensors.torch import save
from torch import Tensor

from samestep import __version__, names
from samestep.checkpoint.layout import Layout, to_stored
from samestep.checkpoint.manifest import (
    FORMAT,
    CheckpointMeta,
    FileEntry,
    Manifest,
    TensorEntry,
    step_name,
)
from samestep.checkpoint.state import State, flatten, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError
from samestep.exact.digest import canonical_order

STATE_FILE: Final = f"{names.STATE_FILE_PREFIX}00000{names.STATE_FILE_SUFFIX}"


def write_files(run: Storage, state: State, meta: CheckpointMeta) -> Manifest:
    """Writes the files of a checkpoint into the run directory, and no manifest.

    What an earlier, unfinished write of this step left is removed first. When this returns the
    live tensors may change again.

    Raises:
        CheckpointError: the state can't be kept, or a whole checkpoint of this step exists.
        StorageError: the files can't be written.
    """
    folder = run.child(names.CHECKPOINTS_DIR).child(step_name(state.step))
    if folder.exists(names.MANIFEST_FILE):
        raise CheckpointError(
            f"{folder.uri} exists already and is never overwritten; set it aside first"
        )
    tensors, values_json = flatten(state)
    contents = {STATE_FILE: _tensor_file(tensors), names.VALUES_FILE: _values_file(values_json)}
    folder.delete("")
    for name, data in contents.items():
        folder.write(name, data)
    return Manifest(
        step=state.step,
        files={name: FileEntry.of(data) for name, data in contents.items()},
        tensors={
            name: TensorEntry(file=STATE_FILE, layout=Layout.of(tensors[name], name=name))
            for name in canonical_order(tensors)
        },
        digest=state_sha256(state),
        meta=meta,
        samestep_version=__version__,
    )


def commit(run: Storage, manifest: Manifest) -> None:
    """Makes the checkpoint real: its files are there with their sizes, so the manifest goes in.

    Raises:
        CheckpointError: a file is missing or of another size.
        StorageError: the manifest can't be written.
    """
    folder = run.child(names.CHECKPOINTS_DIR).child(manifest.name)
    for name, entry in manifest.files.items():
        size = folder.size_bytes(name) if folder.exists(name) else None
        if size != entry.num_bytes:
            raise CheckpointError(
                f"can't commit {folder.uri}: {name} should have {entry.num_bytes} bytes, "
                f"{'is missing' if size is None else f'has {size}'}; save again"
            )
    folder.write(names.MANIFEST_FILE, manifest.to_json().encode("ascii"))


def _tensor_file(tensors: Mapping[str, Tensor]) -> bytes:
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in canonical_order(tensors):
        tensor = to_stored(tensors[name])
        if tensor.untyped_storage().data_ptr() in seen:  # safetensors refuses shared memory
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        stored[name] = tensor
    return save(stored, metadata={"samestep": str(FORMAT)})


def _values_file(values_json: str) -> bytes:
    header = json.dumps({"format": FORMAT})[:-1]
    return f'{header}, "values": {values_json}}}\n'.encode("ascii")
