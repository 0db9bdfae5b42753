"""Steps of a run taken again in this process, from a state on: the same step function, no group.

Nothing is written: no checkpoint, no ledger, no record of incidents. What the run left out is left
out again, by what its ledger says; the detectors do not decide a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from samestep.checkpoint.state import Parts, State, collect, restore
from samestep.engine.aftermath import is_aftermath, is_in
from samestep.engine.appraisal import Appraisal
from samestep.engine.audit import Digests, Task
from samestep.engine.auditor import compute_apart
from samestep.engine.buffers import BufferKeeper
from samestep.engine.canary import nominal_weight
from samestep.engine.hooks import Hooks
from samestep.engine.passing import pass_over
from samestep.engine.peers import Peers
from samestep.engine.recording import step_record, values_of
from samestep.engine.schedule import is_due
from samestep.engine.setup import before_step
from samestep.engine.step import Reduced, Replica, StepEngine
from samestep.engine.survivor import Rest, Stage
from samestep.engine.update import apply_update
from samestep.errors import CannotReplayError
from samestep.exact import numerics
from samestep.exact.digest import live_digest
from samestep.exact.order import ShardPlan
from samestep.faults.progress import Phase
from samestep.names import IncidentKind
from samestep.replay.bench import Bench, Place
from samestep.replay.source import Source, Start
from samestep.spec import JobSpec
from samestep.telemetry.records import StepRecord
from samestep.workload import Values, Workload

JUDGED: Final = (IncidentKind.NON_FINITE, IncidentKind.LOSS_SPIKE, IncidentKind.GRAD_SPIKE)
"""Kinds of incidents that are found before the update: without a record, there was none."""

NOTHING_DONE: Final = Rest(stage=Stage.UPDATED, begun=False)

Adjust = Callable[[Parts], None]
"""Changes what was restored, before the first step (what if)."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that went through.

    Attributes:
        record: what it came to, as the ledger has it; without timing.
        values: the same for hooks.
        grad_norm: also where the update is left out, and the record does not tell it; None without
            a gradient.
    """

    record: StepRecord
    values: Values
    grad_norm: float | None


class Taker:
    """Builds a run's workload, restores the source's state, and takes one step after another.

    Torch's global settings are those of the job from here on: for callers that live on, put them
    back (`numerics.GlobalsKept`).

    Args:
        source: where state, samples and records come from.
        spec: the source's, or a changed one.
        place: where to compute.
        last_step: that will be taken: decides whether the workload's data is needed.
        adjust: called on what was restored.
        leaves_out: leave out what the run left out; False: apply every update that can be.

    Attributes:
        step: the next one.
        is_behind: the source's state is from behind the update of its step: hooks and evaluation
            are what remains of it.

    Raises:
        CannotReplayError: workload, data or device are not here, or the state does not fit.
    """

    def __init__(
        self,
        source: Source,
        *,
        spec: JobSpec,
        place: Place,
        last_step: int,
        adjust: Adjust | None = None,
        leaves_out: bool = True,
    ) -> None:
        self._source, self._spec, self._place = source, spec, place
        self._leaves_out = leaves_out
        self._expected: Mapping[int, StepRecord] = source.records()
        start = source.start()
        self.step = 0 if start is None else start.state.step
        self.is_behind = self.step == source.step + 1
        wanted = range(self.step, last_step + 1)
        has_data = not all(source.has_samples(step) for step in wanted)
        has_data = has_data or self._evaluates_again
        self._bench = Bench(source, spec=spec, place=place, has_data=has_data)
        self._bench.restore(start)
        built, self.parts = self._bench.built, self._bench.parts
        extras = start.state.extras if start is not None else {}
        self._dataset_size = extras.get("dataset_size") or (built.dataset_size if built else 0)
        per_epoch = extras.get("steps_per_epoch") or (built.order.steps_per_epoch if built else 0)
        self.steps_per_epoch = int(per_epoch)
        self._appraisal = Appraisal(
            spec,
            schedule=self._bench.schedule,
            steps_per_epoch=self.steps_per_epoch,
            early_stop=extras.get("early_stop"),
        )
        model = self.parts.model
        self.replica = Replica(
            device=place.device,
            model=model,
            shards=range(spec.shards),
            loss_of=partial(self.workload.loss, model),
            keeper=BufferKeeper(model),
        )
        self._begun, self._start, self._adjust = False, start, adjust
        if adjust is not None:
            adjust(self.parts)
        self.engine = StepEngine(
            spec=spec,
            workload=self.workload,
            replicas=[self.replica],
            peers=Peers(None),
            group=None,
            scale=self.parts.scaled,
            progress=place.progress,
        )
        self._re_enact_rest(start)
        self.engine.nominal_weight = self._nominal_weight(extras)

    @property
    def workload(self) -> Workload:
        """The run's."""
        return self._bench.workload

    @property
    def spec(self) -> JobSpec:
        """The job that steps are taken by."""
        return self._spec

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Of the numerics here."""
        return self._bench.fingerprint

    @property
    def has_data(self) -> bool:
        """The workload's data is here: any step can be taken."""
        return self._bench.built is not None

    def plans(self, step: int) -> list[ShardPlan]:
        """All shards of a step."""
        return self._bench.plans(step)

    def batch(self, plan: ShardPlan) -> Any:
        """A shard's batch on the device (see `Bench.take`)."""
        return self._bench.take(plan, self._place.device)

    def sample(self, plan: ShardPlan, place: int) -> Any:
        """A sample of a shard as a batch of its own, on the device; the data must be here."""
        return self._bench.take_sample(plan, place)

    def begin_step(self) -> None:
        """Calls `before_step` of the next step, once.

        Where the state was taken after that call, it has what the call did to the model: the
        tensors are put back, as in training (see `forming.re_enact`).

        Raises:
            UserCodeError: it raised.
        """
        if self._begun:
            return
        self._place.progress.at(Phase.BEFORE_STEP, step=self.step)
        before_step(self._spec, self.workload, [self.replica], self.step)
        start, self._start = self._start, None
        if start is not None and start.rest.begun:
            self._put_back(start)
        self._begun = True

    def state(self) -> State:
        """A copy of the present state, on the CPU: what another taker may start from."""
        extras = {
            "nominal_weight": self.engine.nominal_weight,
            "dataset_size": self._dataset_size,
            "steps_per_epoch": self.steps_per_epoch,
            **self._appraisal.state,
        }
        live = collect(self.parts, step=self.step, extras=extras)
        tensors = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in live.tensors.items()
        }
        return State(step=live.step, tensors=tensors, values=deepcopy(live.values))

    def gradients_apart(self, shards: tuple[int, ...]) -> Digests:
        """Digests of the gradients of a shard of the next step, as an audit takes them.

        To be called after `begin_step`; no trace is left.

        Args:
            shards: the shard, after the one it is added to in place, if there is one.

        Raises:
            SamestepError: whatever forward and backward raise.
        """
        self.engine.follow_trainable()
        here = (0, 0)
        task = Task(step=self.step, shard=shards[-1], computed=shards, owner=here, auditor=here)
        return compute_apart(self.engine, task, self.plans(self.step), self._bench.take)

    def take(self, on_reduced: Callable[[Reduced], None] | None = None) -> Taken:
        """Takes the next step.

        Args:
            on_reduced: called when the gradients are reduced, before the update.

        Raises:
            SamestepError: whatever the step raises.
        """
        spec, step = self._spec, self.step
        numerics.require_pinned(spec)
        self.begin_step()
        plans = self.plans(step)
        passed_over = self._is_passed_over(step)
        reduced = (
            pass_over(Peers(None), shards=spec.shards, flag=0, delivered=0)
            if passed_over
            else self.engine.compute(step, plans, self._bench.take, 0)
        )
        self._place.progress.at(Phase.UPDATE, step=step)
        if on_reduced is not None:
            on_reduced(reduced)
        updated = apply_update(
            spec,
            self.parts,
            reduced.parameters,
            step=step,
            device=self._place.device,
            schedule_due=is_due(self._bench.schedule, step + 1, self.steps_per_epoch),
            leaves_out=lambda grad_norm, overflow: self._is_left_out(step),
        )
        if updated.skipped and not passed_over:
            self.replica.keeper.undo_step()
        self.step, self._begun = step + 1, False
        values = values_of(step, plans[0].epoch, reduced, updated)
        digest, record = None, self._expected.get(step)
        if record is not None and record.state_digest is not None:
            digest = live_digest(collect(self.parts, step=self.step, extras={}).tensors)
        ids = [list(plan.ids) for plan in plans]
        taken = step_record(values, ids=ids, reduced=reduced, digest=digest, timing={})
        norm = None if reduced.is_empty else updated.grad_norm
        return Taken(record=taken, values=values, grad_norm=norm)

    def settle(self, values: Values, *, with_hooks: bool, rest: Rest = NOTHING_DONE) -> None:
        """Does what follows an update in training, as far as later steps depend on it.

        Args:
            values: of the step just taken.
            with_hooks: call the workload's hooks too, and evaluate where that is due: an incident
                may come from there.
            rest: what is done of it already.

        Raises:
            CannotReplayError: the schedule hangs on an evaluation whose data is not here.
            UserCodeError: a hook or `evaluate` raised.
        """
        hooks = Hooks(self.workload, seed=self._spec.seed, device=self._place.device)
        if with_hooks and rest.stage < Stage.TOLD:
            hooks.on_step(values)
        metrics = rest.evaluation
        decides = self._bench.schedule is not None and self._bench.schedule.every == "evaluation"
        due = rest.stage < Stage.EVALUATED and self._appraisal.is_due(self.step)
        if (due and (decides or with_hooks)) or (with_hooks and self._evaluates_again):
            metrics = self._evaluate(needed=decides and due)
        is_end = self.step % self.steps_per_epoch == 0
        if with_hooks and rest.stage < Stage.EPOCH_TOLD and is_end:
            hooks.on_epoch(values, metrics)

    def settle_rest(self, *, with_hooks: bool) -> None:
        """The same of the step before the state, where that was taken behind its update.

        Args:
            with_hooks: as of `settle`.

        Raises:
            CannotReplayError: what is needed for it is not here.
            UserCodeError: a hook or `evaluate` raised.
        """
        assert self._start is not None, "a state of the run's start is behind no update"
        rest = self._start.rest
        if rest.values is not None:
            self.settle(Values(**rest.values), with_hooks=with_hooks, rest=rest)

    def go_back(self, state: State) -> None:
        """Puts a state back that `state` gave; `before_step` of its step was called already."""
        self.engine.rewind()  # modes and buffers, where a step was broken off
        restore(state, self.parts)
        self.step, self._begun = state.step, True

    def close(self) -> None:
        """Takes hooks and gradients off the model."""
        self.engine.close()

    def _evaluate(self, *, needed: bool) -> dict[str, float] | None:
        if self._bench.evaluation is None:
            if needed and not self.has_data:
                raise CannotReplayError(
                    f"the learning rate hangs on the evaluation after {self.step} steps, and the "
                    "evaluation's data is not in the bundle: replay the step from the run's own "
                    "directory, where the data is"
                )
            return None
        metrics = self._bench.evaluation.run(
            self.parts.model,
            Peers(None),
            step=self.step,
            device=self._place.device,
            on_batch=lambda _: self._place.progress.at(Phase.EVALUATION, step=self.step),
        )
        if needed:
            self._appraisal.take(metrics, step=self.step, decides=True)
        return metrics

    @property
    def _evaluates_again(self) -> bool:
        """The incident happened in an evaluation, also one that no setting makes due: the last."""
        incident = self._source.incident
        return incident is not None and is_in(incident, Phase.EVALUATION)

    def _is_passed_over(self, step: int) -> bool:
        """The run did not compute it, or no shard had weight, which comes to the same."""
        record = self._expected.get(step)
        if record is None or not (self._leaves_out and record.skipped):
            return False
        return record.loss is None and not any(record.shard_weights)

    def _is_left_out(self, step: int) -> bool:
        """The run left its update out, or stopped before it."""
        if not self._leaves_out:
            return False
        record, incident = self._expected.get(step), self._source.incident
        if record is not None:
            return record.skipped
        if incident is None or incident.step != step or is_aftermath(incident):
            return False
        return incident.kind in JUDGED

    def _re_enact_rest(self, start: Start | None) -> None:
        """Does what was still to be done after the last update when the state was taken."""
        if start is None or start.rest.stage is Stage.SETTLED:
            return
        rest = start.rest
        before_step(self._spec, self.workload, [self.replica], self.step - 1)
        self._put_back(start)
        if rest.stage < Stage.EVALUATED and rest.values is not None and not self.is_behind:
            self.settle(Values(**rest.values), with_hooks=False)

    def _put_back(self, start: Start) -> None:
        restore(start.state, self.parts)
        if self._adjust is not None:
            self._adjust(self.parts)

    def _nominal_weight(self, extras: Mapping[str, Any]) -> float:
        known = extras.get("nominal_weight") or self._spec.nominal_weight
        if known is not None:
            return float(known)
        self.begin_step()  # the run's canary came after it
        plan = self.plans(0)[0]
        [(_, result)] = self.engine.probe(plan, self._bench.take)
        return nominal_weight(None, result, self.engine.nominal_weight)
