"""Ray Train's controller and its policies, for a group that never loses what it has.

Checked with Ray 2.60. What is changed: the group's size is that of the seats with a process
that is ready; processes outlive groups; a resize waits until all workers have parked; failures
are judged by cause. See `muster`, `policy` and `ray_private_group`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray._private.state import state as ray_state
from ray.train.v2._internal.execution.callback import TrainContextCallback, WorkerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import (
    TrainControllerLoopIterationResult,
)
from ray.train.v2._internal.execution.controller.state import (
    ErroredState,
    ReschedulingState,
    RunningState,
    ShuttingDownState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import (
    WorkerGroup,
    WorkerGroupContext,
    WorkerGroupPollStatus,
)
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError

from samestep.checkpoint.storage import Storage
from samestep.cluster import process, rendezvous
from samestep.cluster.crew import Crew
from samestep.cluster.interruption import interrupted_result
from samestep.cluster.judge import Judge
from samestep.cluster.muster import Muster, survives
from samestep.cluster.notes import Notes
from samestep.cluster.process import Whereabouts
from samestep.cluster.ray_private_faults import faults_of, is_echo
from samestep.cluster.ray_private_group import SteadyGroup
from samestep.cluster.ray_private_worker import RayHand, SteadyStatus, hire
from samestep.cluster.recovery import Stopwatch
from samestep.cluster.rehearsal import Part
from samestep.cluster.seats import NODE_ID_LABEL, Seats
from samestep.errors import PlacementError, SamestepError
from samestep.incidents.wrong_hosts import wrong_hosts
from samestep.spec import JobSpec
from samestep.spec_incidents import AVOID

LOOK_S: Final = 0.5
"""How often seats are looked at while training runs."""
PAUSE_S: Final = 0.05
"""Between two looks while there are too few workers; Ray's loop would spin."""
ECHO_S: Final = 1.0
"""How long survivors' errors wait for the error of the worker that was lost."""
TELLING_S: Final = 65.0
"""The same, while that worker says that it still writes down what happened."""
SILENT_MARGIN_S: Final = 10.0
"""A process that answers nothing is given up later than by its own watchdog and by its peers."""
BUNDLES_S: Final = 60.0
"""How long the end of a run waits for bundles: of attempts that failed, whose workers went on."""
STARTING_S: Final = 15.0
"""How long the end of a run waits for processes to be there, so that they can be ended."""
LEAVE: Final = "leave"
"""Why the workers park when the controller has not asked: one of them was told to end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a controller needs to know of a run.

    Attributes:
        spec: the job.
        resources: of one worker.
        part: what worker processes rehearse with.
        is_local: the cluster ends with the run.
    """

    spec: JobSpec
    resources: Mapping[str, float]
    part: Part
    is_local: bool = False


class ElasticScaling(ScalingPolicy):
    """Asks the muster; holds a resize back until the workers have parked."""

    def __init__(self, scaling_config: Any, controller: ElasticController) -> None:
        super().__init__(scaling_config)
        self._controller = controller
        self._looked_at = 0.0
        self._asked = False

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """A group of whoever is ready, or another look a little later."""
        self._asked = False
        num_workers = self._controller.assemble()
        if num_workers is None:
            time.sleep(PAUSE_S)
            return NoopDecision()
        return self._resize(num_workers)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        """Asks the workers to park where the group should be another, and waits for that."""
        everyone = whereabouts(worker_group_status)
        if everyone and all(there.parked_s is not None for there in everyone):
            if len(everyone) > 1 and all(there.leaving for there in everyone):
                self._controller.interrupt(everyone)
                self._asked = True
                return NoopDecision()
            self._controller.note_parked(everyone)
            self._asked = False
            return self._resize(len(everyone))
        now = time.monotonic()
        if not self._asked and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            over = any(there.over for there in everyone)
            self._asked = self._controller.review(over=over)
        return NoopDecision()

    def _resize(self, num_workers: int) -> ResizeDecision:
        resources = self.scaling_config._resources_per_worker_not_none
        return ResizeDecision(num_workers=num_workers, resources_per_worker=resources)

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Asks for nothing: pending seats are the demand."""

    async def before_controller_shutdown(self) -> None:
        """Nothing was asked for."""

    def before_controller_abort(self) -> None:
        """Nothing was asked for."""


class ElasticFailures(FailurePolicy):
    """Judges failures by cause."""

    def __init__(self, controller: ElasticController) -> None:
        super().__init__(FailureConfig(max_failures=-1))
        self._controller = controller

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Goes on or ends the run; never raises, since that would end it without a word."""
        try:
            retry = self._controller.judge(training_failed_error)
        except Exception:  # whatever is wrong here, the failure itself must be what is told
            logger.exception("a failure could not be judged")
            retry = False
        return FailureDecision.RETRY if retry else FailureDecision.RAISE


class ElasticController(TrainController):
    """Ray Train's controller over seats, kept processes and parking."""

    def __init__(self, *, plan: Plan, **kwargs: Any) -> None:
        spec, resources = plan.spec, dict(plan.resources)
        self._plan = plan
        self._notes = Notes(plan.part.target)
        self._judge = Judge(spec.faults.retries, self._notes)
        self._stopwatch = Stopwatch()
        self._seats = Seats(spec.workers.max, resources, ray_state.get_draining_nodes)
        self._crew: Crew[RayHand] = Crew(
            self._hire, num_spares=0 if spec.resources.gpu else spec.faults.spares
        )
        self._muster = Muster(spec, resources=resources, places=self._seats, crew=self._crew)
        self._avoids = spec.incidents.audit == AVOID
        self._used_all_the_same: list[str] = []
        self._members: list[RayHand] = []
        self._next: list[RayHand] = []
        self._running_since = time.monotonic()
        self._why_parked = LEAVE
        self._ray_parts: Any = None
        run_config = kwargs["train_run_context"].run_config
        self._runtime_env = WorkerGroup._get_worker_runtime_env(run_config.worker_runtime_env)
        scaling = ElasticScaling(kwargs["train_run_context"].scaling_config, self)
        kwargs |= {"scaling_policy": scaling, "failure_policy": ElasticFailures(self)}
        super().__init__(**kwargs)
        self._avoid(self._known_wrong(plan.part.run_uri))
        rendezvous.make_ready()

    def assemble(self) -> int | None:
        """Picks who starts next; None while there are too few.

        Raises:
            PlacementError: that takes too long.
        """
        if self._judge.must_wait():
            return None
        try:
            members = self._muster.assemble(self._members)
        except TimeoutError as error:
            raise PlacementError(str(error)) from None
        if members is None:
            self._tell_wait()
            return None
        self._next = members
        self._tell_avoided(members)
        return len(members)

    def review(self, *, over: bool) -> bool:
        """Whether the workers were asked to park, since others should work."""
        calm_s = time.monotonic() - self._running_since
        found = self._muster.review(self._members, calm_s, over=over)
        if found is None:
            return False
        why, successors = found
        save = not survives(self._members, successors)
        self._why_parked = why
        for hand in self._members:
            hand.actor.execute.remote(process.ask_to_park, save)
        return True

    def note_parked(self, everyone: list[Whereabouts]) -> None:
        """Training stands still since the first worker parked."""
        ago_s = max(there.parked_s or 0.0 for there in everyone)
        own = next((there.parked_for for there in everyone if there.parked_for), "")
        self._stopwatch.stop(
            own or self._why_parked, "", ago_s=ago_s, workers=len(self._members), planned=True
        )
        self._why_parked = LEAVE

    def interrupt(self, everyone: list[Whereabouts]) -> None:
        """Ends the run: all its workers were told to end, and have saved the state they parked at.

        One worker alone that is told so is replaced, as one of several is.
        """
        result = interrupted_result(Storage.at(self._plan.part.run_uri), "SIGTERM to all workers")
        self._notes.put("finish", max(there.attempt for there in everyone), result)
        for hand in self._members:
            hand.actor.execute.remote(process.dismiss)

    def judge(self, error: TrainingFailedError) -> bool:
        """Whether to go on after a failure."""
        group = self._worker_group
        hosts = group.hosts() if isinstance(group, SteadyGroup) else {}
        status = group.get_latest_poll_status() if group and group.has_started() else None
        everyone, faults = whereabouts(status), faults_of(error, hosts)
        self._avoid([fault.wrong_host for fault in faults if fault.wrong_host])
        verdict = self._judge.decide(faults, everyone)
        ages = [there.failed_s for there in everyone if there.failed_s is not None]
        self._stopwatch.stop(
            str(verdict.first.cause),
            verdict.message,
            ago_s=max(ages, default=None),
            workers=len(self._members),
            planned=False,
        )
        return verdict.retry

    def _tell_wait(self) -> None:
        """Once in a wait: what it is for."""
        text = self._muster.waits_for()
        if text:
            logger.warning(text)
            self._notes.put("say", text)

    def _known_wrong(self, run_uri: str) -> Sequence[str]:
        """Nodes that audits of earlier attempts found to compute wrongly."""
        try:
            return wrong_hosts(Storage.at(run_uri)) if self._avoids else ()
        except SamestepError as error:  # of a run that may well go on without it
            logger.warning("which nodes are to be avoided is not known: %s", error)
            return ()

    def _avoid(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            if not self._avoids or not self._muster.avoid(host):
                continue
            text = (
                f"keeping away from node {host}, which computed wrongly, as long as workers.min "
                f"({self._plan.spec.workers.min}) find room elsewhere (incidents.audit: avoid)"
            )
            logger.warning(text)
            self._notes.put("say", text)

    def _tell_avoided(self, members: Sequence[RayHand]) -> None:
        """Once: a node to be avoided has to be used."""
        needed = self._muster.avoided_among(members)
        if needed and needed != self._used_all_the_same:
            text = (
                f"node {', '.join(needed)} computed wrongly and is used all the same: workers.min "
                f"({self._plan.spec.workers.min}) find no room elsewhere"
            )
            logger.warning(text)
            self._notes.put("say", text)
        self._used_all_the_same = needed

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        status = await super()._poll_workers()
        start = time.monotonic()
        while time.monotonic() - start < patience_s(status):
            await asyncio.sleep(0.02)
            assert self._worker_group is not None
            status = self._worker_group.poll_status(timeout=self._health_check_interval_s)
        if not status.errors:
            self._judge.saw(whereabouts(status))
            again = self._stopwatch.look(whereabouts(status), len(status.worker_statuses))
            if again is not None:
                self._running_since = time.monotonic()
                self._notes.put("recovered", *again)
        return status

    def _make_and_handle_scaling_decision_for_non_running_worker_group(
        self, controller_state: TrainControllerState
    ) -> TrainControllerLoopIterationResult:
        if self._worker_group:  # its processes are the ones to choose from
            self._shutdown_worker_group()  # type: ignore[no-untyped-call]
        try:
            return super()._make_and_handle_scaling_decision_for_non_running_worker_group(
                controller_state
            )
        except PlacementError as error:
            failed = ControllerError(error)
            self.judge(failed)
            return self._gone_to(ShuttingDownState(ErroredState(training_failed_error=failed)))

    def _execute_resize_decision(
        self, decision: ResizeDecision
    ) -> TrainControllerLoopIterationResult:
        if self._worker_group:
            self._shutdown_worker_group()  # type: ignore[no-untyped-call]
            if self.assemble() is None:
                waiting = ControllerError(PlacementError("too few workers are ready"))
                return self._gone_to(ReschedulingState(training_failed_error=waiting))
        self._start_worker_group(len(self._next), decision.resources_per_worker)
        return self._gone_to(RunningState())

    def _start_worker_group(self, num_workers: int, resources_per_worker: dict[str, float]) -> None:
        context = WorkerGroupContext(
            run_attempt_id=self._run_attempt_id,
            train_fn_ref=self._train_fn_ref,
            num_workers=num_workers,
            resources_per_worker=resources_per_worker,
        )
        group = SteadyGroup(
            self._train_run_context,
            context,
            self._worker_group_callbacks_to_propagate,
            crew=self._crew,
            members=self._next,
            silent_s=self._plan.spec.faults.hang_timeout_s + SILENT_MARGIN_S,
        )
        self._members = self._next
        group.start()
        self._worker_group = group
        self._running_since = time.monotonic()

    async def _shutdown(self) -> TrainControllerLoopIterationResult:
        if isinstance(self._worker_group, SteadyGroup):
            self._worker_group.is_last = True
        result = await super()._shutdown()
        written = [
            hand.actor.execute.remote(process.settle_bundles, BUNDLES_S)
            for hand in self._members
            if not hand.is_dead()
        ]
        if written:
            ray.wait(written, num_returns=len(written), timeout=BUNDLES_S)
        # A process that is only starting when its cluster goes looks for it for a minute.
        end = time.monotonic() + STARTING_S
        while self._plan.is_local and time.monotonic() < end:
            if all(hand.has_come() for hand in self._crew.everyone):
                break
            await asyncio.sleep(PAUSE_S)
        self._crew.close()
        self._seats.close()
        self._notes.close()
        return result

    def _gone_to(self, state: TrainControllerState) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._run_attempt_id,
            previous_state=self._state,
            next_state=state,
        )

    def _hire(self, node_id: str, seat: int | None) -> RayHand:
        if self._ray_parts is None:
            callbacks = [
                callback
                for callback in self._worker_group_callbacks_to_propagate
                if isinstance(callback, WorkerCallback | TrainContextCallback)
            ]
            parts = (self._train_run_context, self._storage_context, callbacks)
            self._ray_parts = ray.put(parts)
        return hire(
            node_id,
            None if seat is None else self._seats.group(seat),
            resources=self._plan.resources,
            runtime_env=self._runtime_env,
            part=self._plan.part,
            ray_parts=self._ray_parts,
            train_fn_ref=self._train_fn_ref,
        )


def run_controller(plan: Plan, init_kwargs: Mapping[str, Any], env_vars: Mapping[str, str]) -> Any:
    """Runs a controller on this node until training ends; returns Ray Train's result."""
    here = ray.get_runtime_context().get_node_id()
    actor_class: Any = ray.remote(
        num_cpus=0,
        label_selector={NODE_ID_LABEL: here},
        runtime_env={"env_vars": dict(env_vars)},
    )(ElasticController)
    controller = actor_class.remote(plan=plan, **init_kwargs)
    try:
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())
    finally:
        ray.kill(controller)


def whereabouts(status: WorkerGroupPollStatus | None) -> list[Whereabouts]:
    """What each worker that could be reached told of itself."""
    states = status.worker_statuses.values() if status is not None else ()
    return [state.whereabouts for state in states if isinstance(state, SteadyStatus)]


def patience_s(status: WorkerGroupPollStatus) -> float:
    """How long to wait, from the first error on, for that of the worker that met the cause.

    0 where nobody failed, or somebody has told more than that another worker is lost.
    """
    errors = status.errors
    if not errors or status.finished or not all(map(is_echo, errors.values())):
        return 0.0
    return TELLING_S if any(there.telling for there in whereabouts(status)) else ECHO_S
