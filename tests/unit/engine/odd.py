"""Workloads that can't be exact, or break the interface: one class, the fault by its name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Base, Rows
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

from samestep import Loss


def is_worker_one() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


class Odd(Base):
    """An MLP with one fault.

    Args:
        fault: its name; in `loss` it is the method of that name that computes it, if there is one.
        at: the step at which a fault in mid-run shows.
    """

    dimensions: ClassVar = {"1": (None, 1)}

    def __init__(self, *, fault: str, at: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault, self.at, self.now = fault, at, 0
        if fault == "misspelt":
            self.dimensions = {"targets": (None, 1)}  # type: ignore[misc]
        if fault in ("too large", "not a number"):
            self.ranges = {"0": (None, 100.0)}  # type: ignore[misc]

    def net(self) -> nn.Module:
        made: Callable[[], nn.Module] | None = NETS.get(self.fault)
        if made is not None:
            return made()
        return super().net()

    def collate(self, samples: Any) -> Any:
        batch = default_collate([sample[:2] for sample in samples])
        if self.fault == "misspelt":
            return {"inputs": batch[0], "target": batch[1]}
        if self.fault == "other array":
            ids = np.array([sample[2] for sample in samples])
            return [*batch, ids if ids.max() >= 20 else ids.astype(np.int32)]
        return batch

    def data(self) -> Dataset[Any]:
        return OddRows(self.size, self.fault)

    def order(self, epoch: int, generator: torch.Generator) -> Any:
        if self.fault == "order":
            return [0, 1, 99] if epoch == 0 else []
        if self.fault == "order shrinks":
            return list(range(10 - epoch))
        if self.fault == "order of floats":
            return [0.5, 1.0]
        if self.fault == "order raises":
            raise LookupError("no order")
        if self.fault == "order differs" or (self.fault == "order differs later" and epoch == 2):
            return list(range(os.getpid() % 1000, os.getpid() % 1000 + 10))
        return list(range(10 if "differs" in self.fault else self.size))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.fault == "lbfgs":
            return LBFGS(model.parameters())
        made = super().optimizer(model)
        if self.fault == "step in a hook":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: made.step())
        if self.fault == "update in a hook":
            weight = next(model.parameters())
            weight.register_hook(lambda gradient: _subtract(weight, gradient))
        return "SGD" if self.fault == "no optimizer" else made  # type: ignore[return-value]

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step
        if step != self.at:
            return
        if self.fault == "freezing differs":
            model[0].requires_grad_(not is_worker_one())  # type: ignore[index]
        if self.fault == "weights diverge" and is_worker_one():
            with torch.no_grad():
                model[0].weight.add_(1e-7)  # type: ignore[index,union-attr]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        named = "odd_metric" if self.fault in METRICS else self.fault.replace(" ", "_")
        method = getattr(self, named, None)
        if method is not None:
            return method(model, batch)
        return F.mse_loss(model(batch[0].float()), batch[1])

    def sparse(self, model: nn.Module, batch: Any) -> Tensor:
        index = torch.arange(3)
        return F.embedding(index, model[0].weight, sparse=True).square().mean()  # type: ignore[index]

    def reentrant(self, model: nn.Module, batch: Any) -> Tensor:
        h = checkpoint(model, batch[0].requires_grad_(), use_reentrant=True)
        h = checkpoint(model, h.repeat(1, 6), use_reentrant=True)
        return F.mse_loss(h, batch[1])

    def backward(self, model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        value.backward(retain_graph=True)
        return value

    def create_graph(self, model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        value.backward(create_graph=True)
        return value + sum(p.grad.square().sum() for p in model.parameters())  # type: ignore[union-attr]

    def replaced(self, model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        value.register_hook(lambda _: model.zero_grad(set_to_none=True))
        return value

    def nondeterministic(self, model: nn.Module, batch: Any) -> Tensor:
        h, index = F.max_pool1d(model[0](batch[0])[None], 3, return_indices=True)  # type: ignore[index]
        return F.max_unpool1d(h, index, 3).mean()

    def vector(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="none")

    def detached(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]).detach()

    def number(self, model: nn.Module, batch: Any) -> float:
        return F.mse_loss(model(batch[0]), batch[1]).item()

    def integer(self, model: nn.Module, batch: Any) -> Tensor:
        return batch[1].sum().long()

    def negative_weight(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(value=F.mse_loss(model(batch[0]), batch[1]), weight=-1.0)

    def first_weight_0(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(value=F.mse_loss(model(batch[0]), batch[1]), weight=0)

    def odd_metric(self, model: nn.Module, batch: Any) -> Loss:
        """The metric `m`, or all of them, as the fault says."""
        made: Any = METRICS[self.fault] if self.now == self.at else {"m": 0.5}
        return Loss(value=F.mse_loss(model(batch[0]), batch[1]), metrics=made)

    def freezes(self, model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        if self.now == self.at:
            model[0].requires_grad_(False)  # type: ignore[index]
        return value

    def changes_later(self, model: nn.Module, batch: Any) -> Tensor:
        if self.now == self.at:
            with torch.no_grad():
                model[0].weight.clamp_(-1.0, 1.0)  # type: ignore[index,operator,union-attr]
        return F.mse_loss(model(batch[0]), batch[1])

    def raises(self, model: nn.Module, batch: Any) -> Tensor:
        if self.now == self.at and is_worker_one():
            raise KeyError("mine alone")
        return F.mse_loss(model(batch[0]), batch[1])

    def raises_in_backward(self, model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        if self.now == self.at and is_worker_one():
            value.register_hook(_raise)
        return value

    def buffer_grows(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()


class OddRows(Rows):
    def __init__(self, size: int, fault: str) -> None:
        super().__init__(size, (6,))
        self.fault = fault

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = super().__getitem__(index)
        if self.fault == "item raises" and index == 25:
            raise OSError("cannot read sample 25")
        if index >= 20:
            x = x.double() if self.fault == "other dtype" else x
            x = x[None] if self.fault == "other rank" else x
            x = x * 1000 if self.fault == "too large" else x
            x = x * math.nan if self.fault == "not a number" else x
            y = y.repeat(2) if self.fault == "other dimension" else y
        return (x, y, index) if self.fault == "other array" else (x, y)


class Growing(nn.Module):
    """A buffer that gets longer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, torch.zeros(1)])
        return self.layer(x)  # type: ignore[no-any-return]


def _expanded() -> nn.Module:
    made = nn.Linear(6, 1)
    made.weight = nn.Parameter(torch.randn(1, 1).expand(1, 6))
    return made


def _differing() -> nn.Module:
    made = nn.Linear(6, 1)
    nn.init.constant_(made.bias, os.getpid())
    return made


def _wider() -> nn.Module:
    width = 8 + is_worker_one()
    return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1))


class Unkept(nn.Linear):
    """Has extra state that no checkpoint can hold."""

    def get_extra_state(self) -> Any:
        return {"handles": [0, object()]}

    def set_extra_state(self, state: Any) -> None:
        del state


NETS: dict[str, Callable[[], Any]] = {
    "sparse module": lambda: nn.EmbeddingBag(6, 1, sparse=True),
    "sync": lambda: nn.Sequential(nn.Linear(6, 1), nn.SyncBatchNorm(1)),
    "expanded": _expanded,
    "model differs": _differing,
    "layout differs": _wider,
    "unkept": lambda: nn.Sequential(Unkept(6, 1)),
    "buffer grows": Growing,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1)),
    "no model": lambda: _NotAModel(),
}


METRICS: dict[str, Any] = {
    "matrix metric": {"m": torch.eye(2)},
    "column metric": {"fine": 1.0, "m": torch.ones(3, 1)},
    "complex metric": {"m": torch.ones(3, dtype=torch.complex64)},
    "metric of none": {"m": None},
    "metric of text": {"m": "0.5"},
    "metric of a list": {"m": [0.5, 0.5]},
    "metric without name": {7: 0.5},
    "metrics of none": None,
    "metrics in a list": [0.5],
}


class _NotAModel:
    pass


def _subtract(weight: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        weight.sub_(gradient)


def _raise(_: Tensor) -> None:
    raise KeyError("mine alone")
