"""`train`: one call from a spec to an outcome, in any mode; resumes, attaches, stops as planned."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.checkpoint import shared_memory
from samestep.checkpoint.storage import Storage
from samestep.cluster.budget import BudgetWatch
from samestep.cluster.newest import newest_checkpoint
from samestep.errors import (
    BudgetError,
    ExitStatus,
    RunConflictError,
    RunInUseError,
    SpecError,
    StorageError,
)
from samestep.names import (
    SPEC_FILE,
    Env,
    RunState,
)
from samestep.scratch import sweep
from samestep.spec import RUN_NAME, JobSpec, Mode, differing_fields
from samestep.spec_training import below, source_uri
from samestep.telemetry import lease as leases
from samestep.telemetry.identity import read_result, read_spec
from samestep.telemetry.link import Target
from samestep.telemetry.sinks import SinkPlan, deliver_rest, plan_sinks
from samestep.telemetry.targets import withdraw_all_left

logger = logging.getLogger(__name__)

Observer = Callable[[dict[str, Any]], None]
ATTACH_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: URI of the run directory.
        name: of the run.
        status: done, interrupted, budget_exhausted or failed.
        exit_status: what a command ends with.
        step: steps taken.
        digest: SHA-256 over weights, optimizer state and position of the last checkpoint.
        evaluation: metrics of the last evaluation, if there was one.
        message: why it failed, or was done early; empty otherwise.
        best: the best checkpoint: `step`, `metric` and `score`; None where there is none.
        checkpoint: URI of the newest whole checkpoint, as `samestep.load_weights` takes it; None
            where the run never saved.
    """

    run: str
    name: str
    status: str
    exit_status: ExitStatus
    step: int
    digest: str
    evaluation: dict[str, float] | None
    message: str
    best: dict[str, Any] | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a launcher needs to carry a run out.

    Attributes:
        spec: the job, its mode settled.
        name: of the run.
        run_uri: the run directory.
        search: folders in which the workload's module is looked for.
        no_fallback: mode or workers were asked for, so `auto` must not fall back.
        plan: where else the run is shown.
    """

    spec: JobSpec
    name: str
    run_uri: str
    search: tuple[Path, ...]
    no_fallback: bool
    plan: SinkPlan


def train(
    spec: JobSpec,
    *,
    name: str | None = None,
    search: Sequence[Path] | None = None,
    restart: bool = False,
    no_fallback: bool = False,
    observer: Observer | None = None,
) -> Outcome:
    """Trains a job to its end, or goes on with the run of that name.

    A finished run is extended when the spec asks for more epochs or steps, and returned as it
    is otherwise. While the run is alive elsewhere, this follows it and returns its outcome.

    Args:
        spec: the job.
        name: of the run; default: the spec's, else that of the workload's module.
        search: folders in which the workload's module is looked for; default: the working
            directory.
        restart: set an existing run of this name aside and start over from step 0.
        no_fallback: mode `auto` then means `ddp` and nothing else.
        observer: called about twice a second with the recorder's status, from this thread or
            one of its own.

    Raises:
        InputError: what was given can't be used; nothing was started.
    """
    name = name or spec.name or spec.workload.partition(":")[0].rpartition(".")[2]
    if not RUN_NAME.fullmatch(name):
        raise SpecError(
            f"the run name {name!r} must be letters, digits, '.', '_' and '-', start with a letter "
            "or digit, and have at most 63 characters"
        )
    run = Storage.at(run_uri(spec, name))
    spec = _with_source(spec)
    observer = observer or _nothing
    search = tuple(path.resolve() for path in (search or [Path.cwd()]))
    _refuse_other_job(run, spec, restart)
    present = leases.holder(run)
    if present is not None and present.alive:
        if restart:
            raise RunInUseError(
                f"the run {run.uri} is alive ({present.where}): stop it before it is started over, "
                "or give this one another --name"
            )
        followed = _attach(run, name, observer)
        # One that asks for more steps than the live run's is no follower alone: it extends it.
        if followed is not None and (
            followed.status != RunState.DONE or _finished(run, name, spec) is not None
        ):
            return followed
    if restart and run.list():
        _set_aside(run, name)
    withdraw_all_left(replace(run, root=run.root.rpartition("/")[0]))
    plan = plan_sinks(spec, run.uri, workload_folder=search[0])
    finished = _finished(run, name, spec)
    if finished is not None:
        late = deliver_rest(plan, run.uri, run=name, spec_yaml=run.read(SPEC_FILE).decode())
        for line in late:
            logger.info("run=%s %s", name, line)
        return finished
    spent = BudgetWatch(run, spec.budget).exhausted()
    if spent is not None:
        raise BudgetError(f"run {name} does not go on: {spent}")
    order = Order(
        spec=spec,
        name=name,
        run_uri=run.uri,
        search=search,
        no_fallback=no_fallback,
        plan=plan,
    )
    if spec.mode is Mode.LOCAL:
        from samestep.cluster.local import run_local

        result = run_local(order, observer)
    else:
        from samestep.cluster.environment import prepare_ray

        prepare_ray()
        from samestep.cluster.ray_run import run_on_ray

        result = run_on_ray(order, observer)
    shared_memory.remove(run.uri)
    sweep()
    return _outcome(run, name, result)


def run_uri(spec: JobSpec, name: str) -> str:
    """The run directory; relative storage is taken from the working directory.

    Raises:
        StorageError: relative storage inside a submitted Ray job, whose working directory is
            thrown away.
    """
    storage = spec.storage
    if "://" in storage:
        return below(storage, name)
    if not os.path.isabs(storage) and os.environ.get(Env.RAY_JOB_CONFIG):
        raise StorageError(
            f"storage {storage!r} is relative, and the working directory of a submitted Ray job is "
            "thrown away: set storage to an absolute path that all nodes share, or to s3:// or "
            "gs://"
        )
    return str(Path(storage).resolve() / name)


def _with_source(spec: JobSpec) -> JobSpec:
    """The spec with the place of `init_from` spelled out, for workers elsewhere.

    Raises:
        SpecError: a relative path inside a submitted Ray job, whose working directory is a copy.
    """
    path = spec.init_from.path
    uri = source_uri(spec.init_from, spec.storage)
    if path is None or uri is None:
        return spec
    is_relative = "/" in path and "://" not in path and not os.path.isabs(path)
    if is_relative and os.environ.get(Env.RAY_JOB_CONFIG):
        raise SpecError(
            f"init_from.path {path!r} is relative, and the working directory of a submitted Ray "
            "job is a copy: give the name of a run in storage, an absolute path that all nodes "
            "share, or a URI"
        )
    return spec.model_copy(update={"init_from": spec.init_from.model_copy(update={"path": uri})})


def finish_if_open(target: Target, failure: str | None) -> dict[str, Any]:
    """Ends a run that nobody ended: failed, with the first cause there is.

    Returns:
        The run's result as plain data.
    """
    from samestep.engine.attempt import verdict_outcome

    status = target.call("status")
    result = target.call("result")
    if result is not None:
        return dict(result)
    verdict = verdict_outcome(target.call("verdict", status["attempt"]))
    exit_status, message = verdict or (
        int(ExitStatus.FAILED),
        failure or "the workers ended without a result; see their logs",
    )
    result = {
        "status": str(RunState.FAILED),
        "step": status["step"],
        "digest": "",
        "evaluation": (status["evaluation"] or {}).get("metrics"),
        "exit_status": exit_status,
        "message": message,
    }
    target.call("finish", status["attempt"], result)
    return result


def _outcome(run: Storage, name: str, result: dict[str, Any]) -> Outcome:
    newest = newest_checkpoint(run)
    return Outcome(
        run=run.uri,
        name=name,
        status=str(result["status"]),
        exit_status=ExitStatus(int(result["exit_status"])),
        step=int(result["step"]),
        digest=str(result["digest"]),
        evaluation=result["evaluation"],
        message=str(result["message"]),
        best=result.get("best"),
        checkpoint=newest.uri if newest is not None else None,
    )


def _refuse_other_job(run: Storage, spec: JobSpec, restart: bool) -> None:
    if restart or not run.exists(SPEC_FILE):
        return
    found = differing_fields(read_spec(run), spec)
    if found:
        raise RunConflictError(
            f"the run {run.uri} belongs to another job; in the run against now:\n  "
            + "\n  ".join(found)
            + "\ngive this one another --name, use the job the run was started with, or start "
            "over with --restart"
        )


def _finished(run: Storage, name: str, spec: JobSpec) -> Outcome | None:
    """The outcome of a run that has nothing left to do under this spec."""
    result = read_result(run)
    if result is None or result["status"] != RunState.DONE or not run.exists(SPEC_FILE):
        return None
    before = read_spec(run)
    asked = (spec.epochs, spec.max_steps)
    if asked != (before.epochs, before.max_steps) and not _is_less(spec, before):
        return None
    if result.get("reason") == "early_stop" and (
        spec.early_stop.patience > before.early_stop.patience
    ):
        return None
    return _outcome(run, name, result)


def _is_less(spec: JobSpec, before: JobSpec) -> bool:
    if spec.epochs and before.epochs:
        return spec.epochs <= before.epochs
    if spec.max_steps and before.max_steps:
        return spec.max_steps <= before.max_steps
    return False


def _set_aside(run: Storage, name: str) -> None:
    parent = replace(run, root=run.root.rpartition("/")[0])
    number = 1
    while parent.exists(f"{name}.replaced-{number}"):
        number += 1
    parent.rename(name, f"{name}.replaced-{number}")
    shared_memory.remove(run.uri)
    logger.warning("run=%s started over; the run before is %s.replaced-%d", name, name, number)


def _attach(run: Storage, name: str, observer: Observer) -> Outcome | None:
    """Follows a live run; None when its holder went away without ending it.

    An end that was there before (a driver on its way out after a planned stop) is not waited for
    as the outcome: the run is then resumed.
    """
    from samestep.telemetry.follow import Follower

    seen, changed_at = leases.holder(run), time.monotonic()
    assert seen is not None
    ended_before = read_result(run)
    follower = Follower(run, name)
    follower.say(f"the run is alive ({seen.where}); following it, Ctrl-C leaves it running")
    while True:
        present = leases.holder(run)
        if present != seen:
            seen, changed_at = present, time.monotonic()
        observer(follower.status())
        gone = present is None or not present.alive
        if gone or time.monotonic() - changed_at > leases.STALE_S:
            result = read_result(run)
            if result is None or result == ended_before:
                return None
            return _outcome(run, name, result)
        time.sleep(ATTACH_POLL_S)


def _nothing(_: dict[str, Any]) -> None:
    """The observer of those who don't look."""
