r"""A tiny model that fails on request, for drills: how does a run take a fault at step N?

Each of `crash_at`, `raise_at`, `hang_at`, `nan_at`, `grow_at` and `flip_at` is a step, or a list of
steps.
Exactly one worker is hit: the one whose shards hold the sample at `position` of the step's batch.

    samestep train workloads/faulty/job.yaml --name calm
    samestep train workloads/faulty/job.yaml --name crash --workers 2 \
        --set args.crash_at=20 --set args.marker=/tmp/faulty-crash

The model, its data (a function of the index) and its dropout are there to make lost or repeated
work visible in the weights, not to learn anything of use.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from samestep import Loss, Workload

Item = dict[str, Tensor]
Steps = int | list[int] | None

NUM_FEATURES = 8


class Waves(Dataset[Item]):
    """Eight waves of the index, and the one to be found from them.

    An item is `{"index": int64 [], "x": float32 [8], "y": float32 [1]}`.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Item:
        waves = [math.sin(0.37 * index * (k + 1)) for k in range(NUM_FEATURES)]
        return {
            "index": torch.tensor(index),
            "x": torch.tensor(waves),
            "y": torch.tensor([waves[0] * waves[1] + waves[2]]),
        }


class Faulty(Workload):
    """Trains a small MLP, and does what it is told at the steps it is told.

    Args:
        crash_at: the process kills itself (SIGKILL), without a word.
        raise_at: `loss` raises a RuntimeError.
        hang_at: `loss` never returns.
        nan_at: the sample's features are NaN, and so are the shard's loss and gradients. This is
            part of what the step computes: it comes again whenever the step is taken again.
        grow_at: the process takes `grow_bytes` more memory at this and every later step, up to
            `grow_limit_bytes` in all, and never gives it back while it lives.
        flip_at: the gradient is one bit off, once, as on a machine that computes wrongly. Needs a
            marker, or it would be off wherever the shard is computed, and no audit could tell.
        grow_bytes: see `grow_at`.
        grow_limit_bytes: see `grow_at`.
        position: place, in the step's batch, of the sample that brings the fault: 0 hits the
            worker with the first shard, `batch_size - 1` the one with the last. In a short
            batch, its last sample does.
        marker: absolute path of a folder where every fault but NaN leaves a file before it
            strikes; one whose file is there does not strike again, so that a retry gets past it.
            None: faults strike every time. On several nodes it must be a shared folder.
        batch_size: the job's `batch_size`, from which the samples of a step are reckoned. With
            another value faults miss.
        num_samples: length of the data.
        width: hidden units; the state grows with its square.
        lr: learning rate of AdamW.
        dropout: share of hidden units that are dropped.
        pause_s: seconds that every worker waits before every step, to give a drill time.
        slow_s: seconds that the worker with the sample at `position` waits in every step: a
            straggler, for whom all others wait.
    """

    dimensions: ClassVar = {"index": (None,), "x": (None, NUM_FEATURES), "y": (None, 1)}

    def __init__(
        self,
        *,
        crash_at: Steps = None,
        raise_at: Steps = None,
        hang_at: Steps = None,
        nan_at: Steps = None,
        grow_at: Steps = None,
        flip_at: Steps = None,
        grow_bytes: int = 16 * 2**20,
        grow_limit_bytes: int = 256 * 2**20,
        position: int = 0,
        marker: str | None = None,
        batch_size: int = 16,
        num_samples: int = 250,
        width: int = 32,
        lr: float = 0.01,
        dropout: float = 0.1,
        pause_s: float = 0.0,
        slow_s: float = 0.0,
    ) -> None:
        if not 0 <= position < batch_size:
            raise ValueError(f"position must be in 0..{batch_size - 1}, got {position}")
        if marker is not None and not Path(marker).is_absolute():
            raise ValueError(
                f"marker must be an absolute path, since workers run in folders of their own; "
                f"got {marker!r}"
            )
        if flip_at is not None and marker is None:
            raise ValueError("flip_at needs a marker: a folder in which it notes that it struck")
        self.faults = {
            "grow": as_steps("grow_at", grow_at),
            "nan": as_steps("nan_at", nan_at),
            "flip": as_steps("flip_at", flip_at),
            "raise": as_steps("raise_at", raise_at),
            "hang": as_steps("hang_at", hang_at),
            "crash": as_steps("crash_at", crash_at),
        }
        self.grow_bytes = grow_bytes
        self.grow_limit_bytes = grow_limit_bytes
        self.position = position
        self.marker = None if marker is None else Path(marker)
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.width = width
        self.lr = lr
        self.dropout = dropout
        self.pause_s = pause_s
        self.slow_s = slow_s
        self.step = 0
        self.victim: int | None = None
        self.growing = False
        self.taken: list[bytes] = []

    def model(self) -> nn.Module:
        """Two hidden layers with dropout."""
        return nn.Sequential(
            nn.Linear(NUM_FEATURES, self.width),
            nn.Tanh(),
            nn.Dropout(self.dropout),
            nn.Linear(self.width, self.width),
            nn.Tanh(),
            nn.Linear(self.width, 1),
        )

    def data(self) -> Dataset[Item]:
        """`num_samples` points of the waves."""
        return Waves(self.num_samples)

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """A permutation of the epoch alone.

        It does not use the job's stream, because `before_step` has to know it too.
        """
        return permutation(self.num_samples, epoch)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Notes which sample of the step brings a fault; grows by one piece where that is due."""
        self.step = step
        self.victim = None
        if self.due() or self.slow_s > 0:
            ids = self.ids_of(step)
            self.victim = ids[min(self.position, len(ids) - 1)]
        if self.pause_s > 0:
            threading.Event().wait(self.pause_s)
        if self.growing:
            self.grow()

    def loss(self, model: nn.Module, batch: Item) -> Loss:
        """Squared error, the mean over the shard's samples; or a fault."""
        x, flips = batch["x"], False
        victim = self.victim
        if victim is not None and bool((batch["index"] == victim).any()):
            if self.slow_s > 0:
                threading.Event().wait(self.slow_s)
            for fault in self.due():
                if fault == "nan":
                    x = torch.where(batch["index"].unsqueeze(1) == victim, math.nan, x)
                elif self.first_time(fault):
                    flips = fault == "flip"
                    self.strike(fault)
        out = model(x)
        if flips and out.requires_grad:
            out.register_hook(flipped)
        error = (out - batch["y"]).square().squeeze(1)
        return Loss(value=error.mean(), metrics={"squared_error": error.detach()})

    def optimizer(self, model: nn.Module) -> AdamW:
        """AdamW, whose moments and step counts show whether a restart kept them."""
        return AdamW(model.parameters(), lr=self.lr)

    def evaluation_data(self) -> Dataset[Item]:
        """The first 100 points of the same waves: nothing here is held out."""
        return Waves(min(100, self.num_samples))

    def evaluate(self, model: nn.Module, batch: Item) -> dict[str, Tensor]:
        """Squared error of each sample; never a fault."""
        return {"squared_error": (model(batch["x"]) - batch["y"]).square().squeeze(1)}

    def due(self) -> list[str]:
        """Faults of the present step, in the order in which they strike."""
        return [fault for fault, steps in self.faults.items() if self.step in steps]

    def ids_of(self, step: int) -> list[int]:
        """Samples of a step's batch, in order."""
        steps_per_epoch = math.ceil(self.num_samples / self.batch_size)
        epoch, place = divmod(step, steps_per_epoch)
        start = place * self.batch_size
        ids: list[int] = permutation(self.num_samples, epoch).tolist()
        return ids[start : start + self.batch_size]

    def first_time(self, fault: str) -> bool:
        """Whether the fault has not struck at this step yet; from now on it has."""
        if self.marker is None:
            return True
        self.marker.mkdir(parents=True, exist_ok=True)
        try:
            (self.marker / f"{fault}-{self.step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def strike(self, fault: str) -> None:
        """Does what the fault is about; returns from `grow` and `flip` only."""
        print(f"faulty: {fault} at step {self.step}, pid {os.getpid()}", flush=True)
        if fault == "grow":
            self.growing = True
            self.grow()
        elif fault == "raise":
            raise RuntimeError(f"faulty raises at step {self.step}, as args.raise_at says")
        elif fault == "hang":
            threading.Event().wait()
        elif fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)

    def grow(self) -> None:
        """Takes one more piece of memory, written to so that it is really there."""
        left = self.grow_limit_bytes - sum(map(len, self.taken))
        if left > 0:
            self.taken.append(b"\1" * min(self.grow_bytes, left))


def flipped(gradient: Tensor) -> Tensor:
    """The gradient with the lowest bit of its first value turned over."""
    wrong = gradient.clone()
    wrong.view(torch.int32).flatten()[0] ^= 1
    return wrong


def permutation(num_samples: int, epoch: int) -> Tensor:
    """Order of an epoch: int64 [num_samples]."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))


def as_steps(name: str, value: Steps) -> frozenset[int]:
    """The steps of one fault."""
    steps = [] if value is None else value if isinstance(value, list) else [value]
    for step in steps:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"{name} takes a step (0 or more), a list of them or null: {value!r}")
    return frozenset(steps)
