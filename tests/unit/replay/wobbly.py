"""A workload in which what goes wrong is planted: at a sample, in a module, at a line."""

from __future__ import annotations

import os
import signal
import threading

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from samestep import Loss, Workload

NUM_SAMPLES = 80
NUM_FEATURES = 6
Item = dict[str, Tensor]


class Planted(nn.Module):
    """Divides by zero where its input is large, as it is for one sample alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs() < 500).float()


class Points(Dataset[Item]):
    def __init__(self, poisoned: int | None, large: int | None, loud: int | None) -> None:
        self.poisoned, self.large, self.loud = poisoned, large, loud

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Item:
        x = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        y = x.sin().sum().reshape(1)
        if index == self.poisoned:
            x[2] = torch.nan
        if index == self.large:
            x = x * 1e5
        if index == self.loud:
            y = y + 1e3
        return {"index": torch.tensor(index), "x": x + 0.01 * torch.rand(()), "y": y}


class Wobbly(Workload):
    """Args name the sample (or the learning rate) that brings it.

    Or the step: what `before_step` does at `moved_at`, and the optimizer at `nudged_at`. With
    `idle` there is a buffer of that value, which has no effect on anything: it is nudged then.
    """

    def __init__(
        self,
        *,
        poisoned: int | None = None,
        large: int | None = None,
        raises: int | None = None,
        kills: int | None = None,
        hangs: int | None = None,
        exits: int | None = None,
        tilts: int | None = None,
        loud: int | None = None,
        momentum: float = 0.9,
        token: str = "",
        lr: float = 0.05,
        many: bool = False,
        idle: float | None = None,
        moved_at: int | None = None,
        nudged_at: int | None = None,
    ) -> None:
        self.poisoned, self.large, self.raises = poisoned, large, raises
        self.kills, self.hangs, self.tilts, self.exits = kills, hangs, tilts, exits
        self.token, self.count = token, 0
        self.loud, self.momentum, self.lr = loud, momentum, lr
        self.idle, self.moved_at, self.nudged_at = idle, moved_at, nudged_at
        self.now = 0
        self.many = (
            torch.rand(400_000, generator=torch.Generator().manual_seed(1)) if many else None
        )

    def model(self) -> nn.Module:
        model = nn.Sequential()
        model.add_module("first", nn.Linear(NUM_FEATURES, 8))
        model.add_module("planted", Planted())
        model.add_module("norm", nn.BatchNorm1d(8))
        model.add_module("drop", nn.Dropout(0.1))
        model.add_module("last", nn.Linear(8, 1))
        if self.idle is not None:
            model.register_buffer("idle", torch.tensor([self.idle]))
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        self.now = step
        if step == self.moved_at:
            self.nudge(model)

    def nudge(self, model: nn.Module) -> None:
        named = dict(model.named_buffers()) | dict(model.named_parameters())
        with torch.no_grad():
            named["first.weight" if self.idle is None else "idle"].mul_(1.001)

    def data(self) -> Dataset[Item]:
        self.count = NUM_SAMPLES
        return Points(self.poisoned, self.large, self.loud)

    def loss(self, model: nn.Module, batch: Item) -> Loss:
        here = set(batch["index"].tolist())
        if self.kills in here:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.exits in here:
            os._exit(0)
        if self.hangs in here:
            threading.Event().wait()
        if self.raises in here:
            told = f", as {self.token} may, or {self.token!r}" if self.token else ""
            raise ValueError(f"planted at sample {self.raises}{told}")
        error = (model(batch["x"]) - batch["y"]).square().squeeze(1)
        if self.tilts in here:
            error = error * 1.0001
        value = error.mean()
        if self.many is not None:
            value = value + (self.many * next(model.parameters())[0, 0]).sum() * 1e-4
        return Loss(value=value, metrics={"error": error.detach()})

    def optimizer(self, model: nn.Module) -> SGD:
        lr = self.lr
        if self.token:  # then the optimizer needs what data() leaves behind
            lr = self.lr * NUM_SAMPLES / self.count
        optimizer = SGD(model.parameters(), lr=lr, momentum=self.momentum)
        if self.nudged_at is not None:
            optimizer.register_step_post_hook(
                lambda *_: self.nudge(model) if self.now == self.nudged_at else None
            )
        return optimizer

    def scheduler(self, optimizer: SGD) -> StepLR:
        return StepLR(optimizer, step_size=3, gamma=0.5)

    def show(self, batch: Item, index: int) -> Tensor | str:
        return batch["x"][index].reshape(2, 3)
