"""What a checkpoint consists of: its files as jobs for writers, and the manifest that proves it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash
from torch import Tensor

from samestep import __version__, names
from samestep.checkpoint.encode import dumps
from samestep.checkpoint.image import Image, Plan
from samestep.checkpoint.job import DigestJob, FileJob, WriteJob, Written, perform
from samestep.checkpoint.layout import Layout
from samestep.checkpoint.manifest import (
    FORMAT,
    CheckpointMeta,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    step_name,
)
from samestep.checkpoint.split import Piece, split
from samestep.checkpoint.state import State, flatten
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError
from samestep.exact.digest import (
    canonical_order,
    layout_header,
    tensor_bytes,
    tensor_header,
    values_tail,
)

_SAFETENSORS_NAMES: Final = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A state about to be written: all of it but the tensors' bytes.

    Attributes:
        step: number of steps taken before it.
        tensors: references to the live tensors.
        plan: where each lies in an image.
        values_json: everything that is no tensor.
        digest: what the SHA-256 of the state goes over.
        parts: which pieces each part holds.
        stem: what tells the files of this writing from those of another attempt.
    """

    step: int
    tensors: Mapping[str, Tensor]
    plan: Plan
    values_json: str
    digest: DigestJob
    parts: Sequence[Sequence[Piece]]
    stem: str

    @classmethod
    def of(cls, state: State, *, num_parts: int = 1, stem: str = "") -> Outline:
        """The outline of a state; must be taken while it does not change.

        Raises:
            CheckpointError: something can't be kept.
        """
        tensors, values_json = flatten(state)
        plan = Plan.of(tensors)
        return cls(
            step=state.step,
            tensors=tensors,
            plan=plan,
            values_json=values_json,
            digest=_digest_job(state, tensors, plan),
            parts=split(plan.sized(), num_parts),
            stem=stem,
        )

    def file_name(self, part: int) -> str:
        """Name of the file that holds a part's tensors."""
        return f"{names.STATE_FILE_PREFIX}{self.stem}{part:05d}{names.STATE_FILE_SUFFIX}"

    def digest_of(self, part: int, image: Image | None = None) -> str:
        """xxh3-128 (32 hex digits) of a part, as it is in the live tensors or in an image."""
        digest = xxhash.xxh3_128()
        for piece in self.parts[part]:
            layout = self.plan.slots[piece.name].layout
            name = f"{piece.name}[{piece.start}:{piece.stop}]"
            digest.update(layout_header(name, layout.dtype, layout.shape).encode("ascii"))
            if image is None:
                live = tensor_bytes(self.tensors[piece.name])
                digest.update(live[piece.start : piece.stop].data)
            else:
                image.feed(digest, *self.plan.segment(piece))
        return digest.hexdigest()

    def parts_within(self, pieces: Sequence[Piece]) -> list[int]:
        """The parts of which every byte is in these pieces."""
        held = {piece.name: (piece.start, piece.stop) for piece in pieces}
        return [
            number
            for number, part in enumerate(self.parts)
            if all(
                held.get(p.name, (1, 0))[0] <= p.start and p.stop <= held.get(p.name, (1, 0))[1]
                for p in part
            )
        ]

    def job(self, run: Storage, part: int, image: Image) -> WriteJob:
        """What the writer of a part does; that of part 0 hashes the whole state as well."""
        files = []
        if self.parts[part]:
            segments = [self.plan.segment(piece) for piece in self.parts[part] if piece.num_bytes]
            head = _safetensors_head(self.parts[part], self.plan)
            files.append(FileJob(name=self.file_name(part), head=head, segments=segments))
        if part == 0:
            files.append(FileJob(name=names.VALUES_FILE, head=_values_file(self.values_json)))
        return WriteJob(
            folder_uri=_folder(run, self.step).uri,
            image=str(image.path) if image.path is not None else None,
            files=files,
            digest=self.digest if part == 0 else None,
        )

    def manifest(self, written: Written, meta: CheckpointMeta) -> Manifest:
        """The manifest, with the files of part 0 alone: the other parts' are added to it."""
        assert written.digest is not None, "part 0 hashes the state"
        placed: dict[str, list[tuple[str, Piece]]] = {}
        for number, pieces in enumerate(self.parts):
            for piece in pieces:
                placed.setdefault(piece.name, []).append((self.file_name(number), piece))
        return Manifest(
            step=self.step,
            files={name: FileEntry(**entry) for name, entry in written.files.items()},
            tensors={
                name: _entry(slot.layout, slot.num_bytes, placed[name])
                for name, slot in self.plan.slots.items()
            },
            digest=written.digest,
            meta=meta,
            samestep_version=__version__,
        )


def write_files(run: Storage, state: State, meta: CheckpointMeta) -> Manifest:
    """Writes the files of a checkpoint at once, by this process alone, and no manifest.

    What an earlier, unfinished write of this step left is removed first. When this returns the
    live tensors may change again.

    Raises:
        CheckpointError: the state can't be kept, or a whole checkpoint of this step exists.
        StorageError: the files can't be written.
    """
    folder = _folder(run, state.step)
    if folder.exists(names.MANIFEST_FILE):
        raise CheckpointError(
            f"{folder.uri} exists already and is never overwritten; set it aside first"
        )
    outline = Outline.of(state)
    image = Image.private(outline.plan.num_bytes)
    image.fill(outline.plan, outline.tensors, outline.parts[0])
    folder.delete("")
    written = perform(outline.job(run, 0, image), image.memory, folder)
    return outline.manifest(written, meta)


def _folder(run: Storage, step: int) -> Storage:
    return run.child(names.CHECKPOINTS_DIR).child(step_name(step))


def _digest_job(state: State, tensors: Mapping[str, Tensor], plan: Plan) -> DigestJob:
    """The canonical form of exact/digest.py, with places in the image for the elements."""
    sunk: dict[str, Tensor] = {}
    whole = {"step": state.step, "values": state.values}
    text = dumps(whole, tensors=sunk, canonical=True)
    # Tensors among the values go by another name there: by which they lie in the image is found
    # by identity.
    held = {id(tensor): name for name, tensor in tensors.items() if name not in state.tensors}
    places = {name: name for name in state.tensors}
    places |= {name: held[id(tensor)] for name, tensor in sunk.items()}
    items = []
    for name in canonical_order(places):
        slot = plan.slots[places[name]]
        header = tensor_header(name, tensors[places[name]])
        items.append((header, slot.offset, slot.num_bytes))
    return DigestJob(items=items, tail=values_tail(text).decode("utf-8"))


def _safetensors_head(pieces: Sequence[Piece], plan: Plan) -> str:
    """Length and header of a safetensors file whose data are these pieces, one after another.

    Written here because the library wants the data in its hands, all of it; the format's own
    readers read it.
    """
    header: dict[str, Any] = {"__metadata__": {"samestep": str(FORMAT)}}
    end = 0
    for piece in pieces:
        layout = plan.slots[piece.name].layout
        dtype, shape = layout.dtype, list(layout.shape)
        if not piece.is_whole:
            shape = [piece.num_bytes // _item_bytes(plan, piece.name)]
        if dtype == "complex128":  # the format has no name for it
            dtype, shape = "float64", [*shape, 2]
        header[piece.name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": shape,
            "data_offsets": [end, end + piece.num_bytes],
        }
        end += piece.num_bytes
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    return len(text).to_bytes(8, "little").decode("latin-1") + text


def _item_bytes(plan: Plan, name: str) -> int:
    slot, num_elements = plan.slots[name], 1
    for size in slot.layout.shape:
        num_elements *= size
    return slot.num_bytes // num_elements


def _entry(layout: Layout, num_bytes: int, placed: list[tuple[str, Piece]]) -> TensorEntry:
    if len(placed) == 1:
        return TensorEntry(layout=layout, file=placed[0][0])
    num_elements = 1
    for size in layout.shape:
        num_elements *= size
    item_bytes = num_bytes // num_elements
    return TensorEntry(
        layout=layout,
        pieces=tuple(
            PieceEntry(file=file, start=piece.start // item_bytes, stop=piece.stop // item_bytes)
            for file, piece in placed
        ),
    )


def _values_file(values_json: str) -> str:
    header = json.dumps({"format": FORMAT})[:-1]
    return f'{header}, "values": {values_json}}}\n'
