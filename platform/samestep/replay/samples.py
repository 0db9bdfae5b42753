"""Which samples a step took: computed anew from the job, and checked against the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.checkpoint.storage import Storage
from samestep.engine.setup import build
from samestep.errors import DivergenceError, InputError, StorageError
from samestep.exact.digest import ids_digest
from samestep.exact.order import Order
from samestep.exact.seeds import global_generators_kept
from samestep.names import Event
from samestep.spec import JobSpec
from samestep.telemetry.identity import read_spec
from samestep.telemetry.ledger import events, steps
from samestep.workload import load_workload


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The samples of one step.

    Attributes:
        step: counted from 0 over the run.
        epoch: the epoch it belongs to.
        shards: indices into the dataset, by shard; the last shards may be empty.
        digest: of `shards`; the ledger's is the same.
    """

    step: int
    epoch: int
    shards: list[list[int]]
    digest: str


def samples_of_step(run: Storage, step: int, *, search: Sequence[Path] = ()) -> StepSamples:
    """The sample ids of a step that a run took.

    Args:
        run: the run directory.
        step: counted from 0.
        search: folders in which the workload is looked for, where it gives an order of its own
            (else it is not loaded); default: those of the run's last attempt, then the working
            directory.

    Raises:
        InputError: the run did not take this step.
        WorkloadError: the workload's own order is needed, and it can't be loaded.
        DivergenceError: what was computed is not what the ledger holds.
    """
    spec = read_spec(run)
    recorded = steps(run)
    if step not in recorded:
        held = f"steps {min(recorded)} to {max(recorded)}" if recorded else "no step yet"
        raise InputError(f"{run.uri} has no step {step}; it holds {held}")
    ids = _order(run, spec, search).step_ids(step)
    digest = ids_digest(ids)
    if digest != recorded[step].ids:
        raise DivergenceError(
            f"the sample ids of step {step} computed now have the digest {digest}, the ledger of "
            f"{run.uri} has {recorded[step].ids}: the workload's order, or the size of its data, "
            "is not what it was"
        )
    return StepSamples(step=step, epoch=recorded[step].epoch, shards=ids, digest=digest)


def _order(run: Storage, spec: JobSpec, search: Sequence[Path]) -> Order:
    started = events(run, Event.ATTEMPT_STARTED)
    fields = started[-1].fields if started else {}
    if "dataset_size" not in fields:
        raise StorageError(f"the ledger of {run.uri} does not tell the size of the training data")
    if fields.get("custom_order", False):
        recorded = [Path(folder) for folder in fields.get("search", [])]
        folders = list(search) or [*recorded, Path.cwd()]
        workload = load_workload(spec.workload, spec.args, folders)
        with global_generators_kept():
            # As training does: an order may depend on what the other methods set up.
            return build(spec, workload, torch.device("cpu")).order
    return Order(
        dataset_size=int(fields["dataset_size"]),
        batch_size=spec.batch_size,
        shards=spec.shards,
        drop_last=spec.drop_last,
        seed=spec.seed,
    )
