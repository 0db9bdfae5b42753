"""What each process that torchrun starts does: one task, whose result world rank 0 writes.

Usage: worker.py TASK RESULT.json (a task is a JSON object with `kind` and what `tasks` need).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bundles import bundles
from contenders import CPU, Batches, Contender, Samestep, plain_ddp
from gpus import gpu_contenders
from incidents import watching
from models import MODELS, Model
from rounds import WARM_UP_ROUNDS, alternate
from saves import checkpoints
from stopwatch import watch
from torch import Tensor

from samestep.engine.forecast import forecast
from samestep.engine.heap import keep_freed_memory
from samestep.engine.step import StepEngine
from samestep.exact import numerics
from samestep.exact.tree import shard_range
from samestep.spec import JobSpec

TIMEOUT_S = 300

STOCK_FLAGS: dict[str, dict[str, Any]] = {
    "plain, default flags": {},
    "plain, bucket view": {"gradient_as_bucket_view": True, "set_to_none": False},
}

# Two engines may differ by this much in their first update, over its size: sums in another order.
FIRST_STEP_TOLERANCE = 0.02

# The fast engine is there for orientation: it takes part in one round of so many.
FAST_EVERY = 5

Task = dict[str, Any]


def steps(task: Task) -> Any:
    """Step times of exact, fast and plain by name of the engine, one per round."""
    model, workers = MODELS[task["model"]], dist.get_world_size()
    spec = _spec(model, task["shards_per_worker"], task)
    numerics.pin(spec)
    group = _group()
    shards = shard_range(spec.shards, workers, dist.get_rank())
    batches = Batches(model, spec, (CPU,))
    exact = Samestep(model, spec, batches, group)
    fast = Samestep(model, spec, batches, group, is_fast=True)
    made: list[Contender] = [
        Contender(name="exact", step=exact.step, model=exact.built.parts.model),
        Contender(name="fast", step=fast.step, model=fast.built.parts.model, every=FAST_EVERY),
    ]
    # Long steps: the plain scripts take turns, or all of it would take too long.
    every = 1 if task["shards_per_worker"] == 1 else len(STOCK_FLAGS)
    for number, (name, options) in enumerate(STOCK_FLAGS.items()):
        step, module = plain_ddp(model, spec, batches, shards, **options)
        made.append(Contender(name=name, step=step, model=module, every=every, turn=number % every))
    if not model.draws:
        _check_first_step(made)
    return alternate(made, task["rounds"])


def profile(task: Task) -> Any:
    """Milliseconds of the exact engine's step by part, on world rank 0."""
    model = MODELS[task["model"]]
    spec = _spec(model, task["shards_per_worker"], task)
    numerics.pin(spec)
    exact = Samestep(model, spec, Batches(model, spec, (CPU,)), _group())
    stopwatch, step = watch(exact)
    for number in range(WARM_UP_ROUNDS):
        step(number)
    stopwatch.seconds.clear()
    for number in range(task["rounds"]):
        dist.barrier()
        step(number)
    return {name: 1000 * value / task["rounds"] for name, value in stopwatch.seconds.items()}


def counts(task: Task) -> Any:
    """Extra gradient buffers and bytes sent in a step: counted, and forecast."""
    model, workers = MODELS[task["model"]], dist.get_world_size()
    group = _group() if workers > 1 else None
    found = []
    for shards in task["shards"]:
        spec = model.spec(shards=shards, threads=task["threads"])
        numerics.pin(spec)
        exact = Samestep(model, spec, Batches(model, spec, (CPU,)), group)
        assert isinstance(exact.engine, StepEngine)
        buckets = exact.engine.main.buckets
        reduced = exact.step(0)
        expected = forecast(spec, buckets.parameters, workers)
        mine = expected.workers[dist.get_rank()]
        held = sum(buffer.nbytes for of in buckets._buffers for buffer in of)
        counted = [held - expected.gradient_bytes, reduced.traffic.sent_bytes]
        everyone: list[Any] = [None] * workers
        dist.all_gather_object(everyone, [counted, [mine.extra_buffer_bytes, mine.sent_bytes]])
        ring = 2 * (workers - 1) * expected.gradient_bytes // workers
        found.append(
            {
                "model": model.name,
                "workers": workers,
                "shards": shards,
                "gradient_bytes": expected.gradient_bytes,
                "ring_sent_bytes": ring,
                "traffic_factor": expected.traffic_factor,
                "counted": [
                    {"extra_buffer_bytes": extra, "sent_bytes": sent}
                    for (extra, sent), _ in everyone
                ],
                "as_forecast": all(seen == told for seen, told in everyone),
            }
        )
        exact.engine.close()
    return found


def dataparallel(task: Task) -> Any:
    """The same job by `ddp` over all workers, and by `dataparallel` in one process of them."""
    model, workers = MODELS[task["model"]], dist.get_world_size()
    spec = model.spec(shards=task["shards"], threads=task["threads"])
    numerics.pin(spec)
    is_first = dist.get_rank() == 0
    ddp = Samestep(model, spec, Batches(model, spec, (CPU,)), _group() if workers > 1 else None)
    alone = Samestep(model, spec, ddp.batches, None)
    made = [
        Contender(name="ddp", step=ddp.step, model=None),
        Contender(name="dataparallel", step=alone.step, model=None, takes_part=is_first),
    ]
    if torch.cuda.is_available():
        made += [
            Contender(name=name, step=step, model=None, takes_part=is_first)
            for name, step in gpu_contenders(model, spec, build=is_first).items()
        ]
    return alternate(made, task["rounds"])


TASKS: dict[str, Callable[[Task], Any]] = {
    "steps": steps,
    "profile": profile,
    "counts": counts,
    "dataparallel": dataparallel,
    "checkpoints": checkpoints,
    "watching": watching,
    "bundles": bundles,
}


def _spec(model: Model, shards_per_worker: int, task: Task) -> JobSpec:
    workers = dist.get_world_size()
    return model.spec(shards=shards_per_worker * workers, workers=workers, threads=task["threads"])


def _group() -> dist.ProcessGroup:
    """A gloo group of its own, as the cluster's workers make one."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    assert group is not None
    return group


def _check_first_step(made: list[Contender]) -> None:
    """All engines do the same work: their first updates are equal but for rounding."""
    updates: dict[str, Tensor] = {}
    for contender in made:
        before = _weights(contender)
        contender.step(0)
        updates[contender.name] = _weights(contender) - before
    reference = updates[next(iter(STOCK_FLAGS))]
    for name, update in updates.items():
        off = float((update - reference).norm() / reference.norm())
        if not off <= FIRST_STEP_TOLERANCE:
            raise RuntimeError(
                f"the first update of {name} is off that of a plain script by {off:.3g} of its "
                f"size, allowed are {FIRST_STEP_TOLERANCE}: they don't do the same work"
            )


def _weights(contender: Contender) -> Tensor:
    assert contender.model is not None
    return torch.cat([p.detach().flatten() for p in contender.model.parameters()])


def main() -> None:
    task, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    if not task["stock_heap"]:
        keep_freed_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    found = TASKS[task["kind"]](task)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    # Without the interpreter's end: a thread of torch that wants its lock then aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
