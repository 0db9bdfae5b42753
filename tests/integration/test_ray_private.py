"""What we rely on inside Ray: each of these fails when a new release moves it."""

from __future__ import annotations

import inspect

import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.train import ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)

from samestep.cluster.ray_private import ElasticTorchTrainer, worker_output_to


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
