"""What it costs to watch for incidents: each step judged and recorded, or some of them audited.

The contenders share one engine, so that nothing but the watching differs, and take turns by blocks
of steps: the link delivers behind the training, now and then, and what that takes must fall into
the steps that are recorded. The recorder has a process of its own, as under Ray.

Blocks differ by more than what is asked for, so the watching is put under a stopwatch as well: what
it takes of a step in line, and what its thread and the recorder's process take of the cores beside.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contenders import CPU, Batches, Contender, Samestep, Step
from models import MODELS
from rounds import alternate
from saves import begun, shared_folder

from samestep.checkpoint.storage import Storage
from samestep.engine.detection import Detection
from samestep.engine.peers import Peers
from samestep.engine.recording import Recording, step_record, step_timing, values_of
from samestep.engine.step import Reduced
from samestep.exact import numerics
from samestep.exact.ranges import NONE
from samestep.incidents.record import Incident
from samestep.names import THREAD_LINK
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.link import Link, Target
from samestep.telemetry.timesheet import Timesheet

# The recorder that several processes share in the tests serves here as well.
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "engine"))

from relay import target_of

BLOCK_STEPS = 10
INTERVAL_S = 0.5
"""Of the link: half of its usual one, so that most of a block's records go out within the block."""
SERVE_S = 900.0
CLOSE_S = 10.0
BARE = "neither"
WATCHED = "detectors and recording"
AUDITED = f"an audit every {BLOCK_STEPS} steps"

Task = dict[str, Any]


def watching(task: Task) -> dict[str, Any]:
    """Step times by what is done beside them, the mean of a block per round; as `alternate`.

    `watching_s` has what the watching takes of a step by its own clocks: `in_line` and `beside`.
    """
    with training_of(task) as training:
        watched = training.watched
        contenders = [
            Contender(name=BARE, step=_blocks(training.exact.step), model=None),
            Contender(
                name=WATCHED,
                step=_blocks(watched.step),
                model=None,
                settle=watched.settle,
            ),
            Contender(name=AUDITED, step=_blocks(_audited(training.exact)), model=None),
        ]
        found = alternate(contenders, task["rounds"], warm_up=1)
        costs_s = watched.costs_s
    times = {kind: {name: _per_step(of[name]) for name in of} for kind, of in found.items()}
    return {**times, "watching_s": costs_s}


class Watched:
    """Takes steps of an engine as the training loop does: judged, and recorded by worker 0.

    Attributes:
        keep: told each incident, in worker 0, and the records that may not be in the ledger.
    """

    def __init__(
        self, exact: Samestep, peers: Peers, target: Target, recorder_pid: int | None
    ) -> None:
        attempt, is_first = begun(target, peers), peers.world_rank == 0
        self._exact, self._peers = exact, peers
        self._link = Link(target, attempt, "0", interval_s=INTERVAL_S) if is_first else None
        self._recording = Recording(self._link, attempt)
        self._timesheet = Timesheet()
        self._recorder_pid = recorder_pid
        self._num_steps, self._in_line_s, self._beside_s = 0, 0.0, 0.0
        self._began_s: float | None = None
        self.keep: Callable[[Incident, Sequence[Any]], None] = lambda incident, records: None
        self.detection = Detection(
            exact.spec,
            state=None,
            left_out=NONE,
            num_rollbacks=0,
            target=target,
            attempt=attempt,
            tells=is_first,
        )

    def step(self, number: int, loss: float | None = None) -> None:
        """Takes the step of a number; each follows the one before.

        Args:
            number: of the step.
            loss: what the detectors are told instead of its own.
        """
        if self._began_s is None:
            self._began_s = self._cores_s()
        exact, began_s, waited_s = self._exact, time.perf_counter(), self._peers.wait_s
        plans = exact.plans(number)
        reduced = exact.compute(number, plans, self._recording.delivered)
        told = reduced if loss is None else replace(reduced, loss=loss)
        judged = partial(self._judged, number, told)
        updated = exact.update(number, reduced, leaves_out=judged)
        updated_s = time.perf_counter()
        values = values_of(number, plans[0].epoch, reduced, updated)
        self._recording.note_delivered(reduced.delivered)
        self._recording.require_current()
        waited_s = reduced.traffic.wait_s + self._peers.wait_s - waited_s
        lap = self._timesheet.lap(waited_s=waited_s)
        timing = step_timing(reduced, lap, began_s=began_s, data_wait_s=0.0)
        ids = [list(plan.ids) for plan in plans]
        self._recording.step(
            step_record(values, ids=ids, reduced=reduced, digest=None, timing=timing)
        )
        model = exact.built.parts.model
        self.detection.look_at_weights(model, number, lambda incident: None)
        self._in_line_s += time.perf_counter() - updated_s
        self._num_steps += 1

    def settle(self) -> None:
        """Waits until all is in the ledger."""
        if self._link is not None:
            self._link.flush()
        if self._began_s is not None:
            self._beside_s += self._cores_s() - self._began_s
            self._began_s = None

    @property
    def costs_s(self) -> dict[str, float]:
        """Seconds of a step that the watching took so far: of its own, and on cores beside it."""
        return {
            "in_line": self._in_line_s / self._num_steps,
            "beside": self._beside_s / self._num_steps,
        }

    def close(self) -> None:
        """Ends the link."""
        if self._link is not None:
            self._link.close()

    def _judged(self, number: int, told: Reduced, grad_norm: float, overflow: bool) -> bool:
        began_s = time.perf_counter()
        leaves_out = self.detection.leaves_out(number, told, self._keep, grad_norm, overflow)
        self._in_line_s += time.perf_counter() - began_s
        return leaves_out

    def _cores_s(self) -> float:
        """What the link's thread and the recorder have taken of the cores, in worker 0."""
        if self._recorder_pid is None:
            return 0.0
        threads = [t.native_id for t in threading.enumerate() if t.name == THREAD_LINK]
        tasks = [
            *Path(f"/proc/{self._recorder_pid}/task").iterdir(),
            *(Path(f"/proc/self/task/{number}") for number in threads),
        ]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def _keep(self, incident: Incident, grad_norm: float, applied: bool) -> None:
        self.keep(incident, self._recording.rest())


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a worker of a group trains with, and where."""

    exact: Samestep
    watched: Watched
    peers: Peers
    target: Target
    run: Storage
    folder: Path


@contextlib.contextmanager
def training_of(task: Task, **fields: Any) -> Iterator[Training]:
    """A run's engine, recorder and detectors; `fields` are changes of the model's job."""
    model, workers = MODELS[task["model"]], dist.get_world_size()
    plain = model.spec(shards=workers, workers=workers, threads=task["threads"])
    spec = parse_spec({**plain.model_dump(mode="json"), **fields})
    numerics.pin(spec)
    group = dist.new_group(backend="gloo")
    assert group is not None
    exact = Samestep(model, spec, Batches(model, spec, (CPU,)), group if workers > 1 else None)
    peers = Peers(group if workers > 1 else None)
    with shared_folder(peers, None) as folder, contextlib.ExitStack() as stack:
        run = Storage.at(str(folder / "run"))
        target, pid = stack.enter_context(_recorder(spec, run, folder, peers))
        watched = Watched(exact, peers, target, pid)
        try:
            yield Training(
                exact=exact, watched=watched, peers=peers, target=target, run=run, folder=folder
            )
        finally:
            watched.close()
    exact.engine.close()


@contextlib.contextmanager
def _recorder(
    spec: JobSpec, run: Storage, folder: Path, peers: Peers
) -> Iterator[tuple[Target, int | None]]:
    """A recorder in a process of its own, as one worker more; worker 0 gets its id as well."""
    place = (run.uri, dump_spec(spec), str(folder / "recorder"))
    size = peers.world_size + 1
    if peers.world_rank > 0:
        with target_of(*place, peers.world_rank, size) as target:
            yield target, None
        return
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    process = context.Process(target=_serve, args=(place, size, over), daemon=True)
    process.start()
    try:
        with target_of(*place, size - 1, size) as target:
            yield target, process.pid
    finally:
        over.set()
        process.join(CLOSE_S)


def _serve(place: tuple[str, str, str], size: int, over: Any) -> None:
    with target_of(*place, 0, size):
        over.wait(SERVE_S)


def _audited(exact: Samestep) -> Step:
    """The engine's step with audits: of each block the last one has one."""
    incidents = exact.spec.incidents.model_copy(update={"audit_every": BLOCK_STEPS})
    plain, audited = exact.spec, exact.spec.model_copy(update={"incidents": incidents})

    def step(number: int) -> None:
        exact.engine.spec = audited
        reduced = exact.step(number)
        exact.engine.spec = plain
        assert (reduced.audit_s is not None) == ((number + 1) % BLOCK_STEPS == 0)

    return step


def _blocks(step: Step) -> Step:
    """Takes a block of steps as one."""

    def block(number: int) -> None:
        for inner in range(BLOCK_STEPS):
            step(BLOCK_STEPS * number + inner)

    return block


def _per_step(blocks: list[float | None]) -> list[float | None]:
    return [None if block is None else block / BLOCK_STEPS for block in blocks]
