"""A model's buffers over a step: each shard starts from those before it, one shard's are kept.

What is kept is what the first shard with weight produced; DDP's broadcast from rank 0 means the
same. Values are compared by nobody: BatchNorm changes its buffers without moving `_version`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.engine.peers import Peers
from samestep.errors import WorkloadError

ALIGNMENT_BYTES = 64


class BufferKeeper:
    """Holds the buffers of one replica as they were before the step, and as they will be after.

    The tensor objects registered at the start stay registered: a forward that assigns a new
    tensor to a buffer has its value copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._modes = [(module, module.training) for module in model.modules()]
        self._in_step = False
        self.live = [module._buffers[name] for module, name, _ in self._places]
        offsets, end = [], 0
        for buffer in self.live:
            assert buffer is not None
            offsets.append(end)
            end += -(-buffer.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        device = self.live[0].device if self.live and self.live[0] is not None else None
        self._before = torch.empty(end, dtype=torch.uint8, device=device)
        self._after = torch.empty(end, dtype=torch.uint8, device=device)
        self._before_views = self._views(self._before, offsets)
        self._after_views = self._views(self._after, offsets)

    def start_step(self) -> None:
        """Takes down the buffers, and each module's mode, as they are."""
        self._modes = [(module, module.training) for module, _ in self._modes]
        self._copy(self._before_views, self._live())
        self._in_step = True

    def rewind(self) -> None:
        """Puts buffers and modes back to before a step that is given up, if it had begun."""
        if self._in_step:
            self.start_shard()
            self._in_step = False

    def start_shard(self) -> None:
        """Puts the buffers, and the modes, back to what they were before the step."""
        self.restore_modes()
        for (module, name, _), tensor in zip(self._places, self.live, strict=True):
            module._buffers[name] = tensor
        self._copy(self._live(), self._before_views)

    def restore_modes(self) -> None:
        """Puts each module's mode back to what it was before the step."""
        for module, training in self._modes:
            module.training = training

    def keep(self) -> None:
        """The shard just computed is the first with weight: its buffers are the step's."""
        made = []
        for (module, name, path), view in zip(self._places, self._after_views, strict=True):
            tensor = module._buffers[name]
            if tensor is None or tensor.shape != view.shape or tensor.dtype != view.dtype:
                now = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise WorkloadError(
                    f"buffer {path} became {now} in forward; it was registered as "
                    f"{tuple(view.shape)} of {view.dtype} and must stay so"
                )
            made.append(tensor.detach())
        self._copy(self._after_views, made)

    def end_step(self, peers: Peers, owner: int) -> None:
        """Gives every worker the buffers that `owner` kept."""
        if not self._places:
            self._in_step = False
            return
        if peers.world_size > 1:
            on_cpu = self._after if self._after.device.type == "cpu" else self._after.cpu()
            peers.spread(on_cpu, owner)
            if on_cpu is not self._after:
                self._after.copy_(on_cpu)
        self.start_shard()
        self._copy(self._live(), self._after_views)
        self._in_step = False

    def undo_step(self) -> None:
        """Puts the buffers back to before a step that is through, because it is left out."""
        self._copy(self._live(), self._before_views)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The buffers are those before the step meanwhile, and as they were afterwards."""
        self._copy(self._after_views, self._live())
        self.undo_step()
        try:
            yield
        finally:
            self._copy(self._live(), self._after_views)

    def take_over(self, other: BufferKeeper) -> None:
        """Copies what another replica of this process kept."""
        self._after.copy_(other._after)

    def _live(self) -> list[Tensor]:
        return [tensor for tensor in self.live if tensor is not None]

    def _views(self, flat: Tensor, offsets: list[int]) -> list[Tensor]:
        return [
            flat[offset : offset + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for buffer, offset in zip(self._live(), offsets, strict=True)
        ]

    @staticmethod
    def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
