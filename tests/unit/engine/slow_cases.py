"""Workloads whose state is copied slowly, or never written: their storage hangs for a while."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from cases import Base, Large
from torch import Tensor, nn

from samestep import Loss, Values
from samestep.checkpoint.image import Image
from samestep.checkpoint.storage import Storage

PAUSE_S = 0.05
NUM_SLOW = 12
"""Copies that are slow: those of the first two or three saves of a worker."""
HANG_S = 40.0
under_way = threading.Event()


class Slow(Large):
    """Has a buffer that each forward changes behind autograd.

    Args:
        slow: the rank of the worker whose first copies take long; None: none is.
        width: of the buffer.
        overlaps: a file that is made when a loss is computed during such a copy.
    """

    def __init__(
        self, *, slow: int | None, width: int = 9, overlaps: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.width, self.overlaps = width, overlaps
        rank = dist.get_rank() if dist.is_initialized() else 0
        if slow == rank:
            _slow_down()

    def net(self) -> nn.Module:
        net = super().net()
        net.register_buffer("seen", torch.zeros(self.width))
        return net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        assert isinstance(model.seen, Tensor)
        if model.training:
            model.seen.data.add_(1.0)
            if self.overlaps is not None and under_way.is_set():
                Path(self.overlaps).touch()
        return super().loss(model, batch)


class SlowBefore(Slow):
    """As Slow, with a `before_step` that shrinks the weights."""

    def before_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


class Late(Base):
    """Worker 1 computes for longer than its group was given to form.

    Args:
        late_s: how long.
    """

    def __init__(self, *, late_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.late_s = late_s if dist.is_initialized() and dist.get_rank() == 1 else 0.0

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        threading.Event().wait(self.late_s)
        return super().loss(model, batch)


class Leaves(Base):
    """Worker 1 raises in its second step, and leaves the group by that."""

    step = 0

    def before_step(self, model: nn.Module, step: int) -> None:
        self.step = step

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        if self.step == 1 and dist.get_rank() == 1:
            raise ValueError("leaves")
        return super().loss(model, batch)


class Hanging(Base):
    """Storage does not answer worker 1 when it writes of step 2, until step 5 was taken.

    A state so small is written by a thread of the worker.
    """

    answers = threading.Event()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if dist.get_rank() == 1:
            self.answers.clear()
            _hang(self.answers)

    def on_step(self, step: int, values: Values) -> None:
        if step == 4:
            self.answers.set()


class HangingLarge(Large):
    """Worker 1's process that writes checkpoints stands still, as one that its storage holds up."""

    def on_step(self, step: int, values: Values) -> None:
        if step == 1 and dist.get_rank() == 1:
            os.kill(_writer_process(), signal.SIGSTOP)


def _hang(answers: threading.Event) -> None:
    write = Storage.write_chunks

    def hanging(storage: Storage, name: str, chunks: Any) -> None:
        if storage.root.endswith("step-00000002"):
            Storage.write_chunks = write  # type: ignore[method-assign]
            answers.wait(HANG_S)
        write(storage, name, chunks)

    Storage.write_chunks = hanging  # type: ignore[method-assign]


def _writer_process() -> int:
    """Its id; the process is started behind the training."""
    deadline, pause = time.monotonic() + HANG_S, threading.Event()
    while time.monotonic() < deadline:
        for process in psutil.Process().children():
            if any("samestep.checkpoint.writer" in part for part in process.cmdline()):
                return process.pid
        pause.wait(0.01)
    raise TimeoutError("there is no process that writes checkpoints")


def _slow_down() -> None:
    fill, pause, left = Image.fill, threading.Event(), iter(range(NUM_SLOW))

    def slowly(*args: Any) -> None:
        if next(left, None) is None:
            Image.fill = fill  # type: ignore[method-assign]
        else:
            under_way.set()
            pause.wait(PAUSE_S)
            under_way.clear()
        fill(*args)

    Image.fill = slowly  # type: ignore[method-assign]
