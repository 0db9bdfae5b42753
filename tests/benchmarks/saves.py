"""What a checkpoint costs the training, beside torch.save and PyTorch's asynchronous saving."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import CPU, Batches, Samestep
from models import MODELS
from torch import Tensor

from samestep.checkpoint import shared_memory
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import collect
from samestep.checkpoint.storage import Storage
from samestep.engine.node import Node
from samestep.engine.peers import Peers
from samestep.engine.saving import Saving
from samestep.engine.snapshots import Snapshots
from samestep.exact import numerics
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.link import Link, Target
from samestep.telemetry.records import StepRecord

# The recorder that several processes share in the tests serves here as well.
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "engine"))

from relay import target_of

META = CheckpointMeta(numerics={}, spec={}, created_s=0.0)
WARM_UP_STEPS = 5
STEPS_BETWEEN = 50
SETTLED_SNAPSHOTS = 4
"""After so many the interval is that of warm memory, and of what the steps after it take longer."""

Task = dict[str, Any]


def checkpoints(task: Task) -> Any:
    """Seconds that a save holds training up, in samestep and in others; step times beside it.

    Each list has one entry a save (or a step), the slowest worker's.
    """
    model, workers = MODELS[task["model"]], dist.get_world_size()
    plain = model.spec(shards=workers, workers=workers, threads=task["threads"])
    large = {"args": {"has_two_moments": True}, "ema": {"decay": 0.99}}  # 200 MB of state
    spec = parse_spec({**plain.model_dump(mode="json"), **large})
    numerics.pin(spec)
    group = dist.new_group(backend="gloo")
    assert group is not None
    exact = Samestep(model, spec, Batches(model, spec, (CPU,)), group if workers > 1 else None)
    peers = Peers(group if workers > 1 else None)
    with shared_folder(peers, task["folder"]) as folder:
        found = _samestep(exact, spec, peers, folder, task["rounds"])
        tensors = collect(exact.built.parts, step=0, extras={}).tensors
        found["state_bytes"] = sum(t.numel() * t.element_size() for t in tensors.values())
        found["torch_save_s"] = torch_save(tensors, peers, folder, task["rounds"])
        found["async_save_s"] = _async_save(tensors, group, peers, folder, task["rounds"])
    exact.engine.close()
    return found


def _samestep(
    exact: Samestep, spec: JobSpec, peers: Peers, folder: Path, rounds: int
) -> dict[str, Any]:
    run, is_first = Storage.at(str(folder / "run")), peers.world_rank == 0
    held_s, copy_s, quiet_s, busy_s, whole_s = [], [], [], [], []
    saved_s, has_saved = 0.0, False
    address = str(folder / "recorder")
    yaml = dump_spec(spec)
    with target_of(run.uri, yaml, address, peers.world_rank, peers.world_size) as target:
        attempt = begun(target, peers)
        link = Link(target, attempt, "0") if is_first else None
        saving = _saving(exact, spec, peers, run, target, link, attempt)
        num_steps = WARM_UP_STEPS + rounds * STEPS_BETWEEN
        snapshots = Snapshots(
            spec=spec,
            parts=exact.built.parts,
            records=tuple,
            peers=peers,
            node=Node.of(peers),
            run_uri=run.uri,
            attempt=attempt,
            first_step=num_steps,
        )
        try:
            for number in range(num_steps):
                was_writing = saving.is_under_way
                started, waited_s = time.perf_counter(), [0.0]

                def wait(waited_s: list[float] = waited_s) -> None:
                    began = time.perf_counter()
                    saving.wait_until_copied()
                    waited_s[0] = time.perf_counter() - began

                exact.step(number, wait)
                step_s = time.perf_counter() - started
                if has_saved:
                    held_s.append(max(peers.gather(saved_s + waited_s[0])()))
                    copy_s.append(max(peers.gather(saved_s + step_s)()))
                    has_saved = False
                if link is not None:
                    link.record(_record(number))
                if number == 0:
                    saving.prepare(1, extras={}, also=snapshots.warm)
                if number < WARM_UP_STEPS:
                    continue
                if was_writing and saving.is_under_way:
                    busy_s.append(step_s)
                elif not was_writing:
                    quiet_s.append(step_s)
                if (number - WARM_UP_STEPS) % STEPS_BETWEEN == STEPS_BETWEEN - 1:
                    if saving.is_under_way:
                        whole_s.append(0.0)
                    peers.gather("together")()
                    started = time.perf_counter()
                    saving.save(number + 1, extras={}, meta=META)
                    saved_s, has_saved = time.perf_counter() - started, True
            saving.settle()
            snapshot = _snapshots(exact, snapshots, run.uri, num_steps, rounds * STEPS_BETWEEN)
        finally:
            snapshots.close()
            saving.close(wait_s=10, keep_images=False)
            if link is not None:
                link.close()
        shared_memory.remove(run.uri)
    return {
        "held_up_s": held_s,
        "save_and_step_s": copy_s,
        "step_s": quiet_s,
        "step_while_writing_s": busy_s,
        "num_waited": len(whole_s),
        **snapshot,
    }


def _snapshots(
    exact: Samestep, snapshots: Snapshots, run_uri: str, first: int, num_steps: int
) -> dict[str, Any]:
    """What copies into shared memory cost, once their interval is known, and the room they take.

    A snapshot costs the time of its copy, and what the next step takes longer, which shares its
    time with the thread that hashes it.
    """
    steps_s, after_s, costs_s, taken_at, most_bytes = [], [], [], [], 0
    has_taken, begun_s = False, time.perf_counter()
    for number in range(first, first + num_steps):
        started_s = time.perf_counter()
        exact.step(number, snapshots.after_exchange)
        (after_s if has_taken else steps_s).append(time.perf_counter() - started_s)
        has_taken = snapshots.is_due(number + 1)
        if has_taken:
            snapshots.take(number + 1, extras={})
            assert snapshots.cost_s is not None
            taken_at.append(number + 1)
            costs_s.append(snapshots.cost_s)
            files = shared_memory.folder_of(run_uri).rglob("*")
            most_bytes = max(most_bytes, sum(path.stat().st_size for path in files))
            if len(taken_at) == SETTLED_SNAPSHOTS:
                begun_s, after_s, costs_s = time.perf_counter(), [], []
    elapsed_s, usual_s = time.perf_counter() - begun_s, statistics.median(steps_s)
    cost_s = sum(costs_s) + sum(step_s - usual_s for step_s in after_s)
    return {
        "snapshot_share": cost_s / elapsed_s,
        "num_snapshots": len(costs_s),
        "steps_between": taken_at[-1] - taken_at[-2],
        "shared_memory_bytes": most_bytes,
    }


def _saving(
    exact: Samestep,
    spec: JobSpec,
    peers: Peers,
    run: Storage,
    target: Target,
    link: Link | None,
    attempt: int,
) -> Saving:
    return Saving(
        spec=spec,
        parts=exact.built.parts,
        peers=peers,
        node=Node.of(peers),
        run=run,
        target=target,
        link=link,
        attempt=attempt,
        committed=None,
    )


def torch_save(tensors: dict[str, Tensor], peers: Peers, folder: Path, rounds: int) -> list[float]:
    """In line, by worker 0, as a plain script does."""
    taken_s = []
    for number in range(rounds):
        peers.gather("together")()
        if peers.world_rank == 0:
            started = time.perf_counter()
            torch.save(tensors, folder / f"plain-{number}.pt")
            taken_s.append(time.perf_counter() - started)
            (folder / f"plain-{number - 1}.pt").unlink(missing_ok=True)
        peers.gather("done")()
    return taken_s


def _async_save(
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup,
    peers: Peers,
    folder: Path,
    rounds: int,
) -> list[float]:
    """Until torch.distributed.checkpoint.async_save returns; each is over before the next."""
    taken_s = []
    for number in range(rounds):
        peers.gather("together")()
        started = time.perf_counter()
        future = dcp.async_save(
            tensors, checkpoint_id=str(folder / f"dcp-{number}"), process_group=group
        )
        taken_s.append(max(peers.gather(time.perf_counter() - started)()))
        future.result()  # type: ignore[union-attr]
        peers.gather("done")()
        if peers.world_rank == 0:
            shutil.rmtree(folder / f"dcp-{number}", ignore_errors=True)
    return taken_s


def begun(target: Target, peers: Peers) -> int:
    """Begins an attempt at the recorder; returns its number, in each worker."""
    attempt = 0
    if peers.world_rank == 0:
        info = {"start_step": 0, "mode": "ddp", "world_size": peers.world_size, "numerics": {}}
        attempt = int(target.call("begin_attempt", info))
    return int(peers.gather(attempt)()[0])


def _record(step: int) -> dict[str, Any]:
    return StepRecord(
        step=step,
        epoch=0,
        samples=1,
        loss=0.0,
        shard_losses=[0.0],
        shard_weights=[1.0],
        grad_norm=0.0,
        lr=[0.1],
        ids="0",
        metrics={},
    ).to_json()


@contextlib.contextmanager
def shared_folder(peers: Peers, parent: str | None) -> Iterator[Path]:
    """One folder for all workers, on the disk that is measured."""
    made = tempfile.mkdtemp(prefix="samestep-bench-", dir=parent) if peers.world_rank == 0 else ""
    folder = Path(str(peers.gather(made)()[0]))
    try:
        yield folder
    finally:
        peers.gather("over")()
        if made:
            shutil.rmtree(made, ignore_errors=True)
