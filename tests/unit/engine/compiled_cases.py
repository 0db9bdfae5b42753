"""Workloads whose models torch.compile has been at."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from samestep import Workload

GRAPHS: list[tuple[bool, ...]] = []
"""Of each graph that `noting` compiled: which sizes of its inputs are symbols."""


def noting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend that notes the graph and runs it as it is."""
    sizes = [size for tensor in inputs if isinstance(tensor, Tensor) for size in tensor.shape]
    GRAPHS.append(tuple(isinstance(size, torch.SymInt) for size in (*sizes, *inputs)))
    return graph.forward


class Net(nn.Module):
    """[n, length, 4] to [n, 1], with what a compiler has to get right: buffers, dropout."""

    def __init__(self, how: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        body: Any = Body()
        self.body = torch.compile(body, **options) if how == "part" else body
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.into(x).mean(1))
        out: Tensor = self.out(F.dropout(self.body(hidden), 0.2, self.training))
        return out


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) + x


class Lengths(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `lengths` different lengths, one length to a batch of four."""

    def __init__(self, size: int, lengths: int) -> None:
        self.size, self.lengths = size, lengths

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 3 + index // 4 % self.lengths
        x = torch.linspace(-1, 1, 4 * length).reshape(length, 4) * (1 + index % 7)
        return x, x[0, :1]


class Compiled(Workload):
    """Args: how (method, wrapper, part or not), dynamic, backend, lengths."""

    def __init__(
        self,
        *,
        how: str = "method",
        dynamic: bool | None = False,
        backend: str = "aot_eager",
        lengths: int = 1,
    ) -> None:
        self.how, self.lengths = how, lengths
        self.options = {"dynamic": dynamic, "backend": noting if backend == "noting" else backend}

    def model(self) -> nn.Module:
        model = Net(self.how, self.options)
        if self.how == "method":
            model.compile(**self.options)
        return torch.compile(model, **self.options) if self.how == "wrapper" else model

    def data(self) -> Dataset[Any]:
        return Lengths(22 if self.lengths == 1 else 4 * self.lengths, self.lengths)

    def order(self, epoch: int, generator: torch.Generator) -> Tensor | None:
        return None if self.lengths == 1 else torch.arange(4 * self.lengths)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)
