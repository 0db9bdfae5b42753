"""Workloads whose data is not read as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import Base, Rows
from torch import Tensor
from torch.utils.data import Dataset


class OneFile(Dataset[Any]):
    """Numbers in one file that is open all the time: whoever reads moves its position."""

    def __init__(self, path: Path, size: int) -> None:
        path.write_bytes(b"".join(index.to_bytes(4, "little") for index in range(size)))
        self.size, self.file = size, open(path, "rb")  # noqa: SIM115 - as datasets do

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.file.seek(4 * index)
        return torch.tensor(int.from_bytes(self.file.read(4), "little"))


class Unreadable(Dataset[Any]):
    """One sample can't be read, in whichever process."""

    def __init__(self, rows: Rows, bad: int) -> None:
        self.rows, self.bad = rows, bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(5, "the disk is gone", f"/data/{index}")
        return self.rows[index]


class Spoilt(Base):
    """Sample `bad` can't be read."""

    def __init__(self, *, bad: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bad = bad

    def data(self) -> Dataset[Any]:
        return Unreadable(Rows(self.size, self.shape), self.bad)


class Misshapen(Base):
    """A shard of step 3 has one dimension more."""

    def before_step(self, model: Any, step: int) -> None:
        self.step = step

    def collate(self, samples: list[Any]) -> Any:
        x, y = super().collate(samples)
        return (x[:, None] if getattr(self, "step", 0) == 3 else x), y


class Huge(Base):
    """Samples that fill a small bundle."""

    def data(self) -> Dataset[Any]:
        return Padded(Rows(self.size, self.shape))


class Padded(Dataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], torch.zeros(200_000, dtype=torch.uint8)
