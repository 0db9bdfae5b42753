"""A new run that goes on from a step of another one, with other batches or another job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import restore
from samestep.checkpoint.storage import Storage
from samestep.engine.setup import build
from samestep.errors import InputError, SpecError, StorageError
from samestep.exact import numerics
from samestep.exact.ranges import StepRanges
from samestep.exact.seeds import global_generators_kept
from samestep.incidents.rollback import left_out
from samestep.names import SPEC_FILE, Event
from samestep.replay.inheritance import copy_checkpoint, inherit
from samestep.replay.reached import reached
from samestep.spec import RUN_NAME, JobSpec, changed_spec, differing_fields, dump_spec
from samestep.telemetry.identity import read_spec
from samestep.telemetry.ledger import LedgerWriter, steps
from samestep.telemetry.past import read_past
from samestep.telemetry.records import INHERITED, EventRecord
from samestep.telemetry.tracking_file import read_tracked
from samestep.workload import load_workload

COUNTED_IN: Final = ("batch_size", "shards", "drop_last")
"""What a position in the data is counted in: it can't change on the way."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A run that was made from another one; nothing is trained yet.

    Attributes:
        run: its directory.
        name: of it.
        spec: its job.
        parent: the run directory it comes from.
        step: steps taken over.
        digest: of the state it starts from; None: it starts at step 0.
        num_taken: steps that were taken again to reach that state.
        numerics: lines telling how the numerics here differ from the parent's, if steps were taken.
        changes: lines telling in which fields its job differs from the parent's.
    """

    run: Storage
    name: str
    spec: JobSpec
    parent: str
    step: int
    digest: str | None
    num_taken: int
    numerics: tuple[str, ...]
    changes: tuple[str, ...]


def fork_run(
    run: Storage,
    *,
    step: int,
    name: str,
    skip: Sequence[tuple[int, int]] = (),
    overrides: Mapping[str, object] | None = None,
    search: Sequence[Path] = (),
) -> Fork:
    """Makes a run directory beside another that goes on from it after `step` steps.

    It holds the other run's steps before that, and its state there: from a checkpoint, or reached
    again by taking steps from an older one.

    Args:
        run: the run directory to start from; only read.
        step: steps to take over.
        name: of the new run.
        skip: ranges of later steps, each as (first, one past the last), to leave out.
        overrides: fields of the job to change, by dotted path.
        search: folders in which the workload's module is looked for.

    Raises:
        InputError: it can't be done; nothing is left behind.
        DivergenceError: steps taken again were not those of the ledger.
    """
    before, target = read_spec(run), _target(run, name)
    num_steps = len(steps(run))
    if not 0 <= step <= num_steps:
        raise InputError(
            f"{run.uri} has taken {num_steps} steps: give --at a number from 0 to {num_steps}, got "
            f"{step}"
        )
    kept = left_out(before.incidents.leave_out, read_past(run).rollbacks)
    parent = changed_spec(before, {"incidents.leave_out": kept.to_json()})
    spec = _changed(parent, overrides or {}, _skipped(kept, skip, step), name)
    try:
        inherit(run, target, step, name=name)
        digest, num_taken, apart = None, 0, tuple[str, ...]()
        if step:
            with reached(run, parent, step, search=search) as found:
                if differing_fields(parent, _without_skips(spec, parent)):
                    _require_fit(spec, found.place, step, search)
                digest = copy_checkpoint(found.place, target, step)
                num_taken, apart = found.num_taken, found.numerics
        told = {"parent": run.uri, "digest": digest, "skip": [list(pair) for pair in skip]}
        told["parent_run_id"] = _run_id_in_mlflow(run)
        _enter(target, name, step, {**told, "set": dict(overrides or {})})
        # The last: without a job the folder is no run.
        target.write(SPEC_FILE, dump_spec(spec).encode())
    except BaseException:
        target.delete("")
        raise
    return Fork(
        run=target,
        name=name,
        spec=spec,
        parent=run.uri,
        step=step,
        digest=digest,
        num_taken=num_taken,
        numerics=apart,
        changes=tuple(differing_fields(before, spec)),
    )


def _run_id_in_mlflow(run: Storage) -> str | None:
    """Where the run is tracked, its id there: a link for people, for which no fork is refused."""
    try:
        tracked = read_tracked(run)
    except StorageError:
        return None
    return tracked.run_id if tracked is not None else None


def _target(run: Storage, name: str) -> Storage:
    if not RUN_NAME.fullmatch(name):
        raise SpecError(
            f"the run name {name!r} must be letters, digits, '.', '_' and '-', start with a letter "
            "or digit, and have at most 63 characters"
        )
    target = replace(run, root=run.root.rpartition("/")[0]).child(name)
    if target.list():
        raise InputError(f"{target.uri} exists already: give the fork another --name")
    return target


def _skipped(kept: StepRanges, skip: Sequence[tuple[int, int]], step: int) -> list[list[int]]:
    for first, end in skip:
        if not step <= first < end:
            raise InputError(
                f"--skip-steps {first}:{end} must be A:B with {step} <= A < B: the steps before "
                f"{step} are taken already"
            )
    return StepRanges.of([*kept.pairs, *skip]).to_json()


def _changed(
    parent: JobSpec, overrides: Mapping[str, object], leave_out: list[list[int]], name: str
) -> JobSpec:
    if "incidents.leave_out" in overrides:
        raise InputError("which steps a fork leaves out is told by --skip-steps A:B, not by --set")
    changes: dict[str, object] = {**overrides, "incidents.leave_out": leave_out}
    if parent.name is not None:
        changes["name"] = name
    spec = changed_spec(parent, changes)
    for path in COUNTED_IN:
        here, there = getattr(parent, path), getattr(spec, path)
        if here != there:
            raise InputError(
                f"{path} can't become {there!r} in a fork: the steps before it, and so the "
                f"position in the data, are counted in steps with {path} {here!r}. Start a new run "
                "with init_from instead"
            )
    return spec


def _without_skips(spec: JobSpec, parent: JobSpec) -> JobSpec:
    told = [list(pair) for pair in parent.incidents.leave_out]
    return changed_spec(spec, {"incidents.leave_out": told})


def _require_fit(spec: JobSpec, place: Storage, step: int, search: Sequence[Path]) -> None:
    """Puts the state into what the changed job builds, to see whether it can.

    Raises:
        CheckpointError: it can't; names what does not fit.
        WorkloadError: the workload can't be loaded here.
    """
    state, _ = load_checkpoint(place, step)
    device = torch.device("cpu")
    with numerics.GlobalsKept(), global_generators_kept():
        numerics.pin(spec)
        built = build(spec, load_workload(spec.workload, spec.args, list(search)), device)
        restore(state, built.parts)
    if state.extras["dataset_size"] != built.dataset_size:
        raise InputError(
            f"the changed job has {built.dataset_size} training samples, the state after {step} "
            f"steps was made with {state.extras['dataset_size']}: the position in the data would "
            "mean nothing. Start a new run with init_from instead"
        )


def _enter(target: Storage, name: str, step: int, fields: Mapping[str, Any]) -> None:
    event = EventRecord(
        event=Event.FORKED, step=step, attempt=INHERITED, time=time.time(), fields=fields
    )
    LedgerWriter(target, run_name=name).append([event.to_json()])
