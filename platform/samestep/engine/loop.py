"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.engine.appraisal import Appraisal
from samestep.engine.ema import averages_in
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.hooks import Hooks
from samestep.engine.peers import Peers
from samestep.engine.resume import Saved
from samestep.engine.setup import Built, before_step
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.update import Updated, apply_update
from samestep.errors import DivergenceError, ExitStatus, RecorderError
from samestep.exact import numerics
from samestep.exact.digest import ids_digest, live_digest
from samestep.names import Activity, Event
from samestep.spec import JobSpec, bits_part
from samestep.telemetry.link import Link, Target
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.reports import NO_DEVICE, Reporter
from samestep.telemetry.timesheet import Timesheet, during
from samestep.workload import Values

logger = logging.getLogger(__name__)

FLUSH_S = 120.0


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
        fingerprint: dict[str, Any],
        on_step: Callable[[int], None],
        on_finished: Callable[[nn.Module, Callable[[], object], Path | None], None] | None,
    ) -> None:
        self._on_finished = on_finished
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
        self._numerics = fingerprint
        self._on_step = on_step
        self._device = engine.main.device
        self._appraisal = Appraisal(
            spec,
            schedule=built.schedule,
            steps_per_epoch=built.order.steps_per_epoch,
            early_stop=start.early_stop,
            best=start.best,
        )
        self._hooks = Hooks(built.workload, seed=spec.seed, device=self._device)
        self._evaluation: dict[str, float] | None = None
        self._evaluated_at = -1
        self._committed = (start.step, start.digest) if start.digest is not None else None
        self._data_wait_s = 0.0
        self._timesheet = Timesheet()
        self._reporter = Reporter(
            target,
            attempt=attempt,
            world_rank=peers.world_rank,
            # Not by way of the loop: a circle would keep the group's sockets open after an error.
            device_memory=partial(_device_memory, self._device),
        )

    def train(self) -> None:
        """Takes steps; ends with a checkpoint and the run's result at the recorder."""
        with self._reporter:
            self._train()

    def _train(self) -> None:
        if self._spec.init_from.path is not None and self._committed is None:
            self._checkpoint()  # a resume needs the source no more, whatever becomes of it
        end_step, stop = self._built.end_step, False
        while self._step < end_step and not stop and self._appraisal.stop_reason is None:
            self._on_step(self._step)
            stop, values = self._take_step()
            is_best = self._appraisal.is_due(self._step) and self._evaluate()
            if self._step % self._built.order.steps_per_epoch == 0:
                self._hooks.on_epoch(values, self._evaluation_here)
            every = self._spec.checkpoint.every_steps
            if is_best or (every and self._step % every == 0 and self._step < end_step):
                self._checkpoint()
        done = self._step >= end_step or self._appraisal.stop_reason is not None
        if done:
            self._evaluate()
        self._checkpoint()
        self._finish(done)
        # Nobody leaves before the end is written: a worker that is gone looks like a fault.
        self._peers.gather("end")()

    def _finish(self, done: bool) -> None:
        if self._link is None:
            return
        assert self._committed is not None
        appraisal = self._appraisal
        if appraisal.warning is not None:
            self._target.call("say", appraisal.warning)
        reason = "stop"
        if done:
            reason = "early_stop" if self._step < self._built.end_step else "end"
        if done and self._on_finished is not None:
            file = getattr(sys.modules.get(type(self._built.workload).__module__), "__file__", None)
            # The model that is kept is the one that is evaluated: the averages, where there are.
            with averages_in(self._built.parts.model, self._built.parts.ema):
                self._on_finished(
                    self._built.parts.model, self._use_model, Path(file) if file else None
                )
        self._target.call(
            "finish",
            self._attempt,
            {
                "status": "done" if done else "interrupted",
                "reason": reason,
                "step": self._step,
                "digest": self._committed[1],
                "evaluation": self._evaluation,
                "best": appraisal.best_as_json(),
                "exit_status": int(ExitStatus.DONE if done else ExitStatus.INTERRUPTED),
                "message": (appraisal.stop_reason or "") if reason == "early_stop" else "",
                "timing": self._timesheet.lap(),
            },
        )

    def _use_model(self) -> None:
        """Calls the model once, as an evaluation does; nothing where there is none."""
        if self._built.evaluation is not None:
            self._built.evaluation.run(
                self._built.parts.model,
                Peers(None),
                step=self._step,
                device=self._device,
                max_batches=1,
            )

    @during(Activity.TRAINING)
    def _take_step(self) -> tuple[bool, Values]:
        spec, built, step = self._spec, self._built, self._step
        started = time.perf_counter()
        self._data_wait_s, self._timesheet.num_samples = 0.0, 0
        waited_s = self._peers.wait_s
        numerics.require_pinned(spec)
        if step != self._first_step:
            # That of the first was called when the group formed: the canary needs it too.
            before_step(spec, built.workload, self._engine.replicas, step)
        plans = built.order.shards_of(step)
        wants_stop = self._link is not None and self._link.stop_requested
        reduced = self._engine.compute(step, plans, self._take, int(wants_stop))
        updated = apply_update(
            spec,
            built.parts,
            reduced.parameters,
            step=step,
            device=self._device,
            schedule_due=self._schedule_due(step + 1),
        )
        self._engine.sync_replicas()
        self._step = step + 1
        digest = None
        if spec.digest_every and self._step % spec.digest_every == 0:
            digest = self._agreed_digest()
        lap = self._timesheet.lap(waited_s=reduced.traffic.wait_s + self._peers.wait_s - waited_s)
        self._reporter.add(lap, num_samples=self._timesheet.num_samples)
        if self._link is not None:
            timing = {
                "step_s": time.perf_counter() - started,
                "data_wait_s": self._data_wait_s,
                "exchange_wait_s": reduced.traffic.wait_s,
                "sent_bytes": reduced.traffic.sent_bytes,
                **lap,
            }
            ids = [list(plan.ids) for plan in plans]
            self._record(step, plans[0].epoch, ids, reduced, updated, digest, timing)
        values = _values(step, plans[0].epoch, reduced, updated)
        self._hooks.on_step(values)
        return bool(reduced.flag), values

    def _schedule_due(self, num_steps: int) -> bool:
        schedule = self._built.schedule
        if schedule is None or schedule.every == "evaluation":
            return False
        return schedule.every == "step" or num_steps % self._built.order.steps_per_epoch == 0

    @during(Activity.DATA)
    def _take(self, plan: Any, device: Any) -> Any:
        self._timesheet.num_samples += len(plan.ids)
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
            loss=_loss(reduced),
            shard_losses=reduced.shard_losses,
            shard_weights=[weight or None for weight in reduced.shard_weights],
            grad_norm=_grad_norm(updated),
            lr=updated.learning_rates,
            ids=ids_digest(ids),
            metrics=reduced.metrics,
            skipped=updated.skipped,
            state_digest=digest,
            timing=timing,
        )
        self._link.record(record.to_json())

    @during(Activity.EVALUATION)
    def _evaluate(self) -> bool:
        """Evaluates, once a step; returns whether the state is the best so far."""
        if self._built.evaluation is None or self._evaluated_at == self._step:
            return False
        metrics = self._built.evaluation.run(
            self._built.parts.model, self._peers, step=self._step, device=self._device
        )
        self._evaluation, self._evaluated_at = metrics, self._step
        self._event(Event.EVALUATION, {"metrics": metrics, "samples": self._built.evaluation.size})
        if self._step == self._first_step:
            return False  # the checkpoint that was restored has what was decided then in it
        due = self._appraisal.is_due(self._step)
        return self._appraisal.take(metrics, step=self._step, decides=due)

    @property
    def _evaluation_here(self) -> dict[str, float] | None:
        return self._evaluation if self._evaluated_at == self._step else None

    def _agreed_digest(self) -> str:
        """Digest of the live state, equal on all workers (of the exact reduction)."""
        state = collect(self._built.parts, step=self._step, extras={})
        digest = live_digest(state.tensors)
        if self._spec.reduction == "fast":
            # Stock DDP lets buffers differ between workers until worker 0's go round at the next
            # forward; worker 0's are those that a checkpoint holds.
            return str(digest)
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

    @during(Activity.CHECKPOINT)
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
                    **self._appraisal.state,
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
                    evaluation=self._evaluation_here or {},
                    ranking=self._appraisal.ranking,
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


def _values(step: int, epoch: int, reduced: Reduced, updated: Updated) -> Values:
    return Values(
        step=step,
        epoch=epoch,
        loss=_loss(reduced),
        grad_norm=_grad_norm(updated),
        lr=tuple(updated.learning_rates),
        metrics=dict(reduced.metrics),
        skipped=updated.skipped,
    )


def _device_memory(device: torch.device) -> tuple[int, int]:
    """The most that was allocated, and all there is, in bytes."""
    if device.type != "cuda":
        return NO_DEVICE
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device), int(total)


def _loss(reduced: Reduced) -> float | None:
    return None if reduced.is_empty else reduced.loss


def _grad_norm(updated: Updated) -> float | None:
    return None if math.isnan(updated.grad_norm) and updated.skipped else updated.grad_norm
