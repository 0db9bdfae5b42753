"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from samestep.checkpoint.storage import Storage
from samestep.engine.appraisal import Appraisal
from samestep.engine.ema import averages_in
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.hooks import Hooks
from samestep.engine.keeping import SAVE_FLAG, Keeping
from samestep.engine.peers import Peers
from samestep.engine.resume import Saved
from samestep.engine.setup import Built, before_step
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.update import Updated, apply_update
from samestep.errors import DivergenceError, ExitStatus, PeerLostError, RecorderError
from samestep.exact import numerics
from samestep.exact.digest import ids_digest
from samestep.names import Event
from samestep.spec import JobSpec
from samestep.telemetry.link import Link, Target
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.workload import Values

logger = logging.getLogger(__name__)

LAST_SAVE_S = 10.0
"""How long a save under way is waited for when training ends with an error."""


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
        self._target = target
        self._link = link
        self._attempt = attempt
        self._step = self._first_step = start.step
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
        self._data_wait_s = 0.0
        self._keeping = Keeping(
            spec=spec,
            built=built,
            appraisal=self._appraisal,
            peers=peers,
            run=run,
            target=target,
            link=link,
            attempt=attempt,
            start=start,
            fingerprint=fingerprint,
        )

    def train(self) -> None:
        """Takes steps; ends with a checkpoint and the run's result at the recorder."""
        try:
            self._train()
        except PeerLostError:
            # Its part will not come. What lies in shared memory is for the next attempt.
            self._keeping.close(wait_s=0, keep_images=True)
            raise
        except BaseException:
            self._keeping.close(wait_s=LAST_SAVE_S, keep_images=False)
            raise
        self._keeping.close(wait_s=0, keep_images=False)

    def _train(self) -> None:
        self._keeping.begin()
        end_step, stop = self._built.end_step, False
        while self._step < end_step and not stop and self._appraisal.stop_reason is None:
            self._on_step(self._step)
            flag, values = self._take_step()
            stop = bool(flag % SAVE_FLAG)
            is_best = self._appraisal.is_due(self._step) and self._evaluate()
            if self._step % self._built.order.steps_per_epoch == 0:
                self._hooks.on_epoch(values, self._evaluation_here)
            if self._step < end_step:
                self._keeping.after_step(
                    self._step, flag=flag, is_best=is_best, evaluation=self._evaluation_here
                )
        done = self._step >= end_step or self._appraisal.stop_reason is not None
        if done:
            self._evaluate()
        self._keeping.end(self._step, evaluation=self._evaluation_here)
        self._finish(done)
        # Nobody leaves before the end is written: a worker that is gone looks like a fault.
        self._peers.gather("end")()

    def _finish(self, done: bool) -> None:
        if self._link is None:
            return
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
                "digest": self._keeping.digest,
                "evaluation": self._evaluation,
                "best": appraisal.best_as_json(),
                "exit_status": int(ExitStatus.DONE if done else ExitStatus.INTERRUPTED),
                "message": (appraisal.stop_reason or "") if reason == "early_stop" else "",
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

    def _take_step(self) -> tuple[int, Values]:
        spec, built, step = self._spec, self._built, self._step
        started = time.perf_counter()
        self._data_wait_s = 0.0
        numerics.require_pinned(spec)
        if step != self._first_step:
            # That of the first was called when the group formed: the canary needs it too.
            before_step(spec, built.workload, self._engine.replicas, step)
        plans = built.order.shards_of(step)
        reduced = self._engine.compute(step, plans, self._take, self._flag())
        self._keeping.after_exchange()
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
            digest = self._keeping.agreed_digest(self._step)
        if self._link is not None:
            timing = {
                "step_s": time.perf_counter() - started,
                "data_wait_s": self._data_wait_s,
                "exchange_wait_s": reduced.traffic.wait_s,
                "sent_bytes": reduced.traffic.sent_bytes,
            }
            ids = [list(plan.ids) for plan in plans]
            self._record(step, plans[0].epoch, ids, reduced, updated, digest, timing)
        values = _values(step, plans[0].epoch, reduced, updated)
        self._hooks.on_step(values)
        return reduced.flag, values

    def _flag(self) -> int:
        """What this worker has to say to the others; all see the largest of the step's flags.

        Worker 0 alone reports, so that no two workers ask for different things.
        """
        if self._link is None:
            return 0
        return int(self._link.stop_requested) + self._keeping.flag

    def _schedule_due(self, num_steps: int) -> bool:
        schedule = self._built.schedule
        if schedule is None or schedule.every == "evaluation":
            return False
        return schedule.every == "step" or num_steps % self._built.order.steps_per_epoch == 0

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


def _loss(reduced: Reduced) -> float | None:
    return None if reduced.is_empty else reduced.loss


def _grad_norm(updated: Updated) -> float | None:
    return None if math.isnan(updated.grad_norm) and updated.skipped else updated.grad_norm
