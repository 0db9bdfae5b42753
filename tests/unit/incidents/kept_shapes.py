"""Classes and workloads that the tests of batches and bundles use; a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from samestep import Workload

EXECUTED: list[str] = []
"""What must stay empty: whoever reads a bundle calls nothing that it names."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Row:
    name: str
    value: Any
    more: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        EXECUTED.append("Row")


@dataclass(frozen=True)
class Frozen:
    value: Any


class Trap:
    """No class for a batch."""

    def __init__(self, *args: Any) -> None:
        EXECUTED.append("Trap")


def trap(*args: Any) -> None:
    EXECUTED.append("trap")


class Points(Dataset[Any]):
    """Row `i` is the number `i`, transposed so that it has strides, and noise of its own."""

    def __init__(self, size: int = 40, spoil: Callable[[int], None] = lambda index: None) -> None:
        self.size, self.spoil = size, spoil

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        self.spoil(index)
        value = torch.full((3, 2), float(index)).T + torch.rand(())
        EXECUTED.clear()
        return Row(name=f"row {index}", value=value, more=[index, 1 + 2j])


class Shapes(Workload):
    def __init__(self, spoil: Callable[[int], None] = lambda index: None) -> None:
        self.spoil = spoil

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self) -> Dataset[Any]:
        return Points(spoil=self.spoil)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["rows"][0].value.T).mean()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def collate(self, samples: list[Any]) -> Any:
        noise = torch.rand(len(samples), 1).expand(len(samples), 4)
        return {"rows": samples, "noise": noise, 7: Pair(noise, ("x", None))}
