"""One attempt in one worker: build, resume, form the group, train, end.

It is the same in every mode; a launcher gives it devices, peers, and a way to the recorder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import nn

from samestep.checkpoint.state import check_encodable, collect
from samestep.checkpoint.storage import Storage
from samestep.engine.appraisal import require_metrics
from samestep.engine.canary import compare_canary, compare_fingerprints, nominal_weight
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.heap import keep_freed_memory
from samestep.engine.initial import Initial, load_initial
from samestep.engine.loop import Loop
from samestep.engine.peers import Peers
from samestep.engine.resume import Resumption, Saved
from samestep.engine.setup import (
    Built,
    before_step,
    build,
    make_replicas,
    require_shared_storage,
    turns_of,
)
from samestep.engine.step import StepEngine
from samestep.errors import (
    CheckpointError,
    PeerLostError,
    SamestepError,
    UserCodeError,
    WorkloadError,
)
from samestep.exact import numerics
from samestep.exact.digest import live_digest
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.link import Link, Patient, Target
from samestep.telemetry.logs import WorkerFiles
from samestep.workload import load_workload

logger = logging.getLogger(__name__)

VERDICT_WAIT_S = 5.0
FLUSH_S = 60.0


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
        on_finished: called once in worker 0 with the final model, a call that uses it once, and
            the file of the workload; must not raise.
    """

    mode: str
    devices: list[torch.device]
    peers: Peers
    group: dist.ProcessGroup | None
    search: list[Path]
    run_uri: str
    target: Target
    files: WorkerFiles | None = None
    on_finished: Callable[[nn.Module, Callable[[], object], Path | None], None] | None = None


def run_attempt(spec: JobSpec, place: Place) -> bool:
    """Trains until the end of the run, a planned stop, or a failure that no restart mends.

    Such a failure is told to the recorder, and this returns: raising would make the launcher
    restart the group.

    Returns:
        Whether the attempt ended as planned (done or interrupted).

    Raises:
        PeerLostError: another worker went away for no known reason; worth a restart.
    """
    place = replace(place, target=Patient(place.target))
    attempt = int(place.target.call("status")["attempt"])
    runner = _Attempt(spec, place, attempt)
    try:
        runner.run()
    except PeerLostError:
        if runner.verdict_known():
            return False
        raise
    except (Exception, SystemExit) as error:  # told once, by the worker that met it
        runner.fail(error)
        return False
    finally:
        runner.close()
    return True


class _Attempt:
    def __init__(self, spec: JobSpec, place: Place, attempt: int) -> None:
        self._spec = spec
        self._place = place
        self._peers = place.peers
        self._run = Storage.at(place.run_uri)
        self._attempt = attempt
        self._link: Link | None = None
        self._feed: Feed | None = None
        self._engine: StepEngine | FastEngine | None = None
        self._step = 0

    def run(self) -> None:
        spec, place, peers = self._spec, self._place, self._peers
        numerics.pin(spec)
        device = place.devices[0]
        if device.type == "cpu" and place.mode != "local":  # there the process is the caller's
            keep_freed_memory()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        require_shared_storage(self._run, peers)
        output_folder = place.files.output_folder if place.files is not None else None
        workload = load_workload(
            spec.workload, spec.args, place.search, output_folder=output_folder
        )
        built = build(spec, workload, device)
        # Again, because the workload's module may have set what torch keeps globally.
        numerics.pin(spec)
        fingerprint = numerics.fingerprint(spec, device.type)
        mixed = compare_fingerprints(spec, peers, fingerprint)
        check_encodable(built.parts)
        saved = Resumption(
            spec, run=self._run, peers=peers, target=place.target, attempt=self._attempt
        ).restore(built)
        self._step = saved.step
        initial = load_initial(spec, built.parts) if saved.digest is None else None
        replicas = make_replicas(spec, built, place.devices, peers)
        self._feed = Feed(
            workload=built.workload,
            dataset=built.dataset,
            order=built.feed_order,
            turns=turns_of(replicas),
            seed=spec.seed,
            start_step=saved.step,
            end_step=built.end_step,
            loader_processes=spec.loader_processes,
            pin_memory=device.type == "cuda",
        )
        # A checkpoint at step 0 was taken after before_step(0).
        has_begun = saved.step == 0 and saved.digest is not None
        if saved.step < built.end_step and not has_begun:
            before_step(spec, built.workload, replicas, saved.step)
        scaler = built.parts.scaler
        scale: Callable[[torch.Tensor], torch.Tensor] = scaler.scale if scaler else _unscaled
        exact = StepEngine(
            spec=spec,
            workload=built.workload,
            replicas=replicas,
            peers=peers,
            group=place.group if peers.world_size > 1 else None,
            scale=scale,
        )
        self._engine = exact
        state = collect(built.parts, step=saved.step, extras={}).tensors
        formed = compare_canary(
            spec, exact, peers, built.order, self._feed.take_apart, live_digest(state)
        )
        grown = collect(built.parts, step=saved.step, extras={}).tensors.keys() - state.keys()
        if grown:
            raise WorkloadError(
                f"the model's state gets {', '.join(sorted(grown))} in its first forward, so a "
                "fresh model could not take a checkpoint of it: register buffers in model(), with "
                "their shapes"
            )
        exact.nominal_weight = nominal_weight(
            saved.nominal_weight or spec.nominal_weight, formed.canary, exact.nominal_weight
        )
        if spec.reduction == "fast" and place.group is not None:
            exact.close()
            self._engine = FastEngine(
                spec=spec, workload=built.workload, replica=replicas[0], peers=peers, scale=scale
            )
        if built.evaluation is not None and saved.step < built.end_step:
            # What is wrong with evaluate, or hangs on a metric that it lacks, shows before step 0.
            metrics = built.evaluation.run(
                built.parts.model, peers, step=saved.step, device=device, max_batches=1
            )
            require_metrics(spec, built.schedule, metrics)
        self._begin(built, saved, initial, fingerprint, mixed + formed.differing)
        Loop(
            spec=spec,
            built=built,
            engine=self._engine,
            feed=self._feed,
            peers=peers,
            run=self._run,
            target=place.target,
            link=self._link,
            attempt=self._attempt,
            start=replace(saved, nominal_weight=exact.nominal_weight),
            fingerprint=fingerprint,
            on_step=self._at,
            on_finished=place.on_finished,
        ).train()

    def close(self) -> None:
        """Ends what the attempt started in this process."""
        if self._link is not None:
            self._link.close()
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

    def fail(self, error: BaseException) -> None:
        """Tells the recorder: first the incident, then the verdict."""
        import traceback

        kind = type(error).__name__
        message = str(error) if isinstance(error, SamestepError) else f"{kind}: {error}"
        host, world_rank = os.uname().nodename, self._peers.world_rank
        if isinstance(error, UserCodeError) and self._peers.world_size > 1:
            message = f"worker {world_rank} on {host}: {message}"
        text = "".join(traceback.format_exception(error))
        incident = Incident(
            kind=_incident_kind(error),
            step=self._step,
            attempt=self._attempt,
            world_rank=world_rank,
            host=host,
            time=time.time(),
            message=message,
            traceback=text,
        )
        # A UserCodeError tells the user's traceback itself.
        told = message if isinstance(error, UserCodeError) else text
        self._note(f"failed at step {self._step}\n{told}")
        status = int(error.exit_status) if isinstance(error, SamestepError) else 1
        target = self._place.target
        if self._link is not None:
            try:
                self._link.flush(FLUSH_S)
            except SamestepError as late:
                logger.warning("attempt=%s flush before failing: %s", self._attempt, late)
        diverged = _incident_kind(error) is IncidentKind.DIVERGENCE
        if not (diverged and self._link is not None and self._link.divergence is not None):
            target.call("record_incident", self._attempt, incident.to_json())
        target.call("fail", self._attempt, f"{kind}:{status}", message)

    def _at(self, step: int) -> None:
        self._step = step

    def _begin(
        self,
        built: Built,
        saved: Saved,
        initial: Initial | None,
        fingerprint: dict[str, Any],
        mixed: list[str],
    ) -> None:
        hosts = [str(host) for host in self._peers.gather(os.uname().nodename)()]
        message: dict[str, Any] = {}
        if self._peers.world_rank == 0:
            info = {
                "start_step": saved.step,
                "mode": self._place.mode,
                "world_size": self._peers.world_size,
                "numerics": fingerprint,
                "hosts": hosts,
                "search": [str(path) for path in self._place.search],
                "devices": [str(device) for device in self._place.devices],
                "total_steps": built.end_step,
                "steps_per_epoch": built.order.steps_per_epoch,
                "dataset_size": built.dataset_size,
                "custom_order": built.custom_order,
                "placement_dependent": mixed,
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


def _incident_kind(error: BaseException) -> IncidentKind:
    from samestep.errors import DivergenceError

    if isinstance(error, DivergenceError):
        return IncidentKind.DIVERGENCE
    if isinstance(error, CheckpointError):
        return IncidentKind.DAMAGED_CHECKPOINT
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return IncidentKind.OUT_OF_MEMORY
    return IncidentKind.EXCEPTION


def _unscaled(loss: torch.Tensor) -> torch.Tensor:
    return loss
