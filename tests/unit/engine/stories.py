"""Workloads that people really bring: odd sizes, odd batches, odd models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases import Base, Rows
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from torch.utils.data import Dataset, IterableDataset

from samestep import Loss


class Numbered(Dataset[Any]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Counting(Base):
    """Tells as a metric which samples it saw; right on all evaluation samples but number 0.

    Args:
        evaluation_size: evaluation samples.
    """

    def __init__(self, *, evaluation_size: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.evaluation_size = evaluation_size

    def net(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Dataset[Any]:
        return Numbered(self.size)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        value = (model(batch[:, None] / self.size) - 1).square().mean()
        return Loss(value=value, metrics={"id": batch, "id_squared": batch.double().square()})

    def evaluation_data(self) -> Dataset[Any]:
        return Numbered(self.evaluation_size)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (batch > 0).float()}


class Normed(Base):
    """BatchNorm over features alone: a shard of one sample has no variance."""

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Told(nn.Module):
    """Gives a dict with a loss, a None and a string, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.seen += x.abs().sum().detach() * torch.rand(())
        return {"loss": F.mse_loss(self.module(x), y), "cache": None, "kind": "told"}


class Telling(Base):
    """The model computes the loss itself."""

    def net(self) -> nn.Module:
        return Told()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(*batch)
        assert out["cache"] is None
        assert out["kind"] == "told"
        loss: Tensor = out["loss"]
        return loss


class Point(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Row:
    point: Point
    tags: tuple[str, list[Any]]


class Nested(Base):
    """A dict of a list of dataclasses of named tuples, with strings in them."""

    def data(self) -> Dataset[Any]:
        return NestedRows(Rows(self.size, (6,)))

    def collate(self, samples: list[Any]) -> Any:
        return {"rows": samples, 7: ("fixed", None, 1.5)}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        assert type(batch) is dict
        assert batch[7] == ("fixed", None, 1.5)
        assert type(batch["rows"]) is list
        total = torch.zeros(())
        for row in batch["rows"]:
            assert type(row) is Row
            assert type(row.point) is Point
            assert row.tags[0] == "tag"
            index = int(row.point.name.removeprefix("point "))
            assert row.tags[1][0] == index
            total = total + F.mse_loss(model(row.point.x), row.tags[1][1])
        return total / len(batch["rows"])


class NestedRows(Dataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        x, y = self.rows[index]
        return Row(point=Point(x=x, name=f"point {index}"), tags=("tag", [index, y]))


class Streamed(Base):
    """An iterable dataset."""

    def data(self) -> Dataset[Any]:
        return Stream()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(6)


class Resumed(Base):
    """A schedule, an optimizer by name, and an exception at one step, once.

    Args:
        kind: adam or sgd.
        schedule: multi-step or cosine.
        marker: a file; while it is missing, `loss` raises at step 4 and makes it.
    """

    def __init__(self, *, kind: str, schedule: str, marker: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.of, self.schedule, self.marker = kind, schedule, Path(marker)

    def before_step(self, model: nn.Module, step: int) -> None:
        self.step = step

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.step == 4 and not self.marker.exists():
            self.marker.touch()
            raise ValueError("broken once")
        out = model(batch[0])
        return F.mse_loss(out, batch[1].to(out.dtype))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.of == "adam":
            return Adam(model.parameters(), lr=0.05)
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        if self.schedule == "cosine":
            return CosineAnnealingLR(optimizer, 6)
        return MultiStepLR(optimizer, [4])


class Still(Base):
    """A model that can't be trained.

    Args:
        of: what of it: "frozen", "empty" or "frozen at 2".
    """

    def __init__(self, *, of: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.of = of

    def net(self) -> nn.Module:
        if self.of == "empty":
            return nn.Flatten()
        return super().net().requires_grad_(self.of != "frozen")

    def before_step(self, model: nn.Module, step: int) -> None:
        if self.of == "frozen at 2" and step == 2:
            model.requires_grad_(False)


class Meddling(Counting):
    """Does in `loss`, from step 1 on, what a workload should not, or need not be minded.

    Args:
        deed: "threads", "nondeterministic", "exit", "weight" or "mode".
    """

    def __init__(self, *, deed: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deed = deed
        self.step = 0

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def before_step(self, model: nn.Module, step: int) -> None:
        self.step = step

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        if self.deed == "mode":
            dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout))
            dropout.training = not dropout.training
        value = super().loss(model, batch).value
        if self.step == 0:
            return Loss(value=value)
        if self.deed == "threads":
            torch.set_num_threads(3)
        if self.deed == "nondeterministic":
            torch.use_deterministic_algorithms(False)
        if self.deed == "exit":
            raise SystemExit(0)
        if self.deed == "weight":
            return Loss(value=value, weight=torch.ones(3))
        return Loss(value=value)


class Growing(Counting):
    """Its state grows a buffer in the first forward."""

    def net(self) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("seen", None)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        model.seen = batch.sum()
        return super().loss(model, batch)
