"""What a process of the pool can be asked to do."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drive import drive
from observe import Observation
from reference import Reference
from relay import target_of

from samestep import JobSpec, Workload, parse_spec
from samestep.checkpoint.storage import Storage
from samestep.cluster.rendezvous import limit_group
from samestep.engine import survivor
from samestep.engine.attempt import Place, run_attempt
from samestep.engine.ending import Ending
from samestep.engine.peers import Peers
from samestep.errors import AttemptFailedError
from samestep.exact import numerics
from samestep.spec import dump_spec
from samestep.telemetry.link import Target
from samestep.workload import load_workload

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 40


@contextlib.contextmanager
def group_of(
    where: str, world_rank: int, world_size: int, *, form_s: float = TIMEOUT_S
) -> Iterator[dist.ProcessGroup | None]:
    """A gloo group over loopback of its own; None for one worker.

    Args:
        where: a path that nothing lies at.
        world_rank: of this worker.
        world_size: of the group.
        form_s: how long the workers wait for each other while it forms.
    """
    if world_size == 1:
        yield None
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where}",
        rank=world_rank,
        world_size=world_size,
        timeout=timedelta(seconds=form_s),
    )
    limit_group(dist.group.WORLD, TIMEOUT_S)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def prepared(spec: dict[str, Any]) -> tuple[JobSpec, Workload]:
    parsed = parse_spec(spec)
    numerics.pin(parsed)
    return parsed, load_workload(parsed.workload, parsed.args, [FOLDER])


def refer(spec: dict[str, Any], num_steps: int, **_: Any) -> list[Observation]:
    """What the independent reference comes to at each step."""
    return list(Reference(*prepared(spec)).steps(num_steps))


def engine(
    spec: dict[str, Any],
    num_steps: int,
    where: str,
    world_rank: int = 0,
    world_size: int = 1,
    num_devices: int = 1,
    collective: bool = False,
    form_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """What the engine comes to at each step, as one worker of several sees it."""
    with group_of(where, world_rank, world_size, form_s=form_s) as group:
        parsed, workload = prepared(spec)
        return drive(
            parsed,
            workload,
            group,
            num_steps=num_steps,
            num_devices=num_devices,
            collective=collective,
        )


def attempt(
    spec: dict[str, Any],
    run: str,
    where: str,
    world_rank: int = 0,
    world_size: int = 1,
    num_devices: int = 1,
    search: str = str(FOLDER),
) -> dict[str, Any]:
    """One attempt of a run, from its newest checkpoint on, as a launcher would start it.

    Each time the run goes back another one follows.
    """
    parsed = parse_spec(spec)
    planned, groups = Ending.ROLLED_BACK, itertools.count()
    with target_of(run, dump_spec(parsed), f"{where}.s", world_rank, world_size) as target:
        while planned is Ending.ROLLED_BACK:
            group = f"{where}.{next(groups)}"
            planned = _attempted(
                *(parsed, run, target, group, world_rank, world_size, num_devices), search=search
            )
        status = target.call("status")
        return {
            "planned": planned,
            "result": target.call("result"),
            "verdict": target.call("verdict", status["attempt"]),
        }


def attempt_in_a_thread(**arguments: Any) -> dict[str, Any]:
    """The same in a thread of its own, as Ray runs it: threads of operations count by thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(attempt, **arguments).result()


class Stumbling:
    """A recorder that this worker fails over once, when it tells that the run goes back.

    Args:
        target: the recorder.
        when: before or after the recorder has it; empty: never.
    """

    def __init__(self, target: Target, when: str) -> None:
        self.target, self.when = target, when

    def call(self, method: str, *args: Any) -> Any:
        when = self.when if method == "roll_back" else ""
        if when:
            self.when = ""
        if when == "before":
            raise ValueError("failed before the recorder had it")
        answer = self.target.call(method, *args)
        if when == "after":
            raise ValueError("failed after the recorder had it")
        return answer


def broken_attempts(
    spec: dict[str, Any],
    run: str,
    lost: list[int | None],
    where: str,
    world_rank: int,
    world_size: int,
    stumbles: str = "",
) -> dict[str, Any]:
    """Attempts of a run in one group after another, as a supervisor would start them.

    Args:
        spec: of a workload that breaks once for each entry of `lost`.
        run: the run directory.
        lost: after each failure, the worker that has lost all it held.
        where: a path of the task's own.
        world_rank: of this worker.
        world_size: of the group.
        stumbles: see `Stumbling`.
    """
    parsed = parse_spec(spec)
    failed = []
    groups = itertools.count()
    survivor.forget()
    with target_of(run, dump_spec(parsed), f"{where}.s", world_rank, world_size) as recorder:
        target = Stumbling(recorder, stumbles)
        planned = False
        while not planned and len(failed) <= len(lost):
            group = f"{where}.{next(groups)}"
            try:
                ending = _attempted(
                    *(parsed, run, target, group, world_rank, world_size, 1), supervised=True
                )
                planned = ending is not Ending.ROLLED_BACK
            except AttemptFailedError as error:
                if len(failed) < len(lost) and lost[len(failed)] == world_rank:
                    survivor.forget()
                failed.append((error.details["is_final"], str(error)))
        status = target.call("status")
        return {
            "planned": planned,
            "result": target.call("result"),
            "verdict": target.call("verdict", status["attempt"]),
            "redone": status["redone"],
            "failed": failed,
        }


def _attempted(
    spec: JobSpec,
    run: str,
    target: Target,
    where: str,
    world_rank: int,
    world_size: int,
    num_devices: int,
    *,
    supervised: bool = False,
    search: str = str(FOLDER),
) -> Ending:
    with group_of(where, world_rank, world_size) as group:
        place = Place(
            mode="ddp" if world_size > 1 else "local",
            devices=[torch.device("cpu")] * num_devices,
            peers=Peers(group),
            group=group,
            search=[Path(search)],
            run_uri=run,
            target=target,
            supervised=supervised,
        )
        return run_attempt(spec, place)


def forked(
    run: str, called: str, where: str, world_rank: int, world_size: int, **arguments: Any
) -> dict[str, Any]:
    """A fork of a run; see `fork_run`."""
    from samestep.replay.fork import fork_run

    made = fork_run(Storage.at(run), name=called, search=[FOLDER], **arguments)
    return {"run": made.run.uri, "digest": made.digest, "num_taken": made.num_taken}


def talk(messages: list[Any], where: str, world_rank: int, world_size: int) -> list[Any]:
    """Gathers each message, with this worker's rank put to it, from all workers."""
    with group_of(where, world_rank, world_size) as group:
        peers = Peers(group)
        started = [[world_rank, message] for message in messages]
        return [peers.gather(message)() for message in started]


def meet_late(
    form_s: float, late_s: float, limit_s: float, where: str, world_rank: int, world_size: int
) -> list[Any]:
    """What workers tell each other where worker 1 is late each time."""
    mine = torch.full((3,), float(world_rank))
    with group_of(where, world_rank, world_size, form_s=form_s) as group:
        limit_group(group, limit_s)
        peers = Peers(group)

        def be_late() -> None:
            threading.Event().wait(late_s if world_rank == 1 else 0.0)

        be_late()
        heard = peers.gather(world_rank)()
        be_late()
        peers.give(mine, 0) if world_rank == 1 else peers.take(mine, 1)
        be_late()
        peers.spread(again := torch.full((3,), float(world_rank)), 1)
        return [heard, mine.tolist(), again.tolist()]
