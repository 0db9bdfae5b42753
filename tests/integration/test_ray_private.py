"""What we rely on inside Ray: each of these fails when a new release moves it."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import Result, ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
)
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution import collective_impl
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupState
from ray.train.v2._internal.execution.worker_group.poll import PollTask, WorkerStatus
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.policy import Cause
from samestep.cluster.ray_private import ElasticTorchTrainer, with_checkpoint, worker_output_to
from samestep.cluster.ray_private_faults import faults_of
from samestep.cluster.ray_private_group import NoBarriers
from samestep.cluster.ray_private_worker import SteadyStatus
from samestep.cluster.seats import NODE_ID_LABEL
from samestep.errors import AttemptFailedError, PlacementError, WorkloadError


def test_ray_is_a_release_that_was_checked() -> None:
    assert ray.__version__.startswith("2.60.")


def test_the_trainer_drops_two_callbacks_and_keeps_the_rest() -> None:
    scaling = ScalingConfig(num_workers=1)
    trainer = ElasticTorchTrainer(lambda: None, plan=None, scaling_config=scaling)
    kept = trainer._create_default_callbacks()
    default = super(ElasticTorchTrainer, trainer)._create_default_callbacks()
    dropped = {type(cb) for cb in default} - {type(cb) for cb in kept}
    assert dropped == {PlacementGroupCleanerCallback, DatasetsCallback}
    assert len(default) == len(kept) + 2


def test_ray_prints_through_the_handler_that_we_replace() -> None:
    assert '"ray_print_logs"' in inspect.getsource(ray._private.worker)


def test_lines_of_workers_are_shown_once_and_those_of_others_not_at_all() -> None:
    shown: list[str] = []
    with worker_output_to(shown.append):
        for actor in ("SteadyWorker", "ElasticController", None):
            global_worker_stdstream_dispatcher.emit(
                {"actor_name": actor, "pid": 7, "lines": ["hello", ""]}
            )
    assert shown == ["[worker pid=7] hello"]
    assert [name for name, _ in global_worker_stdstream_dispatcher.handlers] == []


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_controllers_methods_that_we_override_are_those_that_ray_calls() -> None:
    retry = "_make_and_handle_scaling_decision_for_non_running_worker_group"
    assert parameters(getattr(TrainController, retry)) == ["controller_state"]
    assert parameters(TrainController._execute_resize_decision) == ["decision"]
    assert parameters(TrainController._start_worker_group) == [
        "num_workers",
        "resources_per_worker",
    ]
    step = inspect.getsource(TrainController._step)
    for name in (retry, "_execute_resize_decision", "_poll_workers", "_shutdown"):
        assert f"self.{name}(" in step
    assert "self._worker_group.poll_status(" in inspect.getsource(TrainController._poll_workers)
    assert "self._shutdown_worker_group()" in inspect.getsource(TrainController._shutdown)
    made = inspect.getsource(TrainController.__init__)
    for name in (
        "_train_run_context",
        "_train_fn_ref",
        "_storage_context",
        "_worker_group_callbacks_to_propagate",
        "_health_check_interval_s",
        "_worker_group",
    ):
        assert f"self.{name}" in made
    assert {"train_run_context", "scaling_policy", "failure_policy"} <= set(
        parameters(TrainController.__init__)
    )


def test_rays_result_leads_to_the_newest_whole_checkpoint_where_it_lies(tmp_path: Path) -> None:
    run = Storage.at(str(tmp_path))
    for step, names in ((90, ["manifest.json"]), (100, ["manifest.json", "a"]), (110, ["a"])):
        for name in names:
            run.write(f"checkpoints/step-{step:08d}/{name}", b"{}")
    made = {"metrics": None, "checkpoint": None, "error": None, "path": "/ray"}
    result = with_checkpoint(Result(**made), run.uri)
    assert result.checkpoint is not None
    with pickle.loads(pickle.dumps(result.checkpoint)).as_directory() as folder:
        assert folder == str(tmp_path / "checkpoints" / "step-00000100")
    nowhere = with_checkpoint(Result(**made), str(tmp_path / "nowhere"))
    assert nowhere.checkpoint is None


def test_the_trainer_hands_its_policies_to_the_method_that_we_override() -> None:
    fit = inspect.getsource(DataParallelTrainer.fit)
    assert "result = self._initialize_and_run_controller(" in fit
    assert "return result" in fit
    assert "scaling_policy=" in fit
    assert "failure_policy=" in fit


def test_the_worker_group_is_made_of_the_parts_that_we_put_together() -> None:
    assert parameters(WorkerGroup.__init__) == [
        "train_run_context",
        "worker_group_context",
        "callbacks",
    ]
    assert parameters(WorkerGroup._init_train_context) == ["workers", "sync_actor"]
    assert parameters(WorkerGroup._init_train_context_on_workers) == [
        "workers",
        "sync_actor",
        "train_context_args",
    ]
    assert {field.name for field in fields(WorkerGroupState)} == {
        "start_time",
        "placement_group_handle",
        "workers",
        "sync_actor",
    }
    assert [field.name for field in fields(Worker)][:3] == ["actor", "metadata", "resources"]
    assert "_shutdown_sync_actor" not in inspect.getsource(WorkerGroup._clear_state)
    start = inspect.getsource(WorkerGroup._start_impl)
    for hook in (
        "on_worker_group_start",
        "before_worker_group_start",
        "after_worker_group_start",
        "after_worker_group_training_start",
        "run_train_fn.remote(worker_group_context.train_fn_ref)",
    ):
        assert hook in start
    shutdown = inspect.getsource(WorkerGroup.shutdown)
    for hook in (
        "on_worker_group_shutdown",
        "before_worker_group_shutdown",
        "after_worker_group_shutdown",
        "_clear_state",
    ):
        assert hook in shutdown


def test_rays_barriers_are_refused_with_what_to_do_instead() -> None:
    sent = pickle.loads(pickle.dumps(NoBarriers()))
    for waiting in (TrainContext._sync_checkpoint_dir_name_across_ranks, collective_impl.barrier):
        assert "sync_actor.broadcast_from_rank_zero.remote(" in inspect.getsource(waiting)
    with pytest.raises(WorkloadError, match=r"ray\.train\.report.* return metrics from loss"):
        _ = sent.broadcast_from_rank_zero


def test_a_worker_can_be_made_ready_again_and_tells_of_its_training_thread() -> None:
    assert parameters(RayTrainWorker.init_train_context)[:6] == [
        "train_run_context",
        "distributed_context",
        "synchronization_actor",
        "storage_context",
        "worker_callbacks",
        "controller_actor",
    ]
    runner = ThreadRunner()
    assert runner._thread is None
    runner.run(lambda: None)
    assert runner._thread is not None
    runner._thread.join(10)
    assert not runner.is_running()
    names = {field.name for field in fields(SteadyStatus)}
    assert {field.name for field in fields(WorkerStatus)} == names - {"whereabouts"}


def test_exceptions_of_workers_are_told_apart_by_their_cause() -> None:
    details = {"kind": "UserCodeError", "step": 3, "attempt": 1, "world_rank": 0, "host": "a"}
    flags = {"exit_status": 1, "is_echo": False, "is_final": False, "time": 0.0}
    flags |= {"is_memory": False, "is_corruption": False, "wrong_host": ""}
    told = AttemptFailedError("mine", {**details, **flags})
    echo = AttemptFailedError("lost worker 1", {**details, **flags, "is_echo": True})
    died = WorkerHealthCheckFailedError("no answer", RayActorError())
    memory = WorkerHealthCheckFailedError("no answer", OutOfMemoryError("too much"))
    error = WorkerGroupError("all", {0: told, 1: echo, 2: died, 3: memory})
    found = faults_of(pickle.loads(pickle.dumps(error)), {2: "b"})
    assert [fault.cause for fault in found] == [
        Cause.USER,
        Cause.LOST,
        Cause.CRASH,
        Cause.OUT_OF_MEMORY,
    ]
    assert (found[0].message, found[0].step) == ("mine", 3)
    assert found[2].message.startswith("worker 2 on b was lost")
    started = ControllerError(WorkerGroupStartupFailedError("no"))
    assert [fault.cause for fault in faults_of(started, {})] == [Cause.START]
    started.controller_failure.__cause__ = OutOfMemoryError("too much")
    [fault] = faults_of(started, {})
    assert (fault.cause, fault.message.endswith("too much")) == (Cause.OUT_OF_MEMORY, True)
    placed = faults_of(ControllerError(PlacementError("no room")), {})
    assert [(fault.cause, fault.exit_status) for fault in placed] == [(Cause.NO_ROOM, 2)]


def test_who_has_not_answered_is_known_to_the_group() -> None:
    assert [field.name for field in fields(PollTask)] == ["start_time", "task"]
    source = inspect.getsource(WorkerGroup)
    assert "self._world_rank_to_ongoing_poll: Dict[int, PollTask] = {}" in source
    assert "start_time = time_monotonic()" in source
    # Set by us: a worker that is alone and stands still has no others who notice.
    assert "self._worker_health_check_timeout_s = float(" in source
    assert "elapsed_time_s > self._worker_health_check_timeout_s" in source


def test_names_that_we_spell_out_are_rays() -> None:
    assert ray._raylet.RAY_NODE_ID_KEY == NODE_ID_LABEL
    assert callable(ray._private.state.state.get_draining_nodes)
    assert ENABLE_PREEMPTION_WATCHER_ENV_VAR in TRAIN_ENVIRONMENT
    assert HEALTH_CHECK_INTERVAL_S_ENV_VAR in TRAIN_ENVIRONMENT
