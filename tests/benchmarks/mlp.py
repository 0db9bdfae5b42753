"""A 12.6 M parameter MLP on random rows: all matrix products, and 50 MB of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from samestep import Workload

WIDTHS = (1024, 2048, 2048, 2048, 1024)


class Rows(Dataset[dict[str, Tensor]]):
    """Random rows and labels: `{"x": float32 [1024], "y": int64 []}`, a function of the index."""

    def __init__(self, size: int) -> None:
        stream = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, WIDTHS[0], generator=stream)
        self.y = torch.randint(WIDTHS[-1], (size,), generator=stream)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Mlp(Workload):
    """Four linear layers, SGD with momentum.

    Args:
        size: rows of data.
        has_two_moments: AdamW instead, whose state is 50 MB larger.
    """

    def __init__(self, *, size: int = 4096, has_two_moments: bool = False) -> None:
        self.size, self.has_two_moments = size, has_two_moments

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for width, following in itertools.pairwise(WIDTHS):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self) -> Dataset[Any]:
        return Rows(self.size)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.has_two_moments:
            return AdamW(model.parameters(), lr=1e-4)
        return SGD(model.parameters(), lr=0.01, momentum=0.9)
