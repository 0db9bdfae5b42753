from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samestep.spec import JobSpec, load_spec
from samestep.workload import Loss, Workload, load_workload

FOLDER = Path(__file__).resolve().parents[3] / "workloads"

Load = Callable[..., tuple[JobSpec, Workload]]


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Puts back what loading and running a workload in this process changes."""
    path, threads = list(sys.path), torch.get_num_threads()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    sys.path[:] = path


@pytest.fixture
def load() -> Load:
    """load("digits", lr=0.1) gives the spec of workloads/digits/job.yaml and its workload."""

    def load(name: str, **args: Any) -> tuple[JobSpec, Workload]:
        overrides: Mapping[str, object] = {f"args.{key}": value for key, value in args.items()}
        spec = load_spec(FOLDER / name / "job.yaml", overrides)
        return spec, load_workload(spec.workload, spec.args, [FOLDER / name])

    return load


Train = Callable[[JobSpec, Workload], tuple[nn.Module, list[float]]]


@pytest.fixture
def train_plainly() -> Train:
    """Trains in the open, in one process and without samestep's engine.

    Returns the model and the loss of each step.
    """

    def train(spec: JobSpec, workload: Workload) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(spec.seed)
        data: Any = workload.data()
        model = workload.model()
        optimizer = workload.optimizer(model)
        scheduler = workload.scheduler(optimizer)
        order = random.Random(spec.seed)
        losses: list[float] = []
        steps_per_epoch = math.ceil(len(data) / spec.batch_size)
        num_steps = spec.max_steps or steps_per_epoch * (spec.epochs or 1)
        while len(losses) < num_steps:
            epoch = len(losses) // steps_per_epoch
            given = workload.order(epoch, torch.Generator().manual_seed(epoch))
            shuffled = order.sample(range(len(data)), len(data))
            permutation = shuffled if given is None else [int(index) for index in given]
            for start in range(0, len(data), spec.batch_size):
                if len(losses) == num_steps:
                    break
                workload.before_step(model, len(losses))
                ids = permutation[start : start + spec.batch_size]
                losses.append(one_step(spec, workload, model, data, ids))
                if spec.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if scheduler is not None:
                    scheduler.step()
        return model, losses

    return train


def one_step(
    spec: JobSpec, workload: Workload, model: nn.Module, data: Any, ids: list[int]
) -> float:
    """Gradients of one batch, cut into shards; buffers are those that the first shard left."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after = dict(before)
    loss = 0.0
    for shard, part in enumerate(np.array_split(np.asarray(ids), spec.shards)):
        if len(part) == 0:
            continue
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        out = workload.loss(model, workload.collate([data[int(i)] for i in part]))
        value = out.value if isinstance(out, Loss) else out
        share = len(part) / len(ids)
        (value * share).backward()
        loss += value.item() * share
        if shard == 0:
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(after[name])
    return loss


Evaluate = Callable[[Workload, nn.Module], dict[str, float]]


@pytest.fixture
def evaluate_plainly() -> Evaluate:
    """Mean over all evaluation samples of each metric, in batches of 100."""

    def evaluate(workload: Workload, model: nn.Module) -> dict[str, float]:
        data: Any = workload.evaluation_data()
        model.eval()
        values: dict[str, list[float]] = {}
        with torch.no_grad():
            for start in range(0, len(data), 100):
                ids = range(start, min(start + 100, len(data)))
                batch = workload.collate([data[i] for i in ids])
                for name, metric in workload.evaluate(model, batch).items():
                    assert isinstance(metric, torch.Tensor)
                    assert metric.shape == (len(ids),)
                    values.setdefault(name, []).extend(metric.double().tolist())
        model.train()
        return {name: math.fsum(value) / len(data) for name, value in values.items()}

    return evaluate
