"""Mode ddp: Ray Train's TorchTrainer sets up the worker group; our engine runs in it."""

from __future__ import annotations

import gc
import logging
import uuid
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.train import RunConfig, ScalingConfig

from samestep.cluster import process
from samestep.cluster.folders import Desk, Folders, at_desk
from samestep.cluster.placement import worker_resources
from samestep.cluster.ray_private import ElasticTorchTrainer
from samestep.cluster.ray_private_control import Plan
from samestep.cluster.ray_private_group import MeetingConfig
from samestep.cluster.rehearsal import Part
from samestep.cluster.rendezvous import FORM_S, formed_group, limit_group, set_environment
from samestep.cluster.sockets import open_sockets, silence_ends
from samestep.errors import AttemptFailedError, PeerLostError, SamestepError
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.spec_incidents import ROLLBACK
from samestep.spec_training import below

if TYPE_CHECKING:
    import torch.distributed as dist

    from samestep.cluster.actors import RayTarget
    from samestep.cluster.launch import Order
    from samestep.cluster.session import Session

PARKED_S = 60.0
"""How long a parked worker waits for its group to be taken apart."""

PEER_MARGIN_S = 5.0
"""Whoever waits for a worker that hangs waits longer than that worker's own watchdog."""

logger = logging.getLogger(__name__)


def fit(order: Order, session: Session, target: RayTarget) -> str | None:
    """Trains with a group of workers; blocks until it ends.

    Returns:
        What Ray Train says went wrong, or None.
    """
    spec = order.spec
    resources = worker_resources(spec)
    folders = Folders.of_command(order.search, is_copied=session.is_copied)
    text = dump_spec(spec)
    part = Part(spec=text, run_uri=order.run_uri, folders=folders, target=target)
    trainer = ElasticTorchTrainer(
        train_worker,
        plan=Plan(spec=spec, resources=resources, part=part, is_local=session.is_local),
        train_loop_config={
            "spec": text,
            "run_uri": order.run_uri,
            "folders": folders,
            "target": target,
            "tracked": order.plan.tracking_uri is not None,
        },
        torch_config=MeetingConfig(),
        scaling_config=ScalingConfig(
            num_workers=spec.workers.max,
            use_gpu=bool(spec.resources.gpu),
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            # A name of its own each time: Ray's bookkeeping must never decide where we resume.
            name=f"fit-{uuid.uuid4().hex[:8]}",
            storage_path=below(order.run_uri, "ray"),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        return f"{type(error).__name__}: {error}"
    return None if result.error is None else str(result.error)


def train_worker(config: dict[str, Any]) -> None:
    """What each worker of the group runs.

    Raises:
        AttemptFailedError: the attempt failed; the supervisor decides what becomes of the run.
    """
    from samestep.cluster.debugger import refuse_breakpoints

    refuse_breakpoints("this is one of several workers")
    failure = _worked(config)
    if failure is None:
        return
    process.here.note_failure()
    if not failure.details["is_echo"]:
        # Lets the others go, who wait for this worker: its sockets must close, so nothing that a
        # user's exception still holds in a cycle may keep them.
        gc.collect()
    raise failure


def _worked(config: dict[str, Any]) -> AttemptFailedError | None:
    """Takes part in an attempt; every frame that holds the process group is gone afterwards."""
    spec: JobSpec = _spec_of(config)
    context = ray.train.get_context()
    set_environment(context)
    world_rank, world_size = context.get_world_rank(), context.get_world_size()
    try:
        with (
            formed_group(
                "nccl" if spec.resources.gpu else "gloo",
                world_rank=world_rank,
                world_size=world_size,
                timeout_s=spec.faults.hang_timeout_s + PEER_MARGIN_S,
            ) as group,
            at_desk(config, world_rank=world_rank, world_size=world_size) as desk,
        ):
            return _attempt(config, spec, desk, group)
    except SamestepError as error:
        return _failed(error, world_rank, world_size)


def _attempt(
    config: dict[str, Any], spec: JobSpec, desk: Desk, group: dist.ProcessGroup
) -> AttemptFailedError | None:
    import torch

    from samestep.engine.attempt import Place, run_attempt
    from samestep.engine.ending import Ending
    from samestep.engine.peers import Peers
    from samestep.telemetry.mlflow_model import model_keeper

    others = open_sockets()
    control = _control_group(spec, group)
    device = ray.train.torch.get_device() if spec.resources.gpu else torch.device("cpu")
    place = Place(
        mode="ddp",
        devices=[device],
        peers=Peers(control if group.size() > 1 else None),
        group=group if spec.resources.gpu else control,
        search=desk.search,
        files=desk.files,
        run_uri=config["run_uri"],
        target=config["target"],
        supervised=True,
        wants=process.here.wants,
        on_step=process.here.note_step,
        on_failure=process.here.note_telling,
        on_finished=(
            model_keeper(config["run_uri"], partial(config["target"].call, "say"))
            if config["tracked"]
            else None
        ),
    )
    try:
        with silence_ends(but=others):
            ending = run_attempt(spec, place)
    except AttemptFailedError as error:
        return AttemptFailedError(str(error), error.details)
    waits = ending in (Ending.PARKED, Ending.ROLLED_BACK)
    why = ROLLBACK if ending is Ending.ROLLED_BACK else ""
    if waits and not process.here.park(PARKED_S, why=why):
        return _failed(
            PeerLostError(f"parked, but the group was not taken apart within {PARKED_S:g} s"),
            group.rank(),
            group.size(),
        )
    return None


def _control_group(spec: JobSpec, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group for messages between the workers, on the CPU."""
    import torch.distributed as dist

    if not spec.resources.gpu and spec.reduction == "exact":
        return group
    # Stock DDP's collectives, and NCCL's, stay apart from the messages.
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=FORM_S))
    limit_group(control, spec.faults.hang_timeout_s + PEER_MARGIN_S)
    return control


def _failed(error: SamestepError, world_rank: int, world_size: int) -> AttemptFailedError:
    """Of a worker whose attempt has not begun, or is over."""
    from samestep.engine.failure import Failure

    there = process.here.whereabouts()
    return Failure.of(
        error,
        step=there.step,
        attempt=there.attempt,
        world_rank=world_rank,
        world_size=world_size,
    ).to_error()


def _spec_of(config: dict[str, Any]) -> JobSpec:
    import yaml

    return parse_spec(yaml.safe_load(config["spec"]))
