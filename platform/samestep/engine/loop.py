"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.peers import Peers
from samestep.engine.setup import Built, before_step
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.update import Updated, apply_update
from samestep.errors import DivergenceError, ExitStatus, RecorderError
from samestep.exact.digest import ids_digest, live_digest
from samestep.names import Event
from samestep.spec import JobSpec, bits_part
from samestep.telemetry.link import Link, Target
from samestep.telemetry.records import EventRecord, StepRecord

logger = logging.getLogger(__name__)

FLUSH_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Where to start.

    Attributes:
        step: steps taken so far.
        nominal_weight: of the run's shards, if it is known yet.
        digest: of the checkpoint that was restored; None at the start of a run.
    """

    step: int
    nominal_weight: float | None
    digest: str | None = None


class Loop:
    """Trains from the restored state to the end of the run, or to a planned stop.

    Worker 0 reports (`link` is its link); the others compute the same.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        built: Built,
        engine: StepEngine | FastEngine,
        feed: Feed,
        peers: Peers,
        run: Storage,
        target: Target,
        link: Link | None,
        attempt: int,
        start: Saved,
        numerics: dict[str, Any],
        on_step: Callable[[int], None],
    ) -> None:
        self._spec = spec
        self._built = built
        self._engine = engine
        self._feed = feed
        self._peers = peers
        self._run = run
        self._target = target
        self._link = link
        self._attempt = attempt
        self._step = self._first_step = start.step
        self._nominal_weight = start.nominal_weight
        self._numerics = numerics
        self._on_step = on_step
        self._device = engine.main.device
        self._evaluation: dict[str, float] | None = None
        self._evaluated_at = -1
        self._committed = (start.step, start.digest) if start.digest is not None else None
        self._data_wait_s = 0.0

    def train(self) -> None:
        """Takes steps; ends with a checkpoint and the run's result at the recorder."""
        stop = False
        while self._step < self._built.end_step and not stop:
            self._on_step(self._step)
            stop = self._take_step()
            if self._evaluation_due():
                self._evaluate()
            every = self._spec.checkpoint.every_steps
            if every and self._step % every == 0 and self._step < self._built.end_step:
                self._checkpoint()
        done = self._step >= self._built.end_step
        if done:
            self._evaluate()
        self._checkpoint()
        if self._link is not None:
            assert self._committed is not None
            self._target.call(
                "finish",
                self._attempt,
                {
                    "status": "done" if done else "interrupted",
                    "step": self._step,
                    "digest": self._committed[1],
                    "evaluation": self._evaluation,
                    "exit_status": int(
                        ExitStatus.DONE if done else ExitStatus.INTERRUPTED
                    ),
                    "message": "",
                },
            )
        # Nobody leaves before the end is written: a worker that is gone looks like a fault.
        self._peers.gather("end")()

    def _take_step(self) -> bool:
        spec, built, step = self._spec, self._built, self._step
        started = time.perf_counter()
        self._data_wait_s = 0.0
        if step != self._first_step:
            # That of the first was called when the group formed: the canary needs it too.
            before_step(spec, built.workload, self._engine.replicas, step)
        plans = built.order.shards_of(step)
        wants_stop = self._link is not None and self._link.stop_requested
        reduced = self._engine.compute(step, plans, self._take, int(wants_stop))
        updated = apply_update(
            spec, built.parts, reduced.parameters, step=step, device=self._device
        )
        self._engine.sync_replicas()
        self._step = step + 1
        digest = None
        if spec.digest_every and self._step % spec.digest_every == 0:
            digest = self._agreed_digest()
        if self._link is not None:
            timing = {
                "step_s": time.perf_counter() - started,
                "data_wait_s": self._data_wait_s,
                "exchange_wait_s": reduced.traffic.wait_s,
                "sent_bytes": reduced.traffic.sent_bytes,
            }
            ids = [list(plan.ids) for plan in plans]
            self._record(step, plans[0].epoch, ids, reduced, updated, digest, timing)
        return bool(reduced.flag)

    def _take(self, plan: Any, device: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._feed.take(plan, device)
        finally:
            self._data_wait_s += time.perf_counter() - started

    def _record(
        self,
        step: int,
        epoch: int,
        ids: list[list[int]],
        reduced: Reduced,
        updated: Updated,
        digest: str | None,
        timing: dict[str, float],
    ) -> None:
        assert self._link is not None
        if self._link.divergence is not None:
            raise DivergenceError(self._link.divergence)
        if self._link.refused:
            raise RecorderError(
                f"attempt {self._attempt} is no longer the run's present one: this worker was "
                "replaced, and nothing it does is kept"
            )
        record = StepRecord(
            step=step,
            epoch=epoch,
            samples=sum(map(len, ids)),
            loss=None if reduced.is_empty else reduced.loss,
            shard_losses=reduced.shard_losses,
            shard_weights=[weight or None for weight in reduced.shard_weights],
            grad_norm=None if math.isnan(updated.grad_norm) and updated.skipped else updated.grad_norm,
            lr=updated.learning_rates,
            ids=ids_digest(ids),
            metrics=reduced.metrics,
            skipped=updated.skipped,
            state_digest=digest,
            timing=timing,
        )
        self._link.record(record.to_json())

    def _evaluation_due(self) -> bool:
        every = self._spec.evaluate.every_epochs
        per_epoch = self._built.order.steps_per_epoch
        return every > 0 and self._step % (per_epoch * every) == 0

    def _evaluate(self) -> None:
        if self._built.evaluation is None or self._evaluated_at == self._step:
            return
        metrics = self._built.evaluation.run(
            self._built.parts.model, self._peers, step=self._step, device=self._device
        )
        self._evaluation, self._evaluated_at = metrics, self._step
        self._event(
            Event.EVALUATION, {"metrics": metrics, "samples": self._built.evaluation.size}
        )

    def _agreed_digest(self) -> str:
        """Digest of the live state, equal on all workers or a DivergenceError."""
        state = collect(self._built.parts, step=self._step, extras={})
        digest = live_digest(state.tensors)
        everyone = self._peers.gather(digest)()
        if len(set(everyone)) > 1:
            common = max(sorted(set(everyone)), key=everyone.count)
            odd = [str(rank) for rank, other in enumerate(everyone) if other != common]
            raise DivergenceError(
                f"the state after {self._step} steps differs between workers; odd ones out: "
                f"worker {', '.join(odd)} (digests {everyone}). Nothing of it is committed: "
                "either something outside the contract changed the model (samestep check names "
                "suspects) or a machine computes wrongly"
            )
        return str(digest)

    def _checkpoint(self) -> None:
        if self._committed is not None and self._committed[0] == self._step:
            return
        self._agreed_digest()
        if self._link is not None:
            state = collect(
                self._built.parts,
                step=self._step,
                extras={
                    "nominal_weight": self._nominal_weight,
                    "dataset_size": self._built.dataset_size,
                    "steps_per_epoch": self._built.order.steps_per_epoch,
                },
            )
            self._link.flush(FLUSH_S)
            if self._link.divergence is not None:
                raise DivergenceError(self._link.divergence)
            manifest = write_files(
                self._run,
                state,
                CheckpointMeta(
                    numerics=self._numerics,
                    spec=bits_part(self._spec),
                    created_s=time.time(),
                ),
            )
            self._target.call(
                "commit", self._attempt, manifest.to_json(), self._spec.checkpoint.keep
            )
            self._committed = (self._step, manifest.digest)
        else:
            self._committed = (self._step, "")

    def _event(self, event: Event, fields: dict[str, Any]) -> None:
        if self._link is not None:
            record = EventRecord(
                event=event,
                step=self._step,
                attempt=self._attempt,
                time=time.time(),
                fields=fields,
            )
            self._link.record(record.to_json())
