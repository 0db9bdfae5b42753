"""Where an attempt starts: the newest whole checkpoint, restored on every worker, or step 0."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.reading import (
    best_of,
    list_checkpoints,
    load_checkpoint,
    newest_whole,
    set_aside,
)
from samestep.checkpoint.state import State, restore
from samestep.checkpoint.storage import Storage
from samestep.engine.appraisal import Best
from samestep.engine.peers import Peers
from samestep.engine.setup import Built
from samestep.errors import CheckpointError, PeerLostError, RunConflictError, SamestepError
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.link import Target


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Where to start.

    Attributes:
        step: steps taken so far.
        nominal_weight: of the run's shards, if it is known yet.
        digest: of the checkpoint that was restored; None at the start of a run.
        early_stop: the count of evaluations without improvement, as the checkpoint has it.
        best: the best checkpoint so far.
    """

    step: int
    nominal_weight: float | None
    digest: str | None = None
    early_stop: Mapping[str, Any] | None = None
    best: Best | None = None


class Resumption:
    """Finds where to start.

    Args:
        spec: the job.
        run: the run directory.
        peers: the other workers.
        target: the run's recorder, told of damaged checkpoints.
        attempt: the recorder's present attempt.
    """

    def __init__(
        self, spec: JobSpec, *, run: Storage, peers: Peers, target: Target, attempt: int
    ) -> None:
        self._spec = spec
        self._run = run
        self._peers = peers
        self._target = target
        self._attempt = attempt

    def restore(self, built: Built) -> Saved:
        """Restores the newest whole checkpoint that worker 0 sees, on every worker.

        Raises:
            CheckpointError: none is whole, or it does not fit the workload.
            RunConflictError: the data is another than the checkpoint's.
            PeerLostError: worker 0 raised.
        """
        message: dict[str, Any] = {}
        chosen: tuple[State, str] | None = None
        if self._peers.world_rank == 0:
            try:
                chosen = self._choose()
                message["step"] = chosen[0].step if chosen else None
                message["best"] = self._best(chosen[0].step) if chosen else None
            except SamestepError as error:
                self._peers.gather({"error": str(error)})()
                raise
        told = self._peers.gather(message)()[0]
        if "error" in told:
            raise PeerLostError(f"worker 0 can't resume: {told['error']}")
        if told["step"] is None:
            return Saved(step=0, nominal_weight=None)
        if chosen is None:
            loaded, manifest = load_checkpoint(self._run, told["step"])
            chosen = (loaded, manifest.digest)
        state, extras = chosen[0], chosen[0].extras
        if extras["dataset_size"] != built.dataset_size:
            raise RunConflictError(
                f"the training data has {built.dataset_size} samples, the checkpoint at step "
                f"{state.step} of {self._run.uri} was made with {extras['dataset_size']}: other "
                "data is another run; give it another --name, or restore the data"
            )
        restore(state, built.parts)
        return Saved(
            step=state.step,
            nominal_weight=extras["nominal_weight"],
            digest=chosen[1],
            early_stop=extras.get("early_stop"),
            best=(int(told["best"][0]), float(told["best"][1])) if told["best"] else None,
        )

    def _best(self, step: int) -> Best | None:
        """The best checkpoint up to the one restored, by what the job ranks by now."""
        ranking = Ranking.of(self._spec.checkpoint.best)
        if ranking is None:
            return None
        until = [info for info in list_checkpoints(self._run) if info.step <= step]
        best = best_of(until, ranking)
        score = ranking.score_of(best) if best is not None else None
        return (best.step, score) if best is not None and score is not None else None

    def _choose(self) -> tuple[State, str] | None:
        found, rejected = newest_whole(self._run)
        # One whose writer was killed has no manifest: it never was a checkpoint.
        damaged = [item for item in rejected if not item.unfinished]
        lines = []
        for item in damaged:
            incident = Incident(
                kind=IncidentKind.DAMAGED_CHECKPOINT,
                step=item.step,
                attempt=self._attempt,
                world_rank=0,
                host=os.uname().nodename,
                time=time.time(),
                message=f"checkpoint at step {item.step} rejected: {item.reason}",
                evidence=[set_aside(self._run, item) if found is not None else item.uri],
            )
            self._target.call("record_incident", self._attempt, incident.to_json())
            lines.append(incident.message)
        if found is None and damaged:
            raise CheckpointError(
                f"no checkpoint of {self._run.uri} is whole: " + "; ".join(lines) + "; nothing "
                "was deleted. Start over from step 0 with --restart, or restore one of them"
            )
        return (found.state, found.manifest.digest) if found else None
