"""Mode dataparallel against stock `nn.DataParallel`, where there are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from contenders import CPU, NUM_BATCHES, Batches, Samestep, Step
from models import Model
from torch import nn

from samestep.engine.setup import build
from samestep.spec import JobSpec

NAMES = ("dataparallel on GPUs", "nn.DataParallel on GPUs")


def gpu_contenders(model: Model, spec: JobSpec, *, build: bool) -> dict[str, Step]:
    """Steps by name of the engine, on all GPUs of this process.

    Args:
        model: what to train.
        spec: its job.
        build: False on the workers that only stand by.
    """
    if not build:
        return dict.fromkeys(NAMES, _nothing)
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    used = tuple(devices[: spec.shards])
    ours = Samestep(model, spec, Batches(model, spec, used), None, devices=used)
    return {NAMES[0]: _synchronized(ours.step), NAMES[1]: _synchronized(_stock(model, spec))}


def _stock(model: Model, spec: JobSpec) -> Step:
    """The whole batch at once on `nn.DataParallel`, which cuts it itself."""
    device = torch.device("cuda", 0)
    built = build(spec, model.workload(spec), device)
    parts = built.parts
    wrapped = nn.DataParallel(parts.model)
    pool = Batches(model, spec, (CPU,))
    made: list[Any] = []
    for step in range(NUM_BATCHES):
        shards = [pool.take(plan, CPU) for plan in built.order.shards_of(step)]
        made.append({key: torch.cat([s[key] for s in shards]).to(device) for key in shards[0]})

    def step(number: int) -> None:
        torch.use_deterministic_algorithms(False)
        parts.optimizer.zero_grad()
        model.plain_loss(wrapped, made[number % NUM_BATCHES]).backward()
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), spec.clip_norm)
        parts.optimizer.step()
        if parts.scheduler is not None:
            parts.scheduler.step()
        torch.use_deterministic_algorithms(True)

    return step


def _synchronized(step: Callable[[int], object]) -> Step:
    def call(number: int) -> None:
        step(number)
        torch.cuda.synchronize()

    return call


def _nothing(number: int) -> None:
    """The other workers stand by."""
