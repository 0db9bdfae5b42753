"""Builds a workload's parts in one process, each under a random stream of its own."""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from samestep.checkpoint.state import Parts
from samestep.checkpoint.storage import Storage
from samestep.engine import compiled
from samestep.engine.appraisal import require_metrics
from samestep.engine.buffers import BufferKeeper
from samestep.engine.ema import start_averages
from samestep.engine.evaluate import Evaluation
from samestep.engine.feed import require_map_style
from samestep.engine.peers import Peers
from samestep.engine.schedule import checked_schedule
from samestep.engine.shard import in_user_code, refuse_inexact
from samestep.engine.step import Replica
from samestep.engine.update import make_scaler
from samestep.errors import StorageError, WorkloadError
from samestep.exact.order import EpochOrder, Order
from samestep.exact.seeds import Purpose, seed_everything
from samestep.exact.tree import shard_range
from samestep.spec import JobSpec
from samestep.workload import Schedule, Workload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a workload gave, ready to train or to restore a state into.

    Attributes:
        dataset: the training data, of `dataset_size` samples.
        custom_order: the workload gives its own order.
        schedule: of the learning rate, with what it is stepped by.
        end_step: number of steps of the whole run.
        put_to_training: modules that `model()` returned in eval mode.
    """

    workload: Workload
    parts: Parts
    dataset: Dataset[Any]
    dataset_size: int
    custom_order: bool
    order: Order
    feed_order: Order
    evaluation: Evaluation | None
    schedule: Schedule | None
    end_step: int
    put_to_training: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Acting:
    """What acts on the state of a run, ready to restore a state into.

    Attributes:
        schedule: of the learning rate, with what it is stepped by.
        evaluation: None where there is none, or where it was not asked for.
        put_to_training: modules that `model()` returned in eval mode.
    """

    parts: Parts
    schedule: Schedule | None
    evaluation: Evaluation | None
    put_to_training: tuple[str, ...]


def build(spec: JobSpec, workload: Workload, device: torch.device) -> Built:
    """Calls the workload's methods and checks what they return.

    Raises:
        UserCodeError: one of them raised.
        WorkloadError: one of them returned something unusable.
        NotExactError: the model or the optimizer can't keep the bits.
    """
    making = _Making(spec, workload, device)
    model, in_eval_mode = making.model()
    dataset = making.call(1, "data()", workload.data)
    dataset_size = require_map_style(dataset, "data()")
    custom_order = type(workload).order is not Workload.order
    make_order = partial(
        Order,
        dataset_size=dataset_size,
        batch_size=spec.batch_size,
        shards=spec.shards,
        drop_last=spec.drop_last,
        seed=spec.seed,
        epoch_order=_told_order(workload) if custom_order else None,
    )
    order = make_order()
    acting = making.acting(model, in_eval_mode, evaluates=True)
    return Built(
        workload=workload,
        parts=acting.parts,
        dataset=dataset,
        dataset_size=dataset_size,
        custom_order=custom_order,
        order=order,
        feed_order=make_order(),
        evaluation=acting.evaluation,
        schedule=acting.schedule,
        end_step=spec.max_steps or (spec.epochs or 0) * order.steps_per_epoch,
        put_to_training=acting.put_to_training,
    )


def build_acting(spec: JobSpec, workload: Workload, device: torch.device) -> Acting:
    """As `build`, where no data is at hand: neither data() nor evaluation_data() is called.

    The random streams are the same, so what is made is too.

    Raises:
        UserCodeError: a method raised (as one may that needs what data() leaves behind).
        WorkloadError: one of them returned something unusable.
        NotExactError: the model or the optimizer can't keep the bits.
    """
    making = _Making(spec, workload, device)
    return making.acting(*making.model(), evaluates=False)


class _Making:
    """Makes the parts one after another, each under a random stream of its own."""

    def __init__(self, spec: JobSpec, workload: Workload, device: torch.device) -> None:
        self._spec, self._workload, self._device = spec, workload, device

    def call(self, number: int, method: str, function: Callable[[], T]) -> T:
        seed_everything(self._spec.seed, Purpose.INIT, number, device=self._device)
        return in_user_code(function, f"{type(self._workload).__name__}.{method}")

    def model(self) -> tuple[nn.Module, tuple[str, ...]]:
        """The model, and the names of its modules that came in eval mode."""
        model = self.call(0, "model()", self._workload.model)
        _require(model, nn.Module, "model()")
        # Whatever mode it comes in (pretrained ones come in eval mode), as every replica must be.
        model = compiled.unwrap(model)
        _refuse_lazy(model)
        model = model.to(self._device)
        in_eval_mode = tuple(name for name, module in model.named_modules() if not module.training)
        model.train()
        return model, in_eval_mode

    def acting(self, model: nn.Module, in_eval_mode: tuple[str, ...], *, evaluates: bool) -> Acting:
        spec, workload = self._spec, self._workload
        _refuse_nothing_to_train(model)
        optimizer = self.call(2, "optimizer()", lambda: workload.optimizer(model))
        _require(optimizer, Optimizer, "optimizer()")
        refuse_inexact(model, optimizer)
        compiled.refuse_dynamic(model)
        scheduler = self.call(3, "scheduler()", lambda: workload.scheduler(optimizer))
        data = self.call(4, "evaluation_data()", workload.evaluation_data) if evaluates else None
        has_evaluation = data is not None or not evaluates
        schedule = checked_schedule(spec, scheduler, has_evaluation=has_evaluation)
        ema = start_averages(model) if spec.ema.decay is not None else None
        evaluation = None
        if data is not None:
            evaluation = Evaluation(spec, workload, data, ema=ema)
        elif evaluates:
            require_metrics(spec, schedule, None)
        parts = Parts(
            model=model,
            optimizer=optimizer,
            scheduler=schedule.scheduler if schedule is not None else None,
            scaler=make_scaler(spec, self._device),
            ema=ema,
        )
        return Acting(
            parts=parts, schedule=schedule, evaluation=evaluation, put_to_training=in_eval_mode
        )


def make_replicas(
    spec: JobSpec, built: Built, devices: list[torch.device], peers: Peers
) -> list[Replica]:
    """One replica per device; the first holds the model that is trained."""
    if len(devices) > 1:
        ranges = [shard_range(spec.shards, len(devices), place) for place in range(len(devices))]
    else:
        ranges = [shard_range(spec.shards, peers.world_size, peers.world_rank)]
    replicas: list[Replica] = []
    for device, shards in zip(devices, ranges, strict=True):
        model = built.parts.model
        if replicas:
            model = copy.deepcopy(model).to(device)
            compiled.compile_alike(model, built.parts.model, num_copies=len(devices))
        replicas.append(
            Replica(
                device=device,
                model=model,
                shards=shards,
                loss_of=partial(built.workload.loss, model),
                keeper=BufferKeeper(model),
            )
        )
    return [replica for replica in replicas if len(replica.shards)]


def before_step(spec: JobSpec, workload: Workload, replicas: list[Replica], step: int) -> None:
    """Calls the workload's `before_step` on every replica's model, each with the same draws.

    Raises:
        UserCodeError: it raised.
    """
    for replica in replicas:
        seed_everything(spec.seed, Purpose.BEFORE_STEP, step, device=replica.device)
        in_user_code(
            lambda model=replica.model: workload.before_step(model, step),  # type: ignore[misc]
            f"before_step of step {step}",
        )


def turns_of(replicas: list[Replica]) -> list[int]:
    """The shards of a process in the order in which a step computes them."""
    rounds = max(len(replica.shards) for replica in replicas)
    return [
        replica.shards[turn]
        for turn in range(rounds)
        for replica in replicas
        if turn < len(replica.shards)
    ]


def require_shared_storage(run: Storage, peers: Peers) -> None:
    """Each worker writes a probe that every other must see.

    Raises:
        StorageError: names the worker whose probe is not seen, and by whom.
    """
    if peers.world_size == 1:
        return
    token = str(peers.gather(uuid.uuid4().hex)()[0])
    host = os.uname().nodename
    failure = ""
    try:
        run.write(f"probes/{token}-{peers.world_rank}", host.encode())
    except StorageError as error:
        failure = str(error)
    failures = peers.gather(failure)()
    seen = set(run.list("probes")) if not failure else set()
    missing = [
        rank for rank in range(peers.world_size) if f"{token}-{rank}" not in seen and not failure
    ]
    blind = peers.gather(missing)()
    if peers.world_rank == 0 and not failure:
        run.delete("probes")
    for rank, text in enumerate(failures):
        if text:
            raise StorageError(f"worker {rank} can't write the run directory: {text}")
    for rank, ranks in enumerate(blind):
        if ranks:
            raise StorageError(
                f"worker {rank} on {host if rank == peers.world_rank else 'its node'} does not "
                f"see what worker {ranks[0]} wrote to {run.uri}: storage must be a file system "
                "that all nodes share (NFS, s3://, gs://); set storage: in the job file"
            )


def _told_order(workload: Workload) -> EpochOrder:
    def order(epoch: int, stream: torch.Generator) -> Sequence[int] | Tensor | None:
        what = f"{type(workload).__name__}.order({epoch})"
        return in_user_code(lambda: workload.order(epoch, stream), what)

    return order


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if is_lazy(tensor)
    ]
    if lazy:
        raise WorkloadError(
            f"{', '.join(lazy)} of {type(model).__name__} have no shape yet (lazy modules get "
            "theirs from the first batch, after the optimizer was made): give the sizes, or run a "
            "batch through the model in model()"
        )


def _refuse_nothing_to_train(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    found = f"all are frozen: {', '.join(names[:10])}" if names else "it has none"
    raise WorkloadError(
        f"model {type(model).__name__} has no parameter that requires a gradient ({found}"
        f"{', ...' if len(names) > 10 else ''}), so there is nothing to train: unfreeze one in "
        "model(), or call the workload's evaluate on the model without training it"
    )


def _require(value: object, kind: type, method: str) -> None:
    if not isinstance(value, kind):
        raise WorkloadError(f"{method} must return a {kind.__name__}, got {type(value).__name__}")
