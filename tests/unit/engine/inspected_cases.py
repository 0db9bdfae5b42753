"""Workloads for the dry step: one that is fine, and others with one thing wrong each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import Dataset

from samestep import Loss, Workload


class Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)), "y": torch.tensor(index), "name": str(index)}


class Net(nn.Module):
    """A tied pair, a frozen layer, one that is never called, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.second(F.dropout(self.first(x), 0.1, self.training)))
        return hidden + self.frozen(x)


class Fine(Workload):
    net: type[nn.Module] = Net

    def model(self) -> nn.Module:
        return self.net()

    def data(self) -> Dataset[Any]:
        return Samples()

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        error = model(batch["x"]).square().mean(1)
        return Loss(value=error.mean(), metrics={"error": error}, weight=2.0 * len(error))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def evaluation_data(self) -> Dataset[Any]:
        return Samples()

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": model(batch["x"]).square().mean(1)}


class Counting(Net):
    """Scales by a counter that lives in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Logging(Net):
    """Counts too, but nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Caching(Net):
    """Makes a table in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(3)
        return super().forward(x) * self.table


class Private(Net):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=self.noise)


class HalfAsleep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


class Counts(Fine):
    net = Counting


class Beside(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.teacher = nn.Linear(3, 3).requires_grad_(False)


class Logs(Fine):
    net = Logging


class Caches(Fine):
    net = Caching


class Draws(Fine):
    net = Private


class Sleeps(Fine):
    net = HalfAsleep

    def before_step(self, model: nn.Module, step: int) -> None:
        model.get_submodule("unused").eval()


class Remembers(Fine):
    """The workload itself counts."""

    def __init__(self) -> None:
        self.num_losses = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        self.num_losses += 1
        return super().loss(model, batch)


class Noisy(Samples):
    def __init__(self) -> None:
        self.noise = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "x": torch.tensor(self.noise.random(3)).float()}


class NoisyData(Fine):
    def data(self) -> Dataset[Any]:
        return Noisy()


class Forgets(Fine):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([model.get_parameter("first.weight")], lr=0.1)


class Closure(Fine):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return LBFGS(model.parameters())


class Detached(Fine):
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return model(batch["x"]).mean().detach()


class Raises(Fine):
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        raise KeyError("label")


class RaisesInEvaluate(Fine):
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise KeyError("label")


class FreezesFirst(Fine):
    def before_step(self, model: nn.Module, step: int) -> None:
        model.get_submodule("unused").requires_grad_(step > 3)


class Dynamic(Fine):
    def model(self) -> nn.Module:
        model = super().model()
        model.compile(dynamic=True, backend="aot_eager")
        return model


class NotFinite(Fine):
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return model(batch["x"]).mean() / 0
