"""One attempt in one worker: build, resume, form the group, train, end.

It is the same in every mode; a launcher gives it devices, peers, and a way to the recorder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from samestep.checkpoint.state import check_encodable
from samestep.checkpoint.storage import Storage
from samestep.engine import evidence, forming, survivor
from samestep.engine.canary import compare_fingerprints
from samestep.engine.ending import Ending
from samestep.engine.failure import Failure
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.fingerprint import fingerprints
from samestep.engine.heap import keep_freed_memory
from samestep.engine.initial import Initial, load_initial
from samestep.engine.loop import Loop
from samestep.engine.peers import Peers
from samestep.engine.resume import Resumption, Saved
from samestep.engine.setup import (
    Built,
    build,
    make_replicas,
    require_shared_storage,
    turns_of,
)
from samestep.engine.step import Replica, StepEngine
from samestep.errors import PeerLostError, RecorderError, SamestepError
from samestep.exact import numerics
from samestep.faults.progress import Phase, Progress
from samestep.faults.watchdog import Stall, Watchdog
from samestep.incidents.bundle import StateSource
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.finished import Finished
from samestep.telemetry.link import Link, Patient, Target
from samestep.telemetry.logs import WorkerFiles
from samestep.workload import load_workload

logger = logging.getLogger(__name__)

FORMING_S = 60.0
"""At least so long a worker may stand still while the group forms: first calls are slow."""
VERDICT_WAIT_S = 5.0
FLUSH_S = 60.0


def _tell_stall(
    target: Target, files: WorkerFiles | None, attempt: int, world_rank: int, stall: Stall
) -> None:
    """No method: nothing that a watchdog keeps may lead to the process group."""
    if files is not None:
        files.note(f"no progress for {stall.still_s:.0f} s in {stall.position}\n{stall.stacks}")
    target.call("stalled", attempt, world_rank, os.uname().nodename, stall.to_json())


def _never() -> bool:
    return False


def _nothing() -> int:
    return 0


def _unheard(step: int, attempt: int, left: int) -> None:
    """Nobody follows the steps."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an attempt runs, as one worker sees it.

    Attributes:
        mode: ddp, dataparallel or local.
        devices: one, or several in mode dataparallel.
        peers: the other workers.
        group: process group for gradients; None for a single process.
        search: folders in which the workload's module is looked for.
        run_uri: the run directory.
        target: the run's recorder.
        files: what the worker may write beside the run's own; None: nothing.
        supervised: somebody decides on restarts; failures are raised to it.
        wants: what this worker asks for in each step's small talk (`Flag`).
        is_debugged: a debugger is open, so that standing still is fine.
        on_step: told of each step before it is taken, of the attempt, and of how many steps are
            left; once all are taken, of none.
        on_failure: told at once of a failure of this worker's own, before others can learn why.
        on_finished: called once in worker 0 with what the run ends with; must not raise.
    """

    mode: str
    devices: list[torch.device]
    peers: Peers
    group: dist.ProcessGroup | None
    search: list[Path]
    run_uri: str
    target: Target
    files: WorkerFiles | None = None
    supervised: bool = False
    wants: Callable[[], int] = _nothing
    is_debugged: Callable[[], bool] = _never
    on_step: Callable[[int, int, int], None] = _unheard
    on_failure: Callable[[], object] = _nothing
    on_finished: Callable[[Finished], None] | None = None


def run_attempt(spec: JobSpec, place: Place) -> Ending:
    """Trains until the end of the run, a planned stop, or a failure.

    Where nobody supervises the attempt, a failure that no restart mends is told to the recorder
    as the run's end. Else every failure is raised for the supervisor to judge, and what the
    worker has of the run is kept in its process (`survivor`).

    Raises:
        PeerLostError: unsupervised: another worker went away for no known reason.
        AttemptFailedError: supervised: any failure.
    """
    place = replace(place, target=Patient(place.target))
    runner = _Attempt(spec, place, place.target.call("status"))
    failure: Failure | None = None
    ending = Ending.FAILED
    try:
        ending = runner.run()
    except (Exception, SystemExit) as error:  # told once, by the worker that met it
        if isinstance(error, PeerLostError) and not place.supervised:
            runner.close()
            if runner.verdict_known():
                return Ending.FAILED
            raise
        failure = runner.failed(error)
        if not failure.is_echo:
            place.on_failure()
    except BaseException:
        runner.close()
        raise
    # Outside of the except block: what the exception held is gone now.
    try:
        if failure is not None:
            runner.tell(failure)
        runner.close_link()
        if place.supervised:
            runner.keep(failure, parked=ending is Ending.PARKED)
    finally:
        runner.close()
    if failure is not None and place.supervised:
        raise failure.to_error()
    if failure is not None:
        evidence.settle(evidence.BUNDLE_S)
    return ending


class _Attempt:
    def __init__(self, spec: JobSpec, place: Place, status: Mapping[str, Any]) -> None:
        self._spec = spec
        self._place = place
        self._peers = place.peers
        self._run = Storage.at(place.run_uri)
        self._status = status
        self._attempt = int(status["attempt"])
        self._link: Link | None = None
        self._feed: Feed | None = None
        self._engine: StepEngine | FastEngine | None = None
        self._loop: Loop | None = None
        self._progress = Progress()
        self._watchdog: Watchdog | None = None
        self._step = 0
        self._datasets: list[dict[str, Any]] = []

    def run(self) -> Ending:
        """Trains."""
        spec, place, peers = self._spec, self._place, self._peers
        numerics.pin(spec)
        device = place.devices[0]
        if device.type == "cpu" and place.mode != "local":  # there the process is the caller's
            keep_freed_memory()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        require_shared_storage(self._run, peers)
        resumption = Resumption(
            spec, run=self._run, peers=peers, target=place.target, status=self._status
        )
        resumption.choose()
        built = resumption.built() or self._build(device)
        fingerprint = numerics.fingerprint(spec, device.type, built.parts.dtypes)
        differing = compare_fingerprints(spec, peers, fingerprint)
        check_encodable(built.parts)
        saved = resumption.restore(built)
        self._step = saved.step
        initial = load_initial(spec, built.parts) if saved.source is None else None
        replicas = make_replicas(spec, built, place.devices, peers)
        if peers.world_rank == 0:
            self._datasets = [found.to_json() for found in fingerprints(built)]
        self._feed = feed = self._open_feed(built, saved, replicas)
        forming.re_enact(spec, built, saved, resumption, replicas)
        resumption.keep(built, saved)
        resumption.release()
        exact = self._engine = self._make_engine(built, replicas)
        self._watch(max(spec.faults.hang_timeout_s, FORMING_S))
        differing += forming.compare_group(
            spec, built=built, saved=saved, engine=exact, peers=peers, take=feed.take_apart
        )
        saved = replace(saved, nominal_weight=exact.nominal_weight)
        if spec.reduction == "fast" and place.group is not None:
            exact.close()
            self._engine = FastEngine(
                spec=spec,
                workload=built.workload,
                replica=replicas[0],
                peers=peers,
                scale=built.parts.scaled,
            )
        self._progress.at(Phase.EVALUATION, step=saved.step)
        forming.try_evaluation(spec, built=built, saved=saved, peers=peers, device=device)
        self._begin(built, saved, initial, fingerprint, differing)
        self._loop = Loop(
            spec=spec,
            built=built,
            engine=self._engine,
            feed=feed,
            peers=peers,
            run=self._run,
            target=place.target,
            link=self._link,
            attempt=self._attempt,
            start=saved,
            fingerprint=fingerprint,
            on_step=lambda step, left: self._place.on_step(step, self._attempt, left),
            progress=self._progress,
            wants=place.wants,
            on_finished=place.on_finished,
        )
        self._stop_watching()
        self._watch(spec.faults.hang_timeout_s)
        survivor.forget()  # the loop holds the newest state from here on
        return self._loop.train()

    def _open_feed(self, built: Built, saved: Saved, replicas: list[Replica]) -> Feed:
        return Feed(
            workload=built.workload,
            dataset=built.dataset,
            order=built.feed_order,
            turns=turns_of(replicas),
            seed=self._spec.seed,
            start_step=saved.step,
            end_step=built.end_step,
            loader_processes=self._spec.loader_processes,
            pin_memory=replicas[0].device.type == "cuda",
            left_out=saved.left_out,
        )

    def _make_engine(self, built: Built, replicas: list[Replica]) -> StepEngine:
        return StepEngine(
            spec=self._spec,
            workload=built.workload,
            replicas=replicas,
            peers=self._peers,
            group=self._place.group if self._peers.world_size > 1 else None,
            scale=built.parts.scaled,
            progress=self._progress,
        )

    def _watch(self, timeout_s: float) -> None:
        """From now on somebody notices when this worker stands still."""
        if self._place.mode == "local":
            return  # the process is the caller's, and a debugger in it can't be told from a hang
        self._progress.at(Phase.STARTING, step=self._step)
        self._watchdog = Watchdog(
            self._progress,
            timeout_s=timeout_s,
            report=partial(
                _tell_stall,
                self._place.target,
                self._place.files,
                self._attempt,
                self._peers.world_rank,
            ),
            paused=self._place.is_debugged,
            may_exit=True,
        )
        self._watchdog.start()

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def keep(self, failure: Failure | None, *, parked: bool) -> None:
        """Keeps what this worker has of the run in its process, for the next group."""
        if self._loop is not None:
            held = self._loop.held(self._run.uri) if failure is not None or parked else None
            if held is None:
                survivor.forget()
            else:
                # Objects of a workload that raised are not to be trusted: they are made anew.
                survivor.hold(held.apart() if failure and not failure.is_echo else held)
        self._loop = None

    def close_link(self) -> None:
        """Delivers what can be delivered; what is left can be told from then on."""
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Ends what the attempt started in this process."""
        self._stop_watching()
        self.close_link()
        self._loop = None  # it leads back here, and to the group, whose sockets must close
        if self._feed is not None:
            self._feed.close()
        if self._engine is not None:
            self._engine.close()

    def verdict_known(self) -> bool:
        """Whether another worker has told why the attempt failed, or soon does."""
        deadline = time.monotonic() + VERDICT_WAIT_S
        while time.monotonic() < deadline:
            if self._place.target.call("verdict", self._attempt) is not None:
                return True
            time.sleep(0.1)
        return False

    def failed(self, error: BaseException) -> Failure:
        """Takes down what ended the attempt."""
        self._stop_watching()
        return Failure.of(
            error,
            step=self._step if self._loop is None else self._loop.step,
            attempt=self._attempt,
            world_rank=self._peers.world_rank,
            world_size=self._peers.world_size,
            position=self._progress.position if self._loop is not None else None,
        )

    def tell(self, failure: Failure) -> None:
        """Tells the recorder: first the incident, then the verdict where this worker gives it."""
        # A UserCodeError tells the user's traceback itself.
        text = failure.message if failure.is_users else failure.traceback
        self._note(f"failed at step {failure.step}\n{text}")
        if failure.is_echo:
            return
        if self._link is not None:
            try:
                self._link.flush(FLUSH_S)
            except SamestepError as late:
                logger.warning("attempt=%s flush before failing: %s", self._attempt, late)
        diverged = failure.incident is IncidentKind.DIVERGENCE
        told = diverged and self._link is not None and self._link.divergence is not None
        if not (told or failure.is_told):
            incident = failure.to_incident()
            told = self._tell("record_incident", incident.to_json())
            if told and self._loop is not None:
                self._loop.keep_evidence(replace(incident, id=str(told)))
        if not self._place.supervised:
            verdict = f"{failure.kind}:{failure.exit_status}"
            self._tell("fail", verdict, failure.message)

    def _tell(self, method: str, *args: Any) -> Any:
        try:
            return self._place.target.call(method, self._attempt, *args)
        except RecorderError as error:
            if not self._place.supervised:
                raise
            # The supervisor tells the failure itself.
            logger.warning("attempt=%s %s was refused: %s", self._attempt, method, error)
            return None

    def _build(self, device: torch.device) -> Built:
        spec, place = self._spec, self._place
        output_folder = place.files.output_folder if place.files is not None else None
        workload = load_workload(
            spec.workload, spec.args, place.search, output_folder=output_folder
        )
        built = build(spec, workload, device)
        # Again, because the workload's module may have set what torch keeps globally.
        numerics.pin(spec)
        return built

    def _begin(
        self,
        built: Built,
        saved: Saved,
        initial: Initial | None,
        fingerprint: dict[str, Any],
        differing: list[str],
    ) -> None:
        members = self._peers.gather([os.uname().nodename, os.getpid()])()
        message: dict[str, Any] = {}
        if self._peers.world_rank == 0:
            info = {
                "start_step": saved.step,
                "source": str(saved.source or StateSource.START),
                "num_rollbacks": saved.num_rollbacks,
                "mode": self._place.mode,
                "world_size": self._peers.world_size,
                "numerics": fingerprint,
                "hosts": [host for host, _ in members],
                "pids": [pid for _, pid in members],
                "search": [str(path) for path in self._place.search],
                "devices": [str(device) for device in self._place.devices],
                "total_steps": built.end_step,
                "steps_per_epoch": built.order.steps_per_epoch,
                "dataset_size": built.dataset_size,
                "custom_order": built.custom_order,
                "datasets": self._datasets,
                "placement_dependent": differing,
                "process_started": psutil.Process().create_time(),
            }
            if initial is not None:
                info["init_from"] = initial.to_json()
            try:
                message["attempt"] = self._place.target.call("begin_attempt", info)
            except SamestepError as error:
                self._peers.gather({"error": str(error)})()
                raise
        told = self._peers.gather(message)()[0]
        if "error" in told:
            raise PeerLostError(f"worker 0 can't begin an attempt: {told['error']}")
        self._attempt = int(told["attempt"])
        if self._peers.world_rank == 0:
            self._link = Link(self._place.target, self._attempt, "0")
            if initial is not None:
                self._place.target.call("say", initial.note)
        self._note(
            f"attempt {self._attempt} begins at step {saved.step}: worker "
            f"{self._peers.world_rank} of {self._peers.world_size}, mode {self._place.mode}"
        )

    def _note(self, line: str) -> None:
        """Into the worker's log alone: users are told by the recorder."""
        if self._place.files is not None:
            self._place.files.note(line)


def verdict_outcome(verdict: dict[str, Any] | None) -> tuple[int, str] | None:
    """(exit status, message) of a recorder's verdict."""
    if verdict is None:
        return None
    _, _, status = str(verdict["kind"]).partition(":")
    return int(status or 1), str(verdict["message"])
