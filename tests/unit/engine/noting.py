"""A workload that writes down which of its methods is called at which step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from cases import Base, Rows
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Loss


class Noting(Base):
    """An MLP.

    Args:
        folder: for a file per worker, with a line `step what` for each call.
    """

    def __init__(self, *, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.now = Path(folder), -1

    def note(self, what: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        with open(self.folder / f"worker-{rank}", "a", encoding="utf-8") as file:
            file.write(f"{self.now} {what}\n")

    def data(self) -> Dataset[Any]:
        return NotedRows(self)

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step
        self.note("before_step")

    def collate(self, samples: list[Any]) -> Any:
        self.note("collate")
        return super().collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        self.note("loss")
        value = F.mse_loss(model(batch[0]), batch[1])
        value.register_hook(lambda _: self.note("backward"))
        return value


class NotedRows(Rows):
    def __init__(self, workload: Noting) -> None:
        super().__init__(workload.size, (6,))
        self.workload = workload

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.workload.note("item")
        return super().__getitem__(index)


class Guarded(Base):
    """An MLP whose samples can't all be read.

    Args:
        folder: with a file `forbidden`: the indices that raise.
    """

    def __init__(self, *, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.forbidden = Path(folder, "forbidden")

    def data(self) -> Dataset[Any]:
        forbidden = set(map(int, self.forbidden.read_text(encoding="utf-8").split()))
        return GuardedRows(self.size, forbidden)


class GuardedRows(Rows):
    def __init__(self, size: int, forbidden: set[int]) -> None:
        super().__init__(size, (6,))
        self.forbidden = forbidden

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.forbidden:
            raise LookupError(f"sample {index} was read")
        return super().__getitem__(index)


def noted(folder: Path, world_rank: int, step: int) -> list[str]:
    """What was called in a worker at a step, in order."""
    lines = (folder / f"worker-{world_rank}").read_text(encoding="utf-8").splitlines()
    calls = (line.split() for line in lines)
    return [what for at, what in calls if int(at) == step]
