"""Workloads for what hangs on evaluations, for averages, parameter groups and hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Base, Rows
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau
from torch.utils.data import Dataset

from samestep import Loss, Schedule, Values


class Counted(nn.Module):
    """Counts the steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_steps += 1
        return x


class Scored(Base):
    """Evaluates to a score that depends on the number of steps alone, and to a real error.

    Args:
        scores: after 1, 2, ... steps; the last one stays.
        schedule: step, epoch, evaluation, plateau, bare plateau; or nothing.
        name: of the metric that the schedule takes.
        metric: what evaluate gives for it: number, matrix, none, text, or no dict at all.
        without: there is no evaluation data.
    """

    def __init__(
        self,
        *,
        scores: list[float | str] | None = None,
        schedule: str = "",
        name: str = "score",
        metric: str = "number",
        without: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"size": 20, **kwargs})
        self.scores = [float(score) for score in scores or [0.0]]
        self.schedule, self.name, self.metric, self.without = schedule, name, metric, without

    def net(self) -> nn.Module:
        return nn.Sequential(
            Counted(), nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1)
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        out = model(batch[0])
        value = torch.nn.functional.mse_loss(out, batch[1])
        return Loss(value=value, metrics={"off": (out - batch[1]).abs().flatten()})

    def scheduler(self, optimizer: Optimizer) -> Any:
        if not self.schedule:
            return None
        if "plateau" in self.schedule:
            plateau = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
            if self.schedule == "bare plateau":
                return plateau
            return Schedule(plateau, every="evaluation", metric=self.name)
        return Schedule(ExponentialLR(optimizer, 0.5), every=self.schedule)  # type: ignore[arg-type]

    def evaluation_data(self) -> Dataset[Any] | None:
        return None if self.without else Rows(7, self.shape)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        number = int(model[0].num_steps)  # type: ignore[index,union-attr,arg-type]
        error = (model(batch[0]) - batch[1]).square().flatten()
        value: Any = self.scores[min(max(number - 1, 0), len(self.scores) - 1)]
        odd = {"matrix": error[None], "none": None, "text": "0.5", "complex": 1j * error}
        if self.metric == "no dict":
            return error
        return {"error": error, "score": odd.get(self.metric, value)}


class Grouped(Scored):
    """Two groups; the first layer is frozen before step 2 and trained again from step 4."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(
            [
                {"params": model[1].parameters(), "lr": 0.02},  # type: ignore[index,union-attr]
                {"params": [*model[2].parameters(), *model[4].parameters()], "weight_decay": 0.1},  # type: ignore[index,union-attr]
            ],
            lr=0.05,
        )

    def before_step(self, model: nn.Module, step: int) -> None:
        for parameter in model[1].parameters():  # type: ignore[index,union-attr]
            parameter.requires_grad_(not 2 <= step < 4)


class Halved(Scored):
    """Overflows fp16 at step 3: the update is left out."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        out = model(batch[0])
        return torch.nn.functional.mse_loss(out, batch[1].to(out.dtype))

    def before_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            weight = model[4].weight  # type: ignore[index,union-attr]
            if step == 3:
                weight.mul_(2.0**17)  # type: ignore[operator,union-attr]
            elif step == 4:
                weight.div_(2.0**17)  # type: ignore[operator,union-attr]


class Together(Base):
    """Tied weights, channels_last, BatchNorm, dropout and a cosine, with an evaluation."""

    shape = (3, 6, 6)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"size": 20, **kwargs})

    def net(self) -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(16, 1),
        ).to(memory_format=torch.channels_last)
        net[5].weight = net[3].weight
        return net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        x = batch[0].to(memory_format=torch.channels_last)
        return torch.nn.functional.mse_loss(model(x).float(), batch[1])

    def scheduler(self, optimizer: Optimizer) -> Any:
        return CosineAnnealingLR(optimizer, 8)

    def evaluation_data(self) -> Dataset[Any] | None:
        return Rows(7, self.shape)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return {"error": (model(batch[0]) - batch[1]).square().flatten()}


class Weighing(Base):
    """Weights of its own that grow by the step, as those of a model that follows its state do."""

    now = 0

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        value = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        return Loss(value=value, weight=2 * self.now + 3)


class Named(Base):
    """The same weights under other names and shapes.

    Args:
        kind: same, renamed, wider, half, apart.
        evaluated: there is evaluation data.
    """

    def __init__(self, *, kind: str = "same", **kwargs: Any) -> None:
        super().__init__(**{"size": 20, **kwargs})
        self.of = kind

    def net(self) -> nn.Module:
        if self.of == "renamed":
            return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Tanh(), nn.Linear(9, 1))
        if self.of == "wider":
            return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))
        if self.of == "apart":
            return nn.ModuleDict({"a": nn.Linear(6, 1)})
        net = super().net()
        return net.bfloat16() if self.of == "half" else net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        dtype = next(model.parameters()).dtype
        return torch.nn.functional.mse_loss(model(batch[0].to(dtype)), batch[1].to(dtype))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05)


class Hooked(Scored):
    """Writes down what its hooks see, with a number that it draws; raises where it is told to.

    Args:
        seen: folder for a file per worker.
        raises_at: the hook and the step or epoch at which it raises, as "on_step 2".
    """

    def __init__(self, *, seen: str, raises_at: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen, self.raises_at = Path(seen), raises_at

    def on_step(self, step: int, values: Values) -> None:
        self._see("on_step", step, values)

    def on_epoch(self, epoch: int, values: Values) -> None:
        self._see("on_epoch", epoch, values)

    def _see(self, hook: str, number: int, values: Values) -> None:
        if self.raises_at == f"{hook} {number}":
            raise ValueError("no such thing")
        rank = dist.get_rank() if dist.is_initialized() else 0
        line = {"hook": hook, "number": number, "drawn": float(torch.rand(())), **vars(values)}
        with open(self.seen / f"worker-{rank}", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Unopened(Base):
    """The data can't be opened by the last worker.

    Args:
        lazily: it fails when the first sample is read.
    """

    def __init__(self, *, lazily: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lazily = lazily

    def data(self) -> Dataset[Any]:
        if dist.get_rank() < dist.get_world_size() - 1:
            return super().data()
        if self.lazily:
            return Broken(self.size)
        with open("/no/such/data.bin", "rb"):
            return super().data()


class Broken(Dataset[Any]):
    """Its file is gone."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/no/such/shard-3.bin")
