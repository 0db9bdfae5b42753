"""Mode ddp: Ray Train's TorchTrainer sets up the worker group; our engine runs in it."""

from __future__ import annotations

import gc
import logging
import uuid
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from samestep.cluster.folders import Desk, Folders, at_desk
from samestep.cluster.placement import worker_resources
from samestep.cluster.ray_private import ExactTorchTrainer
from samestep.spec import JobSpec, dump_spec, parse_spec

if TYPE_CHECKING:
    from samestep.cluster.actors import RayTarget
    from samestep.cluster.launch import Order
    from samestep.cluster.session import Session

logger = logging.getLogger(__name__)


def fit(order: Order, session: Session, target: RayTarget) -> str | None:
    """Trains with a group of workers; blocks until it ends.

    Returns:
        What Ray Train says went wrong, or None.
    """
    spec = order.spec
    workers = spec.workers
    # Typed as of Ray Train's first version, which knew no (min, max).
    num_workers: Any = workers.min if workers.min == workers.max else (workers.min, workers.max)
    trainer = ExactTorchTrainer(
        train_worker,
        train_loop_config={
            "spec": dump_spec(spec),
            "run_uri": order.run_uri,
            "folders": Folders.of_command(order.search, is_copied=session.is_copied),
            "target": target,
            "tracked": order.plan.tracking_uri is not None,
        },
        torch_config=TorchConfig(
            backend="nccl" if spec.resources.gpu else "gloo",
            timeout_s=int(max(1, spec.faults.hang_timeout_s)),
        ),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=bool(spec.resources.gpu),
            resources_per_worker=worker_resources(spec),
        ),
        run_config=RunConfig(
            # A name of its own each time: Ray's bookkeeping must never decide where we resume.
            name=f"fit-{uuid.uuid4().hex[:8]}",
            storage_path=f"{order.run_uri}/ray",
            failure_config=FailureConfig(max_failures=spec.faults.retries.infrastructure),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        return f"{type(error).__name__}: {error}"
    return None if result.error is None else str(result.error)


def train_worker(config: dict[str, Any]) -> None:
    """What each worker of the group runs."""
    import torch.distributed as dist

    from samestep.cluster.debugger import refuse_breakpoints

    refuse_breakpoints("this is one of several workers")
    with at_desk(config, world_rank=dist.get_rank(), world_size=dist.get_world_size()) as desk:
        as_planned = _attempt(config, desk)
    if not as_planned:
        # Lets the others go, who wait for this worker: its sockets must close, so nothing that a
        # user's exception still holds in a cycle may keep them.
        gc.collect()
        dist.destroy_process_group()


def _attempt(config: dict[str, Any], desk: Desk) -> bool:
    import torch
    import torch.distributed as dist
    import yaml

    from samestep.engine.attempt import Place, run_attempt
    from samestep.engine.peers import Peers
    from samestep.telemetry.mlflow_model import model_keeper

    spec: JobSpec = parse_spec(yaml.safe_load(config["spec"]))
    # A gloo group of our own with a timeout of its own: new_group ignores the one given to init.
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.faults.hang_timeout_s))
    device = ray.train.torch.get_device() if spec.resources.gpu else torch.device("cpu")
    place = Place(
        mode="ddp",
        devices=[device],
        peers=Peers(control if dist.get_world_size() > 1 else None),
        group=dist.group.WORLD if spec.resources.gpu else control,
        search=desk.search,
        files=desk.files,
        run_uri=config["run_uri"],
        target=config["target"],
        on_finished=(
            model_keeper(config["run_uri"], partial(config["target"].call, "say"))
            if config["tracked"]
            else None
        ),
    )
    return run_attempt(spec, place)
