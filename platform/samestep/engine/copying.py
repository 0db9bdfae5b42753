"""Copying the state behind the training: while the next step's forward and backward run.

Parameters, optimizer state and averages stay as they are until the next update, which waits for the
copy. A forward changes buffers, and whatever else a state holds is small: these are copied at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor, nn

from samestep.checkpoint.image import Image
from samestep.checkpoint.marks import GIVEN_UP, Marks
from samestep.checkpoint.split import Piece
from samestep.checkpoint.writing import Outline
from samestep.errors import CheckpointError

ASIDE_BYTES: Final = 8 << 20
"""As much is copied aside at once. A state with larger buffers is copied before training goes on:
no second copy of them is made."""
_STEADY: Final = ("optimizer/", "ema/")


@dataclass(frozen=True, kw_only=True)
class Copying:
    """One worker's part in copying a state into its node's image.

    Attributes:
        outline: of the state; of its tensors those that are not steady are copies already.
        image: where it goes.
        pieces: what this worker copies.
        compared: the parts that it digests as its own live tensors have them.
        number: of the copy, the same for all workers of the node.
        local_rank: of this worker on its node.
        marks: of the node's workers; None where this one is alone.
        is_behind: training may go on meanwhile, up to the next update.
    """

    outline: Outline
    image: Image
    pieces: Sequence[Piece]
    compared: Sequence[int]
    number: int
    local_rank: int
    marks: Marks | None
    is_behind: bool = True
    _begun: torch.cuda.Event | None = None
    _versions: Mapping[str, int] = field(default_factory=dict)

    def begin(self, model: nn.Module) -> Copying:
        """Copies aside what a forward may change; call it while nothing changes."""
        tensors = self.outline.tensors
        changing = _changing(tensors, model)
        num_bytes = sum(t.numel() * t.element_size() for t in changing.values())
        is_behind = num_bytes <= ASIDE_BYTES
        if is_behind:  # to host memory: the device has none to spare
            aside = {name: t.to("cpu", copy=True) for name, t in changing.items()}
            tensors = {**tensors, **aside}
        return replace(
            self,
            outline=replace(self.outline, tensors=tensors),
            is_behind=is_behind,
            _begun=_event(tensors),
            _versions={name: tensor._version for name, tensor in tensors.items()},
        )

    def run(self, given_up: threading.Event) -> dict[int, str]:
        """Copies and digests; nothing may change before it returns.

        Returns:
            The digests of the parts compared.

        Raises:
            CheckpointError: the state changed meanwhile, or it was given up.
        """
        try:
            digests = self._copied(given_up)
        except BaseException:
            if self.marks is not None:  # or the others would wait for it
                self.marks.set(self.local_rank, self.number, failed=True)
            raise
        if self.marks is not None:
            self.marks.set(self.local_rank, self.number)
        return digests

    def wait_for_others(self, given_up: threading.Event) -> None:
        """Returns when all of the node's workers have copied.

        Raises:
            CheckpointError: one of them failed, or it was given up before.
        """
        if self.marks is not None:
            self.marks.wait(self.number, given_up)
        _require_wanted(given_up)

    def _copied(self, given_up: threading.Event) -> dict[int, str]:
        with torch.no_grad(), self._beside():
            for piece in self.pieces:
                _require_wanted(given_up)
                self.image.fill(self.outline.plan, self.outline.tensors, [piece])
            digests = {}
            for part in self.compared:
                _require_wanted(given_up)
                digests[part] = self.outline.digest_of(part)
        now = {name: tensor._version for name, tensor in self.outline.tensors.items()}
        if now != self._versions:
            changed = [name for name, version in now.items() if version != self._versions[name]]
            raise CheckpointError(f"{', '.join(changed)} changed before the update, while copied")
        return digests

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU in a stream of its own, so that the copy does not wait for kernels of the step.

        It begins after the kernels of the update before; the host waits for its end, and so does
        the next update.
        """
        if self._begun is None:
            yield
            return
        device = next(t.device for t in self.outline.tensors.values() if t.is_cuda)
        stream = _stream(device)
        stream.wait_event(self._begun)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _changing(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What may change before the next update."""
    buffers = {_storage(buffer) for buffer in model.buffers()}
    # Of what else a model keeps (extra state) nobody knows when it changes.
    weights = {_storage(parameter) for parameter in model.parameters()} - buffers
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (_storage(tensor) in weights or name.startswith(_STEADY))
        or _storage(tensor) in buffers
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _event(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """Behind what the device has been given so far."""
    device = next((t.device for t in tensors.values() if t.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _require_wanted(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise CheckpointError(GIVEN_UP)
