"""The recorder by itself: after a long outage of MLflow, and under very many workers."""

from __future__ import annotations

import random
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from samestep.checkpoint.storage import Storage
from samestep.cluster.actors import RayTarget, close_recorder, start_recorder
from samestep.cluster.environment import prepare_ray
from samestep.names import LEDGER_DIR
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry import lease as leases
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.sinks import SinkPlan, plan_sinks

STEPS_PER_S = 10
NUM_SHARDS = 8
DRAIN_LIMIT_S = 600.0
READY_S = 60.0
WORKERS_PER_NODE = 8
PARTS = ("training", "data", "communication", "checkpoint", "evaluation", "idle", "elapsed")


def outage_figures(*, num_steps: int) -> dict[str, Any]:
    """What so many steps add to the ledger, and how long a SQLite file takes to get them all."""
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
        run = Storage.at(f"{folder}/runs/outage")
        spec = _spec(folder, metrics={"enabled": False})
        _told_without_mlflow(run, spec, num_steps)
        process, started = psutil.Process(), time.perf_counter()
        cpu_s = _cpu_s(process)
        plan = plan_sinks(spec, run.uri, workload_folder=Path(folder), environ={})
        recorder = Recorder(run.uri, run="outage", spec_yaml=dump_spec(spec), sinks=plan.make())
        try:
            while not recorder.status()["mlflow"]["up"]:  # its first delivery is through
                recorder.drain(timeout_s=0.05)
                if time.perf_counter() - started > DRAIN_LIMIT_S:
                    raise TimeoutError(f"nothing was delivered within {DRAIN_LIMIT_S:.0f} s")
            connect_s = time.perf_counter() - started
            lacking = recorder.drain(timeout_s=DRAIN_LIMIT_S)
            drain_s = time.perf_counter() - started
            cpu_s = _cpu_s(process) - cpu_s
        finally:
            recorder.close()
        if lacking:
            raise TimeoutError(f"not all was delivered within {DRAIN_LIMIT_S:.0f} s")
        return {
            "num_steps": num_steps,
            "ledger_bytes": run.size_bytes(LEDGER_DIR),
            "num_points": _num_points(plan, num_steps),
            "connect_s": connect_s,
            "drain_s": drain_s,
            "cpu_s": cpu_s,
        }


def load_figures(*, num_workers: int, seconds: int) -> dict[str, Any]:
    """What the recorder's actor takes while every worker reports once a second.

    One process sends for all workers, through Ray, as they would; worker 0's steps come beside.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder, _cluster():
        run = Storage.at(f"{folder}/runs/load")
        spec = _spec(folder)
        plan = plan_sinks(spec, run.uri, workload_folder=Path(folder), environ={})
        actor, target = start_recorder(plan, run.uri, "load", dump_spec(spec))
        try:
            attempt = _begun(target, num_workers)
            url = _page(target)
            holder = leases.holder(run)
            assert holder is not None
            process = psutil.Process(holder.pid)
            _until_delivered(target)  # loading MLflow is no part of the load
            return _loaded(actor, process, url, attempt, num_workers, seconds)
        finally:
            close_recorder(actor, target)


def _loaded(
    actor: Any, process: psutil.Process, url: str, attempt: int, num_workers: int, seconds: int
) -> dict[str, Any]:
    started, cpu_s, memory_bytes = time.perf_counter(), _cpu_s(process), 0
    scrapes_s, pages, num_messages, num_late = [], [], 0, 0
    for second in range(seconds):
        answers = []
        for rank in range(num_workers):
            answers.append(actor.call.remote("report", [_report(attempt, rank, second)]))
            if rank % (num_workers // STEPS_PER_S or 1) == 0:
                _pause_until(started + second + rank / num_workers)
        steps = range(second * STEPS_PER_S, (second + 1) * STEPS_PER_S)
        records = [_record(step).to_json() for step in steps]
        answers.append(actor.call.remote("push", [attempt, "0", second + 1, records]))
        if second % 5 == 4:
            asked = time.perf_counter()
            with urllib.request.urlopen(url, timeout=30) as answer:
                pages.append(len(answer.read()))
            scrapes_s.append(time.perf_counter() - asked)
        ray.get(answers, timeout=60)
        num_messages += len(answers)
        num_late += time.perf_counter() > started + second + 1
        memory_bytes = max(memory_bytes, process.memory_info().rss)
        _pause_until(started + second + 1)
    elapsed_s = time.perf_counter() - started
    return {
        "num_workers": num_workers,
        "num_messages": num_messages,
        "seconds": elapsed_s,
        "num_late_seconds": num_late,
        # Where this machine can't send as fast, the messages still are so many seconds' worth.
        "cores": (_cpu_s(process) - cpu_s) / seconds,
        "memory_bytes": memory_bytes,
        "scrape_s": max(scrapes_s),
        "page_bytes": max(pages),
    }


def _told_without_mlflow(run: Storage, spec: JobSpec, num_steps: int) -> None:
    recorder = Recorder(run.uri, run="outage", spec_yaml=dump_spec(spec))
    info = {"start_step": 0, "mode": "ddp", "world_size": 2, "numerics": {}}
    attempt = recorder.begin_attempt(info)
    for sequence, start in enumerate(range(0, num_steps, STEPS_PER_S), 1):
        steps = range(start, min(start + STEPS_PER_S, num_steps))
        recorder.push(attempt, "0", sequence, [_record(step).to_json() for step in steps])
    recorder.close()


def _num_points(plan: SinkPlan, num_steps: int) -> int:
    """The points that arrived; each step's loss must be among them, once."""
    client = load_mlflow().MlflowClient(tracking_uri=plan.tracking_uri)
    experiment = client.get_experiment_by_name(plan.experiment)
    (found,) = client.search_runs([experiment.experiment_id])
    num_points = 0
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        if [point.step for point in history] != list(range(num_steps)):
            raise AssertionError(f"{name} has {len(history)} points of {num_steps}")
        num_points += len(history)
    return num_points


def _spec(folder: str, **fields: Any) -> JobSpec:
    given = {"workload": "a:B", "batch_size": 64, "shards": NUM_SHARDS, "max_steps": 10**6}
    return parse_spec({**given, "storage": f"{folder}/runs", **fields})


def _record(step: int) -> StepRecord:
    """A step as long as a real one: values of float32, which have the longest texts."""
    stream = random.Random(step)
    return StepRecord(
        step=step,
        epoch=step // 100,
        samples=64,
        loss=stream.random(),
        shard_losses=[stream.random() for _ in range(NUM_SHARDS)],
        shard_weights=[8.0] * NUM_SHARDS,
        grad_norm=stream.random(),
        lr=[stream.random()],
        ids=f"{stream.getrandbits(128):032x}",
        metrics={"accuracy": stream.random()},
        timing={
            **{f"{part}_s": stream.random() for part in ("step", "data_wait", "exchange_wait")},
            **{f"{part}_s": stream.random() for part in PARTS},
            "sent_bytes": 82432,
            "at_s": time.time(),
        },
    )


def _report(attempt: int, world_rank: int, second: int) -> dict[str, Any]:
    report = WorkerReport(
        attempt=attempt,
        world_rank=world_rank,
        num_steps=STEPS_PER_S,
        num_samples=8 * STEPS_PER_S,
        own_s=0.9,
        host_bytes=10**9 + world_rank,
        host_limit_bytes=10**10,
    ).to_json()
    if (second + world_rank) % 10 == 0:
        host = f"node-{world_rank // WORKERS_PER_NODE}"
        report["node"] = {
            "host": host,
            "cpu_percent": 50.0,
            "memory_bytes": 10**10,
            "memory_limit_bytes": 10**11,
            "gpus": [],
        }
    return report


def _begun(target: RayTarget, num_workers: int) -> int:
    info = {"start_step": 0, "mode": "ddp", "world_size": num_workers, "numerics": {}}
    return int(target.call("begin_attempt", info))


def _page(target: RayTarget) -> str:
    return str(target.call("status")["metrics_url"])


def _until_delivered(target: RayTarget) -> None:
    end = time.monotonic() + READY_S
    while target.call("drain", 5.0):
        if time.monotonic() > end:
            raise TimeoutError(f"the sinks of the recorder were not ready in {READY_S:.0f} s")


def _pause_until(moment: float) -> None:
    threading.Event().wait(max(0.0, moment - time.perf_counter()))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _cluster() -> Iterator[None]:
    prepare_ray()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="WARNING")
    try:
        yield
    finally:
        ray.shutdown()
