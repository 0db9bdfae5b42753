"""All tensors of a state side by side in one flat piece of memory, mostly shared memory.

The bytes of a tensor are its elements in C order, which is what files hold and digests hash: so
a state is copied once, and written and hashed from the copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from samestep.checkpoint import shared_memory
from samestep.checkpoint.layout import Layout, storable_dtype
from samestep.checkpoint.split import Piece, Sized
from samestep.errors import StorageError
from samestep.exact.digest import canonical_order

ALIGN_BYTES: Final = 64
_HASH_BYTES: Final = 1 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a tensor lies in an image.

    Attributes:
        layout: as the tensor lay in the live state.
        offset: of its first byte.
        num_bytes: of its elements.
        can_cut: the live tensor's elements lie in C order.
    """

    layout: Layout
    offset: int
    num_bytes: int
    can_cut: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where every tensor lies; `slots` by name, in canonical order."""

    slots: Mapping[str, Slot]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Plan:
        """The plan for a state's tensors: the same wherever the same state is held.

        Raises:
            CheckpointError: a tensor is of a kind that can't be kept.
        """
        slots: dict[str, Slot] = {}
        end = 0
        for name in canonical_order(tensors):
            tensor = tensors[name]
            num_bytes = tensor.numel() * tensor.element_size()
            slots[name] = Slot(
                layout=Layout.of(tensor, name=name),
                offset=end,
                num_bytes=num_bytes,
                can_cut=tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()),
            )
            end += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(slots=slots, num_bytes=max(end, 1))

    def sized(self) -> list[Sized]:
        """The tensors as the split sees them."""
        return [
            Sized(name=name, num_bytes=slot.num_bytes, can_cut=slot.can_cut)
            for name, slot in self.slots.items()
        ]

    def segment(self, piece: Piece) -> tuple[int, int]:
        """Offset and size in the image of a piece."""
        return self.slots[piece.name].offset + piece.start, piece.num_bytes


@dataclass(kw_only=True)
class Image:
    """Memory for the tensors of a state: `num_bytes` bytes, shared where it is a file's.

    Attributes:
        data: the bytes.
        path: of the file; None for private memory.
    """

    data: Bytes
    path: Path | None = None
    _views: dict[tuple[int, Layout], Tensor] = field(default_factory=dict)

    @classmethod
    def private(cls, num_bytes: int) -> Image:
        """An image in this process's own memory."""
        return cls(data=np.empty(num_bytes, dtype=np.uint8))

    @classmethod
    def shared(cls, path: Path, num_bytes: int) -> Image:
        """An image in a file, made or enlarged if need be; several processes may do so at once.

        So is its folder: another worker that fails takes that away meanwhile.

        Raises:
            StorageError: there is no room for it.
        """
        try:
            handle = _opened(path)
            try:
                # Reserved now: else a full file system shows as SIGBUS in the middle of a copy.
                os.posix_fallocate(handle, 0, num_bytes)
                mapped = mmap.mmap(handle, num_bytes)
            finally:
                os.close(handle)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageError(
                f"can't get {num_bytes} bytes of shared memory at {path}: {error.strerror}; give "
                "the node (or container) more, or set checkpoint.snapshot_every: 0"
            ) from error
        return cls(data=np.frombuffer(mapped, dtype=np.uint8), path=path)

    @classmethod
    def existing(cls, path: Path) -> Image:
        """An image that another process made, to be read.

        Raises:
            StorageError: there is none.
        """
        try:
            with open(path, "rb") as file:
                # Private, and writable only because torch warns of tensors that are not.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise StorageError(f"can't map {path}: {error}; it is gone or empty") from error
        return cls(data=np.frombuffer(mapped, dtype=np.uint8), path=path)

    @property
    def memory(self) -> memoryview:
        """The bytes, for those who know no arrays."""
        return self.data.data

    def feed(self, digest: Any, start: int, size: int) -> None:
        """Updates a digest by some of the bytes.

        In small pieces: training may go on beside this, and wants the interpreter lock.
        """
        end, data = start + size, self.memory
        for at in range(start, end, _HASH_BYTES):
            digest.update(data[at : min(at + _HASH_BYTES, end)])

    def warm(self, plan: Plan, pieces: Sequence[Piece]) -> None:
        """Touches the pages of pieces (only reading), so that the first copy need not wait."""
        for piece in pieces:
            start, size = plan.segment(piece)
            self.data[start : start + size : mmap.PAGESIZE].max(initial=0)

    def fill(self, plan: Plan, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
        """Copies pieces of live tensors to their places; from any device."""
        with torch.no_grad():
            for piece in pieces:
                if not piece.num_bytes:
                    continue
                slot, tensor = plan.slots[piece.name], tensors[piece.name].detach()
                target = self._view(slot)
                if piece.is_whole:
                    target.copy_(tensor)
                else:
                    size = tensor.element_size()
                    cut = slice(piece.start // size, piece.stop // size)
                    target.view(-1)[cut].copy_(tensor.view(-1)[cut])

    def tensor(self, slot: Slot) -> Tensor:
        """A copy of a tensor, laid out as the live one was."""
        if not slot.num_bytes:
            empty = torch.empty(slot.layout.shape, dtype=storable_dtype(slot.layout.dtype))
            return slot.layout.copy(empty)
        return slot.layout.copy(self._view(slot))

    def _view(self, slot: Slot) -> Tensor:
        """The place of a tensor, in C order."""
        key = (slot.offset, slot.layout)
        if key not in self._views:
            raw: Any = self.data[slot.offset : slot.offset + slot.num_bytes]
            dtype = storable_dtype(slot.layout.dtype)
            self._views[key] = torch.from_numpy(raw).view(dtype).view(slot.layout.shape)
        return self._views[key]


def _opened(path: Path) -> int:
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        shared_memory.ensure(path.parent)
