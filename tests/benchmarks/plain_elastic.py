"""A plain DDP loop that can be killed and started again: under torchrun, or under Ray Train.

    torchrun ... plain_elastic.py MODEL FOLDER STEPS
    python plain_elastic.py MODEL FOLDER STEPS --ray

Worker 0 saves model and optimizer every few steps, and every worker appends a line to a log after
each step; what is started again goes on from what was saved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from plain import PlainDdp

SAVE_EVERY = 10
LOG = "steps.jsonl"


def train(name: str, folder: Path, num_steps: int) -> None:
    """Trains in the process group that there is."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MODELS[name]
    spec = model.spec(shards=world_size, workers=world_size)
    workload = model.workload(spec)
    torch.manual_seed(0)
    net = workload.model()
    optimizer = workload.optimizer(net)
    plain = PlainDdp(net, model.plain_loss, optimizer, None, clip_norm=spec.clip_norm)
    data = workload.data()
    size = model.shard_size
    batch = workload.collate([data[rank * size + index] for index in range(size)])
    saved = folder / "saved.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < num_steps:
        plain.step([batch])
        step += 1
        line = {"step": step, "rank": rank, "pid": os.getpid(), "time": time.time()}
        with (folder / LOG).open("a") as log:
            log.write(json.dumps(line) + "\n")
        if rank == 0 and step % SAVE_EVERY == 0:
            fresh = folder / "fresh.pt"
            parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step}, fresh)
            fresh.replace(saved)


def train_with_ray(name: str, folder: Path, num_steps: int, workers: int) -> None:
    """Trains by Ray Train as it comes, with as many retries as it takes."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    here = str(Path(__file__).resolve().parent)

    def work(_: dict[str, Any]) -> None:
        sys.path.insert(0, here)
        from plain_elastic import train as train_here

        train_here(name, folder, num_steps)

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        work,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()
    ray.shutdown()


def main() -> None:
    name, folder, num_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if "--ray" in sys.argv:
        train_with_ray(name, folder, num_steps, workers=2)
        return
    dist.init_process_group("gloo")
    train(name, folder, num_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
