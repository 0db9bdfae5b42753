"""Drives the real engine as an attempt does, and tells what every step came to."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from observe import observe

from samestep import JobSpec, Workload
from samestep.checkpoint.state import collect
from samestep.engine.canary import compare_canary
from samestep.engine.collective import Collective
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.peers import Peers
from samestep.engine.setup import Built, before_step, build, make_replicas, turns_of
from samestep.engine.step import Replica, StepEngine
from samestep.engine.update import apply_update
from samestep.exact.digest import live_digest

CPU = torch.device("cpu")


def drive(
    spec: JobSpec,
    workload: Workload,
    group: dist.ProcessGroup | None,
    *,
    num_steps: int,
    num_devices: int = 1,
    collective: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Trains `num_steps` steps in this worker.

    With `collective`, workers meet as they do on GPUs.

    Returns:
        steps: what each step came to.
        counts: by step, bytes sent, addresses of the gradient buffers, and the like.
    """
    peers = Peers(group)
    built = build(spec, workload, CPU)
    replicas = make_replicas(spec, built, [CPU] * num_devices, peers)
    feed = Feed(
        workload=workload,
        dataset=built.dataset,
        order=built.feed_order,
        turns=turns_of(replicas),
        seed=spec.seed,
        start_step=0,
        end_step=num_steps,
        loader_processes=spec.loader_processes,
        pin_memory=False,
    )
    before_step(spec, workload, replicas, 0)
    engine = _engine(spec, built, replicas, peers, group, feed)
    if collective:
        assert isinstance(engine, StepEngine)
        assert group is not None
        engine.exchange = Collective(engine.main.buckets, spec.shards, group)
    steps, counts = [], []
    try:
        for step in range(num_steps):
            if step > 0:
                before_step(spec, workload, replicas, step)
            started = time.perf_counter()
            plans = built.order.shards_of(step)
            reduced = engine.compute(step, plans, feed.take, 0)
            apply_update(spec, built.parts, reduced.parameters, step=step, device=CPU)
            engine.sync_replicas()
            parts = built.parts
            steps.append(
                observe(parts.model, parts.optimizer, parts.scheduler, parts.scaler, reduced.loss)
            )
            counts.append(
                {
                    "sent_bytes": reduced.traffic.sent_bytes,
                    "step_s": time.perf_counter() - started,
                    **_buffers(engine),
                }
            )
    finally:
        feed.close()
        engine.close()
    return {"steps": steps, "counts": counts}


def _engine(
    spec: JobSpec,
    built: Built,
    replicas: list[Replica],
    peers: Peers,
    group: dist.ProcessGroup | None,
    feed: Feed,
) -> StepEngine | FastEngine:
    if spec.reduction == "fast" and group is not None:
        return FastEngine(
            spec=spec,
            workload=built.workload,
            replica=replicas[0],
            peers=peers,
            scale=built.parts.scaled,
        )
    engine = StepEngine(
        spec=spec,
        workload=built.workload,
        replicas=replicas,
        peers=peers,
        group=group,
        scale=built.parts.scaled,
    )
    state = live_digest(collect(built.parts, step=0, extras={}).tensors)
    canary = compare_canary(spec, engine, peers, built.order, feed.take_apart, state).canary
    if spec.nominal_weight is not None:
        engine.nominal_weight = spec.nominal_weight
    elif canary.own_weight:
        engine.nominal_weight = canary.weight
    return engine


def _buffers(engine: StepEngine | FastEngine) -> dict[str, Any]:
    if isinstance(engine, FastEngine):
        return {}
    buckets = engine.main.buckets
    return {
        "addresses": sorted(buffer.data_ptr() for held in buckets._buffers for buffer in held),
        "num_buffers": buckets.num_buffers,
        "gradient_bytes": sum(layout.numel * layout.dtype.itemsize for layout in buckets.layouts),
        "num_buckets": len(buckets.layouts),
    }
