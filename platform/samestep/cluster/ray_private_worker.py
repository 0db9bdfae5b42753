"""Ray Train's worker actor, made to work for several attempts, and the controller's handle on one.

Checked with Ray 2.60. Processes are actors without CPUs beside their seat (`seats`), which holds
the room for them: so a spare can take over a seat, and a survivor stays whatever becomes of the
group. Ray's own would be killed with every group, and placed and started anew.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import (
    ActorMetadata,
    RayTrainWorker,
    Worker,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from samestep.cluster import process
from samestep.cluster.process import Whereabouts
from samestep.cluster.rehearsal import Part, rehearse

GPU: Final = "GPU"

logger = logging.getLogger(__name__)


@dataclass
class SteadyStatus(WorkerStatus):
    """What a poll brings, with what this worker tells beside."""

    whereabouts: Whereabouts = field(default_factory=Whereabouts)


class SteadyWorker(RayTrainWorker):
    """A worker process that outlives its group."""

    def warm(self, part: Part, ray_parts: Any, train_fn_ref: Any) -> ActorMetadata:
        """Makes ready to take over in no time.

        Args:
            part: what to rehearse with.
            ray_parts: load what Ray Train will send.
            train_fn_ref: Ray Train's; fetched and loaded once, the next time is quick.
        """
        gc.disable()  # looking through what imports make, again and again, takes a tenth of them
        try:
            import ray.train.torch  # noqa: F401

            train_fn_ref.get()
            rehearse(part)
        finally:
            gc.enable()
        # A collection that goes through all that was imported takes a quarter of a second, and was
        # due while a spare took over, or in a step: modules stay, so they are passed over.
        gc.collect()
        gc.freeze()
        return self.get_metadata()

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        """Makes ready for an attempt."""
        process.here.start()
        super().init_train_context(*args, **kwargs)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)

    def poll_status(self) -> SteadyStatus:
        """Tells how training goes."""
        status = super().poll_status()
        return SteadyStatus(**vars(status), whereabouts=process.here.whereabouts())

    def settle(self, timeout_s: float) -> bool:
        """Ends the attempt: lets a parked worker go, and waits for the training thread.

        Returns:
            Whether the process can work for another attempt.
        """
        process.here.release()
        if not process.here.is_training:
            return True
        runner = get_train_context().execution_context.training_thread_runner
        thread = runner._thread
        if thread is not None:
            thread.join(timeout_s)
        alive = thread is not None and thread.is_alive()
        if not alive:
            process.here.end()
        return not alive


def _leave(number: int, frame: FrameType | None) -> None:
    process.here.leave()


class RayHand:
    """A worker process as the controller holds it; see `crew.Hand`.

    Args:
        actor: a `SteadyWorker`.
        node_id: where it runs.
        come: done once the process is there.
        warm: its imports, under way.
    """

    def __init__(self, actor: Any, node_id: str, *, come: Any, warm: Any) -> None:
        self.actor = actor
        self._come = come
        self._node_id = node_id
        self._warm: Any = warm
        self._dead = False
        self._why = ""
        self._metadata: ActorMetadata | None = None
        self.gpu_ids: list[str] | None = None

    @property
    def node_id(self) -> str:
        """Where it runs."""
        return self._node_id

    @property
    def why(self) -> str:
        """What it died of while it started."""
        return self._why

    def is_ready(self) -> bool:
        """Whether its imports are done."""
        if self._warm is not None and ray.wait([self._warm], timeout=0)[0]:
            try:
                self._metadata = ray.get(self._warm)
            except RayError as error:
                logger.warning("a worker process on node %s died: %s", self._node_id, error)
                self._why = str(error).strip()
                self._dead = True
            self._warm = None
        return self._metadata is not None and not self._dead

    def has_come(self) -> bool:
        """Whether the process is there, ready or not, or is dead: whether it can be ended."""
        return self._metadata is not None or bool(ray.wait([self._come], timeout=0)[0])

    def is_dead(self) -> bool:
        """Whether it is known to be dead."""
        self.is_ready()
        return self._dead

    def mark_dead(self) -> None:
        """Somebody else learned that it is dead."""
        self._dead = True

    def end(self) -> None:
        """Ends it, without waiting."""
        self._dead = True
        try:
            ray.kill(self.actor)
        except (RayError, ValueError) as error:  # it is gone already
            logger.debug("ending a process on node %s: %r", self._node_id, error)

    def answers(self, timeout_s: float) -> bool:
        """Whether Ray still reaches it, or knows that it is dead (then False)."""
        try:
            ray.get(self.actor.get_metadata.remote(), timeout=timeout_s)
        except RayError:
            return False
        return True

    def to_worker(self, resources: Mapping[str, float]) -> Worker:
        """As Ray Train's worker group has it."""
        assert self._metadata is not None, "a process that is not ready can't be used"
        metadata = self._metadata
        if self.gpu_ids is not None:  # a spare has none of its own: those of its seat
            metadata = replace(metadata, accelerator_ids={GPU: list(self.gpu_ids)})
        return Worker(self.actor, metadata, dict(resources))


def hire(
    node_id: str,
    seat: PlacementGroup | None,
    *,
    resources: Mapping[str, float],
    runtime_env: Mapping[str, Any],
    part: Part,
    ray_parts: Any,
    train_fn_ref: Any,
) -> RayHand:
    """Starts a worker process on a node.

    With GPUs it starts in its seat, which gives it its devices; else it takes nothing, and runs
    beside the seat.
    """
    remote: Any = ray.remote(SteadyWorker)
    if seat is not None and resources.get(GPU):
        options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources[GPU],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=seat, placement_group_bundle_index=0
            ),
        }
    else:
        options = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
    actor = remote.options(runtime_env=dict(runtime_env), **options).remote()
    come = actor.__ray_ready__.remote()
    warm = actor.warm.remote(part, ray_parts, train_fn_ref)
    return RayHand(actor, node_id, come=come, warm=warm)
