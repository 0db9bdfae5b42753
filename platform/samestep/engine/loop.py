"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.engine import devices
from samestep.engine.appraisal import Appraisal
from samestep.engine.detection import Detection, RolledBack
from samestep.engine.ending import Ending
from samestep.engine.evidence import Evidence
from samestep.engine.fast import FastEngine
from samestep.engine.feed import Feed
from samestep.engine.final_model import hand_out
from samestep.engine.flag import Flag
from samestep.engine.follow_up import FollowUp
from samestep.engine.hooks import Hooks
from samestep.engine.keeping import SAVE_FLAG, Keeping
from samestep.engine.passing import pass_over
from samestep.engine.peers import Peers
from samestep.engine.recording import (
    Recording,
    record_before_update,
    step_record,
    step_timing,
    values_of,
)
from samestep.engine.result import result_of
from samestep.engine.resume import Saved
from samestep.engine.schedule import is_due
from samestep.engine.setup import Built, before_step
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.survivor import HELD_KEY, Held, Stage
from samestep.engine.update import apply_update
from samestep.errors import IncidentError, PeerLostError
from samestep.exact import numerics
from samestep.exact.order import ShardPlan
from samestep.faults.progress import Phase, Progress
from samestep.incidents.bundle import StateSource
from samestep.incidents.record import Incident
from samestep.incidents.rollback import Rollback
from samestep.names import Activity
from samestep.spec import JobSpec
from samestep.telemetry.finished import Finished
from samestep.telemetry.link import Link, Target
from samestep.telemetry.reports import Reporter
from samestep.telemetry.timesheet import Timesheet, during
from samestep.workload import Values, Workload

logger = logging.getLogger(__name__)

LAST_SAVE_S = 10.0
"""How long a save under way is waited for when training ends with an error."""
FLUSH_S = 60.0


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
        on_step: Callable[[int, int], None],
        progress: Progress,
        wants: Callable[[], int],
        on_finished: Callable[[Finished], None] | None,
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
        self._start = start
        self._step = start.step
        # That of the first step was called when the group formed: the canary needs it too.
        self._begun = start.rest.stage is Stage.SETTLED
        self._whole, self._computing = True, False
        self._wants = wants
        self._recording = Recording(link, attempt)
        self._on_step = on_step
        self._progress = progress
        self._device = engine.main.device
        self._appraisal = Appraisal(
            spec,
            schedule=built.schedule,
            steps_per_epoch=built.order.steps_per_epoch,
            early_stop=start.early_stop,
            best=start.rest.best,
        )
        self._data_wait_s = self._waited_before_s = 0.0
        self._timesheet = Timesheet()
        self._reporter = Reporter(
            target,
            attempt=attempt,
            world_rank=peers.world_rank,
            # Not by way of the loop: a circle would keep the group's sockets open after an error.
            device_memory=partial(devices.memory, self._device),
            gpus=partial(devices.gpu_loads, [replica.device for replica in engine.replicas]),
        )
        self._flag = 0
        self._detection = Detection(
            spec,
            state=start.detection,
            left_out=start.left_out,
            num_rollbacks=start.num_rollbacks,
            target=target,
            attempt=attempt,
            tells=link is not None,
        )
        self._keeping = Keeping(
            spec=spec,
            built=built,
            appraisal=self._appraisal,
            detection=self._detection,
            recording=self._recording,
            peers=peers,
            run=run,
            target=target,
            link=link,
            attempt=attempt,
            start=start,
            fingerprint=fingerprint,
        )
        self._follow_up = FollowUp(
            built=built,
            peers=peers,
            start=start,
            hooks=Hooks(built.workload, seed=spec.seed, device=self._device),
            appraisal=self._appraisal,
            keeping=self._keeping,
            recording=self._recording,
            progress=progress,
            timesheet=self._timesheet,
            device=self._device,
        )
        self._evidence = Evidence(
            spec=spec,
            built=built,
            fetcher=feed.fetcher,
            run=run,
            target=target,
            fingerprint=fingerprint,
        )
        has_own = type(built.workload).before_step is not Workload.before_step
        model = built.parts.model
        self._touched = [*model.parameters(), *model.buffers()] if has_own else []

    def train(self) -> Ending:
        """Takes steps; ends with a checkpoint and the run's result at the recorder.

        Or else the workers park, or the run goes back: it then goes on in another attempt.
        """
        back: Rollback | None = None
        try:
            with self._reporter:
                ended = self._train()
        except RolledBack as found:
            back = found.rollback
        except IncidentError:
            # All have decided alike. Who ends first would end the others: worker 0 may write.
            self._evidence.finish()
            with suppress(PeerLostError):
                self._peers.gather("stopped")()
            self._keeping.close(wait_s=LAST_SAVE_S, keep_images=False)
            raise
        except BaseException as error:
            # A lost peer's part will not come; what lies in shared memory is for the next attempt.
            is_lost = isinstance(error, PeerLostError)
            self._evidence.go_on()
            self._keeping.close(wait_s=0 if is_lost else LAST_SAVE_S, keep_images=is_lost)
            raise
        if back is not None:
            self._keeping.close(wait_s=LAST_SAVE_S, keep_images=True)
            self._go_back(back)
            return Ending.ROLLED_BACK
        self._keeping.close(wait_s=0 if ended else LAST_SAVE_S, keep_images=not ended)
        return Ending.AS_PLANNED if ended else Ending.PARKED

    def _train(self) -> bool:
        with self._timesheet.on(Activity.CHECKPOINT):
            self._progress.at(Phase.CHECKPOINT, step=self._step)
            self._keeping.begin()
        self._catch_up()
        end_step, flag = self._built.end_step, Flag.GO_ON
        self._follow_up.go_on(self._step, self._flag)
        while self._step < end_step and not flag and self._appraisal.stop_reason is None:
            self._on_step(self._step, end_step - self._step)
            flag = self._take_step()
            self._evidence.go_on()
            self._follow_up.go_on(self._step, self._flag)
        done = self._step >= end_step or self._appraisal.stop_reason is not None
        if not done and flag in (Flag.PARK, Flag.PARK_AND_SAVE):
            self._progress.at(Phase.CHECKPOINT, step=self._step)
            self._evidence.finish(hurries=True)  # this process may not be in the next group
            if flag is Flag.PARK_AND_SAVE:
                self._end()
            return False
        if done:
            self._on_step(self._step, 0)
            self._follow_up.evaluate(self._step)
        # Bounded by itself, tries and all: nobody here counts as hanging meanwhile.
        self._progress.at(Phase.CHECKPOINT, step=self._step)
        self._evidence.finish(hurries=not done)  # while the recorder is there
        self._end()
        self._progress.at(Phase.ENDING, step=self._step)
        self._finish(done)
        # Nobody leaves before the end is written: a worker that is gone looks like a fault.
        self._peers.gather("end")()
        return True

    def _go_back(self, rollback: Rollback) -> None:
        """The decision, which every worker has taken, is entered before any of them goes on."""
        self._whole = False  # what this worker has is past the steps that stay
        if self._link is not None:
            self._link.flush(FLUSH_S)
            self._recording.require_current()
            self._target.call("roll_back", self._attempt, rollback.to_json())
        self._peers.gather("rolled back")()

    @property
    def step(self) -> int:
        """The step that is being taken; hooks and evaluation belong to the one before them."""
        is_behind = self._follow_up.stage < Stage.SETTLED or self._step >= self._built.end_step
        return max(0, self._step - int(is_behind))

    def held(self, run_uri: str) -> Held | None:
        """What this worker has of the run when the attempt breaks off; None: nothing whole."""
        if not self._whole or (self._computing and not self._engine.rewind()):
            return None
        return Held(
            run_uri=run_uri,
            attempt=self._attempt,
            state=self._state(),
            built=self._built,
            records=self._recording.rest(),
        )

    def keep_evidence(self, incident: Incident) -> None:
        """Writes the bundle of the incident that has ended the attempt in this worker."""
        if self._whole and (not self._computing or self._engine.rewind()):
            self._evidence.keep(
                incident,
                self._state,
                source=StateSource.LIVE,
                wants_samples=self._begun,  # else before_step raised: nothing was read
                records=self._recording.rest(),
            )

    def _state(self) -> State:
        """The present state, with where between two updates it is."""
        rest = self._follow_up.rest(self._step, begun=self._begun)
        return self._keeping.state(self._step, {HELD_KEY: rest.to_extras()})

    def _catch_up(self) -> None:
        """Of a crash nobody kept anything: the state at hand is from before its step, mostly."""
        if self._link is not None and self._attempt > 1:
            kind = self._start.source
            source = StateSource.START if kind is None else StateSource(str(kind))
            self._evidence.catch_up(self._step, self._state, source)

    @during(Activity.CHECKPOINT)
    def _end(self) -> None:
        self._keeping.end(self._step, evaluation=self._follow_up.evaluation_at(self._step))

    def _finish(self, done: bool) -> None:
        if self._link is None:
            return
        appraisal = self._appraisal
        if appraisal.warning is not None:
            self._target.call("say", appraisal.warning)
        if done and self._on_finished is not None:
            hand_out(
                self._built,
                self._on_finished,
                run_uri=self._run.uri,
                step=self._step,
                best=appraisal.best,
                device=self._device,
            )
        result = result_of(
            appraisal,
            done=done,
            is_early=self._step < self._built.end_step,
            step=self._step,
            digest=self._keeping.digest,
            evaluation=self._follow_up.evaluation,
            timing=self._timesheet.lap(),
        )
        self._target.call("finish", self._attempt, result)

    @during(Activity.TRAINING)
    def _take_step(self) -> Flag:
        spec, built, step = self._spec, self._built, self._step
        started = time.perf_counter()
        self._data_wait_s, self._timesheet.num_samples = 0.0, 0
        self._waited_before_s = self._peers.wait_s
        numerics.require_pinned(spec)
        if not self._begun:
            self._before_step()
        plans = built.order.shards_of(step)
        passes_over = self._detection.passes_over(step)
        reduced = self._pass_over() if passes_over else self._compute(step, plans)
        self._progress.at(Phase.UPDATE, step=step)
        with self._timesheet.on(Activity.CHECKPOINT):
            self._keeping.after_exchange()
        self._computing = self._whole = False  # only an update that is through gives a whole state
        updated = apply_update(
            spec,
            built.parts,
            reduced.parameters,
            step=step,
            device=self._device,
            schedule_due=is_due(built.schedule, step + 1, built.order.steps_per_epoch),
            leaves_out=partial(
                self._detection.leaves_out, step, reduced, partial(self._keep, plans, reduced)
            ),
        )
        if updated.skipped and not passes_over:
            self._engine.main.keeper.undo_step()
        self._engine.sync_replicas()
        values = values_of(step, plans[0].epoch, reduced, updated)
        self._follow_up.begin(values)
        self._step, self._begun, self._whole = step + 1, False, True
        self._recording.note_delivered(reduced.delivered)
        ids = [list(plan.ids) for plan in plans]
        digest = None
        try:
            if spec.digest_every and self._step % spec.digest_every == 0:
                self._progress.at(Phase.CHECKPOINT, step=self._step)
                digest = self._keeping.agreed_digest(self._step)
        except PeerLostError:
            # The step is taken, whoever is gone: another attempt goes on behind it.
            self._record(values, ids, reduced, None, started)
            raise
        self._record(values, ids, reduced, digest, started)
        self._detection.look_at_weights(built.parts.model, step, self._keep_weights)
        self._flag = reduced.flag
        return Flag(reduced.flag % SAVE_FLAG)

    def _keep(
        self,
        plans: list[ShardPlan],
        reduced: Reduced,
        incident: Incident,
        grad_norm: float,
        applied: bool,
    ) -> None:
        """Keeps evidence of what was found in a step, right before its update."""
        optimizer = self._built.parts.optimizer
        record = record_before_update(plans, reduced, optimizer, grad_norm, applied=applied)
        with self._engine.main.keeper.as_before():
            self._evidence.keep(
                incident,
                self._state,
                source=StateSource.LIVE,
                if_idle=True,
                record=record,
                records=self._recording.rest(),
            )

    def _keep_weights(self, incident: Incident) -> None:
        """Keeps evidence of weights that the last update has left not finite."""
        self._evidence.keep_behind(incident, self._state, records=self._recording.rest())

    def _compute(self, step: int, plans: list[ShardPlan]) -> Reduced:
        self._computing = True
        return self._engine.compute(
            step,
            plans,
            self._take,
            self._wanted(),
            self._recording.delivered,
            take_apart=self._feed.take_apart,
        )

    def _pass_over(self) -> Reduced:
        return pass_over(
            self._peers,
            shards=self._spec.shards,
            flag=self._wanted(),
            delivered=self._recording.delivered,
        )

    def _before_step(self) -> None:
        self._progress.at(Phase.BEFORE_STEP, step=self._step)
        if self._touched:
            self._keeping.wait_until_copied()
        versions = [tensor._version for tensor in self._touched]
        self._whole = False
        try:
            before_step(self._spec, self._built.workload, self._engine.replicas, self._step)
            self._whole = self._begun = True
        finally:
            if not self._whole:  # it raised: the state is whole if nothing was changed so far
                self._whole = versions == [tensor._version for tensor in self._touched]

    def _wanted(self) -> int:
        if self._link is None:
            return self._wants()
        wanted = Flag.STOP if self._link.stop_requested else self._wants()
        return int(wanted) + self._keeping.flag

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
        values: Values,
        ids: list[list[int]],
        reduced: Reduced,
        digest: str | None,
        started: float,
    ) -> None:
        self._recording.require_current()
        waited_s = reduced.traffic.wait_s + self._peers.wait_s - self._waited_before_s
        lap = self._timesheet.lap(waited_s=waited_s)
        self._reporter.add(lap, num_samples=self._timesheet.num_samples)
        timing = step_timing(reduced, lap, began_s=started, data_wait_s=self._data_wait_s)
        timing |= self._keeping.news()
        self._recording.step(
            step_record(values, ids=ids, reduced=reduced, digest=digest, timing=timing)
        )
