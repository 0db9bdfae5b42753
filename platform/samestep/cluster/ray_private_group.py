"""Ray Train's worker group, made of processes that the crew keeps. Checked with Ray 2.60."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupState
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.util import TrainingFramework, invoke_context_managers

from samestep.cluster import process
from samestep.cluster.crew import Crew
from samestep.cluster.ray_private_faults import is_dead
from samestep.cluster.ray_private_worker import RayHand, SteadyStatus
from samestep.cluster.rendezvous import Meeting
from samestep.errors import WorkloadError

CALL_S: Final = 20.0
"""How long a worker may take to answer while its group starts."""
SETTLE_S: Final = 2.0
"""How long workers may take to end an attempt once one of them has ended it."""
FIRST_SETTLED_S: Final = 30.0
"""How long the group waits for the first of them: it may hold the only whole state."""
CONFIRM_S: Final = 0.5

logger = logging.getLogger(__name__)


class NoPlacement(PlacementGroupHandle):
    """Stands for the group's placement: seats are kept by the controller."""

    @property
    def placement_group(self) -> Any:
        """There is none."""
        return None

    def ready(self) -> Any:
        """At once."""
        return ray.put(True)

    def wait(self, timeout_seconds: float = 30) -> bool:
        """At once."""
        return True

    def shutdown(self) -> None:
        """Seats outlive the group."""


class NoBarriers:
    """Stands for the actor behind Ray Train's barriers: a process more, which nobody here needs."""

    @property
    def broadcast_from_rank_zero(self) -> Any:
        """What `ray.train.report` and `ray.train.collective` call on it.

        Raises:
            WorkloadError: always.
        """
        raise WorkloadError(
            "ray.train.report, barrier and broadcast_from_rank_zero can't be used in a workload: "
            "the trainer writes checkpoints and records metrics itself; return metrics from "
            "loss() or evaluate(), and leave it to the trainer what workers wait for"
        )


class MeetingBackend(Backend):
    """Tells the workers where to meet; they form their process group themselves."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._meeting: Meeting | None = None

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Opens the store for an attempt."""
        self._meeting = Meeting(ray.util.get_node_ip_address())
        told = worker_group.execute_async(process.set_meeting, self._meeting.place)
        ray.get(told, timeout=CALL_S)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Closes it, which frees whoever still waits in it; never raises."""
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


class MeetingConfig(BackendConfig):
    """What TorchTrainer takes for its configuration of torch, with our backend.

    Not Ray's own, whose module needs torch: the controller would import it, which takes seconds at
    every start, and use it for nothing.
    """

    backend = "gloo or nccl"
    """As Ray's own has it; the workers choose (`engine.forming`)."""

    @property
    def backend_cls(self) -> type[Backend]:
        """See `MeetingBackend`."""
        return MeetingBackend

    @property
    def framework(self) -> TrainingFramework:
        """For what Ray tells of the run."""
        return TrainingFramework.TORCH


class SteadyGroup(WorkerGroup):
    """A worker group whose processes live on when it ends.

    Args:
        crew: keeps them.
        members: those who work.
        silent_s: a worker whose process answers nothing for so long hangs; Ray Train's own limit
            is ten minutes, and a worker that is alone has no others who notice.

    Attributes:
        is_last: no group follows: nobody's state is waited for.
    """

    def __init__(
        self,
        *args: Any,
        crew: Crew[RayHand],
        members: Sequence[RayHand],
        silent_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._worker_health_check_timeout_s = silent_s
        self._crew = crew
        self._hands = {hand.actor: hand for hand in members}
        self.members = list(members)
        self.is_last = False

    def start(self) -> None:
        """Starts training on all members.

        Raises:
            WorkerGroupStartupFailedError: one of them failed; the others are kept.
        """
        try:
            self._start_impl(None)
        except (RayError, GetTimeoutError) as error:
            self._disband()
            raise WorkerGroupStartupFailedError(str(error)) from error

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._assert_inactive()  # type: ignore[no-untyped-call]
        context = self._worker_group_context
        timed: Any = [callback.on_worker_group_start for callback in self._callbacks]
        with invoke_context_managers(timed):
            for callback in self._callbacks:
                callback.before_worker_group_start(context)
            workers = self._assign_worker_ranks(
                [hand.to_worker(context.resources_per_worker) for hand in self.members]
            )
            barriers: Any = NoBarriers()
            self._worker_group_state = WorkerGroupState(
                start_time=time.monotonic(),
                placement_group_handle=NoPlacement(),
                workers=workers,
                sync_actor=barriers,
            )
            self._init_train_context(workers, barriers)
            for callback in self._callbacks:
                callback.after_worker_group_start(self)
        launched = [worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in workers]
        ray.get(launched, timeout=CALL_S)
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def _init_train_context_on_workers(
        self, workers: list[Any], sync_actor: Any, train_context_args: dict[str, list[Any]]
    ) -> None:
        made = [
            worker.actor.init_train_context.remote(
                train_run_context=self._train_run_context,
                distributed_context=worker.distributed_context,
                synchronization_actor=sync_actor,
                storage_context=self._storage_context,
                worker_callbacks=self._worker_callbacks_to_propagate,
                controller_actor=ray.get_runtime_context().current_actor,
                **{name: values[place] for name, values in train_context_args.items()},
            )
            for place, worker in enumerate(workers)
        ]
        ray.get(made, timeout=CALL_S)

    def shutdown(self) -> None:
        """Ends the attempt; whoever lives and has ended it in good order is kept."""
        self._assert_active()  # type: ignore[no-untyped-call]
        timed: Any = [callback.on_worker_group_shutdown for callback in self._callbacks]
        with invoke_context_managers(timed):
            self._disband()
            for callback in self._callbacks:
                callback.after_worker_group_shutdown(self._worker_group_context)

    def abort(self) -> None:
        """Ends the attempt and all processes at once."""
        for hand in self.members:
            self._crew.drop(hand)
        self._clear_state()  # type: ignore[no-untyped-call]

    def hosts(self) -> dict[int, str]:
        """Host of each worker, by world rank."""
        if not self.has_started():
            return {}
        # They are in the order of their world ranks.
        return {rank: worker.metadata.hostname for rank, worker in enumerate(self.get_workers())}

    def _disband(self) -> None:
        if not self.has_started():
            return
        for callback in self._callbacks:
            callback.before_worker_group_shutdown(self)
        left = self._leaving()
        patience_s = SETTLE_S if self.is_last else FIRST_SETTLED_S
        for hand in self.members:
            if hand.is_dead():
                self._crew.drop(hand)
        alive = [hand for hand in self.members if not hand.is_dead()]
        silent = self._silent()
        if len(silent) == len(alive):  # one of them may hold the only whole state
            silent = []
        pending = {
            hand.actor.settle.remote(patience_s): hand for hand in alive if hand not in silent
        }
        for hand in [*silent, *self._unsettled(pending, patience_s)]:
            self._crew.drop(hand)
            if not self._is_reachable(hand.node_id):
                logger.warning("a worker on node %s can't be ended: keeping away", hand.node_id)
                self._crew.suspect(hand.node_id)
        for hand in left:
            self._crew.drop(hand)
        self._clear_state()  # type: ignore[no-untyped-call]

    def _unsettled(self, pending: dict[Any, RayHand], patience_s: float) -> list[RayHand]:
        """Waits for those who end the attempt; gives the others."""
        bad: list[RayHand] = []
        end = time.monotonic() + patience_s
        any_settled = False
        while pending and (left_s := end - time.monotonic()) > 0:
            done, _ = ray.wait(list(pending), timeout=left_s)
            for ref in done:
                hand = pending.pop(ref)
                try:
                    settled = bool(ray.get(ref))
                except RayError:
                    hand.mark_dead()
                    self._crew.drop(hand)
                    continue
                if not settled:
                    bad.append(hand)
                elif not any_settled:
                    any_settled, end = True, min(end, time.monotonic() + SETTLE_S)
        return [*bad, *pending.values()]

    def _silent(self) -> list[RayHand]:
        """Those who have not answered for as long as others may take to end the attempt."""
        workers, now = self.get_workers(), time.monotonic()
        hands = [
            self._hands[workers[world_rank].actor]
            for world_rank, poll in self._world_rank_to_ongoing_poll.items()
            if now - poll.start_time > SETTLE_S
        ]
        return [hand for hand in hands if not hand.is_dead()]

    def _is_reachable(self, node_id: str) -> bool:
        """Whether a node answers: it hangs together with others of its processes, or is cut off."""
        if node_id == ray.get_runtime_context().get_node_id():
            return True
        others = [hand for hand in self._crew.everyone if hand.node_id == node_id]
        return any(hand.is_ready() and hand.answers(CONFIRM_S) for hand in others)

    def _leaving(self) -> list[RayHand]:
        """Those who were told to end; notes who is known to be dead."""
        status = self.get_latest_poll_status()
        found: list[RayHand] = []
        if status is None:
            return found
        for worker, state in zip(self.get_workers(), status.worker_statuses.values(), strict=True):
            hand = self._hands[worker.actor]
            if is_dead(state.error):
                hand.mark_dead()
            elif isinstance(state, SteadyStatus) and state.whereabouts.leaving:
                found.append(hand)
        return found
