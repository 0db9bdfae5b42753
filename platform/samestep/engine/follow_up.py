"""What is due between an update and the next step: hooks, evaluation, checkpoint."""

from __future__ import annotations

from dataclasses import asdict

import torch

from samestep.engine.appraisal import Appraisal
from samestep.engine.hooks import Hooks
from samestep.engine.keeping import Keeping
from samestep.engine.peers import Peers
from samestep.engine.recording import Recording
from samestep.engine.resume import Saved
from samestep.engine.setup import Built
from samestep.engine.survivor import Rest, Stage
from samestep.faults.progress import Phase, Progress
from samestep.names import Activity, Event
from samestep.telemetry.timesheet import Timesheet, during
from samestep.workload import Values


class FollowUp:
    """Does what is due after an update, each part once, whatever attempts break off in between.

    Args:
        built: the objects of the run.
        peers: the other workers.
        start: what the attempt began with, and how much of this was done then.
        hooks: those of the workload.
        appraisal: what evaluations decide.
        keeping: saves what is due.
        recording: is told of evaluations.
        progress: told what is being done.
        timesheet: counts the time of it.
        device: that of the model.

    Attributes:
        stage: how much is done after the last update.
        values: of the last step; None before the first of an attempt that no survivor began.
        evaluation: metrics of the last evaluation since the last update; None without one.
    """

    def __init__(
        self,
        *,
        built: Built,
        peers: Peers,
        start: Saved,
        hooks: Hooks,
        appraisal: Appraisal,
        keeping: Keeping,
        recording: Recording,
        progress: Progress,
        timesheet: Timesheet,
        device: torch.device,
    ) -> None:
        self._built = built
        self._peers = peers
        self._start = start
        self._hooks = hooks
        self._appraisal = appraisal
        self._keeping = keeping
        self._recording = recording
        self._progress = progress
        self._timesheet = timesheet
        self._device = device
        rest = start.rest
        self.stage = rest.stage
        self.values = Values(**rest.values) if rest.values else None
        self.evaluation = rest.evaluation
        self._evaluated_at = start.step if rest.evaluation is not None else -1
        self._is_best = rest.is_best

    def begin(self, values: Values) -> None:
        """An update is through: everything is due again."""
        self.stage, self.values = Stage.UPDATED, values
        self.evaluation, self._is_best = None, False

    def go_on(self, step: int, flag: int) -> None:
        """Does what is not done yet.

        Args:
            step: steps taken.
            flag: what the workers asked for in the last of them.
        """
        if self.stage < Stage.TOLD:
            assert self.values is not None
            self._progress.at(Phase.HOOKS, step=step)
            self._hooks.on_step(self.values)
            self.stage = Stage.TOLD
        if self.stage < Stage.EVALUATED:
            self._is_best = self._appraisal.is_due(step) and self.evaluate(step)
            self.stage = Stage.EVALUATED
        if self.stage < Stage.EPOCH_TOLD:
            assert self.values is not None
            if step % self._built.order.steps_per_epoch == 0:
                self._progress.at(Phase.HOOKS, step=step)
                self._hooks.on_epoch(self.values, self.evaluation_at(step))
            self.stage = Stage.EPOCH_TOLD
        if self.stage < Stage.SETTLED:
            if step < self._built.end_step:
                self._save(step, flag)
            self.stage = Stage.SETTLED

    @during(Activity.CHECKPOINT)
    def _save(self, step: int, flag: int) -> None:
        self._progress.at(Phase.CHECKPOINT, step=step)
        self._keeping.after_step(
            step, flag=flag, is_best=self._is_best, evaluation=self.evaluation_at(step)
        )

    @during(Activity.EVALUATION)
    def evaluate(self, step: int) -> bool:
        """Evaluates, once a step; returns whether the state is the best so far."""
        if self._built.evaluation is None or self._evaluated_at == step:
            return False
        metrics = self._built.evaluation.run(
            self._built.parts.model,
            self._peers,
            step=step,
            device=self._device,
            on_batch=lambda _: self._progress.at(Phase.EVALUATION, step=step),
        )
        self.evaluation, self._evaluated_at = metrics, step
        self._recording.event(
            Event.EVALUATION, step, {"metrics": metrics, "samples": self._built.evaluation.size}
        )
        if step == self._start.step and self._start.rest.stage >= Stage.EVALUATED:
            return False  # what was restored has what was decided then in it
        due = self._appraisal.is_due(step)
        return self._appraisal.take(metrics, step=step, decides=due)

    def evaluation_at(self, step: int) -> dict[str, float] | None:
        """Metrics of the evaluation after `step` steps; None without one."""
        return self.evaluation if self._evaluated_at == step else None

    def rest(self, step: int, *, begun: bool) -> Rest:
        """Where between two updates the state is.

        Args:
            step: steps taken.
            begun: `before_step` of the next one was called.
        """
        return Rest(
            stage=self.stage,
            begun=begun,
            values=None if self.values is None else asdict(self.values),
            evaluation=self.evaluation_at(step),
            is_best=self._is_best,
            best=self._appraisal.best,
        )
