"""The dry step of `samestep check`: what it tells, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep import ExitStatus, parse_spec
from samestep.engine.inspect import inspect_job
from samestep.engine.report import Report

FOLDER = Path(__file__).resolve().parent

Inspect = Callable[..., Report]


@pytest.fixture
def inspect() -> Inspect:
    """inspect("Fine", shards=4) reports on inspected_cases:Fine: 21 samples, batches of 8."""

    def inspect(workload: str, **fields: Any) -> Report:
        spec = {"batch_size": 8, "shards": 4, "epochs": 2, "workers": {"min": 1, "max": 4}}
        spec |= {"workload": f"inspected_cases:{workload}", **fields}
        return inspect_job(parse_spec(spec), [FOLDER])

    return inspect


def test_a_job_that_is_fine_is_told_whole(inspect: Inspect) -> None:
    report = inspect("Fine", batch_size=12)
    assert (report.refused, report.not_exact, report.warnings) == ([], [], [])
    assert report.exit_status is ExitStatus.DONE
    schedule = report.schedule
    assert schedule is not None
    assert (schedule.dataset_size, schedule.steps_per_epoch, schedule.total_steps) == (21, 2, 4)
    assert schedule.shard_sizes == (3, 3, 3, 3)
    assert schedule.last_shard_sizes == (3, 2, 2, 2)
    assert schedule.evaluation_size == 21
    assert report.evaluation is not None
    assert list(report.evaluation) == ["error"]


def test_what_goes_in_and_out_has_shape_dtype_and_device(inspect: Inspect) -> None:
    report = inspect("Fine", drop_last=True, precision="bf16")
    batch, loss = report.batch, report.loss
    assert batch is not None
    assert loss is not None
    assert (batch.type, batch.num_samples) == ("dict", 2)
    shown = [(t.name, t.shape, t.dtype, t.device, t.num_bytes) for t in batch.tensors]
    assert shown == [("x", (2, 3), "float32", "cpu", 24), ("y", (2,), "int64", "cpu", 16)]
    assert (loss.tensor.shape, loss.tensor.device) == ((), "cpu")
    assert (loss.weight, loss.own_weight, loss.nominal_weight) == (4.0, True, 4.0)
    assert loss.metrics["error"] == pytest.approx(loss.value, rel=0.02)
    assert loss.grad_norm is not None
    assert loss.grad_norm > 0
    assert loss.learning_rates == (0.1,)


def test_parameters_are_told_by_class(inspect: Inspect) -> None:
    parameters = inspect("Fine", drop_last=True).parameters
    assert parameters is not None
    assert [info.name for info in parameters.trainable] == [
        "first.weight",
        "unused.weight",
        "unused.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert [info.name for info in parameters.frozen] == ["frozen.weight", "frozen.bias"]
    assert parameters.tied == (("first.weight", "second.weight"),)
    assert parameters.unused == ("unused.weight", "unused.bias")
    assert parameters.not_optimized == ()


def test_memory_is_counted_in_bytes(inspect: Inspect) -> None:
    report = inspect("Fine", drop_last=True)
    memory = report.memory
    assert memory is not None
    num_used, num_unused, num_frozen = 9 + 6, 30, 12
    assert memory.model_bytes == 4 * (num_used + num_unused + num_frozen)
    assert memory.buffer_bytes == 4 * 6 + 8
    assert memory.optimizer_bytes == 4 * num_used  # momentum of those that had a gradient
    assert memory.gradient_bytes == report.forecasts[0].gradient_bytes


def test_each_number_of_workers_is_forecast_and_costly_ones_are_warned_of(
    inspect: Inspect,
) -> None:
    report = inspect("Fine", shards=8, batch_size=16, workers={"min": 2, "max": 3})
    assert [found.num_workers for found in report.forecasts] == list(range(1, 9))
    assert (report.costly, report.cheap) == ((3,), (1, 2, 4, 6, 7, 8))
    assert report.warnings == [
        "with 8 shards, these numbers of workers send more over the network than a ring "
        "all-reduce: 3 (1.5x); cheap are 1, 2, 4, 6, 7, 8"
    ]


@pytest.mark.parametrize(
    ("workload", "attribute"),
    [("Counts", "model.calls (0 became 1)"), ("Draws", "model.noise (Generator in state")],
)
def test_state_that_changes_the_result_is_not_exact(
    workload: str, attribute: str, inspect: Inspect
) -> None:
    report = inspect(workload, drop_last=True)
    assert report.exit_status is ExitStatus.BAD_INPUT
    (line,) = report.not_exact
    assert line.startswith("step 0, shard 0, computed twice, gives other bits")
    assert attribute.partition(" (")[0] in line
    assert any("every forward changed" in warning for warning in report.warnings)


def test_a_counter_that_nothing_depends_on_is_a_warning(inspect: Inspect) -> None:
    report = inspect("Logs", drop_last=True)
    assert report.exit_status is ExitStatus.DONE
    (warning,) = report.warnings
    assert (
        "every forward changed attributes that are no buffers: model.calls (1 became 2)" in warning
    )


def test_a_cache_that_the_first_forward_fills_is_told_apart(inspect: Inspect) -> None:
    report = inspect("Caches", drop_last=True)
    assert report.not_exact == []
    (warning,) = report.warnings
    assert "the first forward changed attributes" in warning
    assert "model.table (None became tensor (3,)" in warning


def test_an_attribute_of_the_workload_is_named(inspect: Inspect) -> None:
    (warning,) = inspect("Remembers", drop_last=True).warnings
    assert "workload.num_losses (1 became 2)" in warning


def test_private_generators_are_named(inspect: Inspect) -> None:
    assert any(
        "model.noise is a private generator (torch._C.Generator)" in warning
        for warning in inspect("Draws").warnings
    )


def test_data_that_draws_from_a_generator_of_its_own_is_not_exact(inspect: Inspect) -> None:
    report = inspect("NoisyData", drop_last=True)
    (line,) = report.not_exact
    assert line.startswith("the samples of step 0, shard 0, read twice, differ in batch.x")
    assert any("dataset.noise is a private generator" in warning for warning in report.warnings)
    assert report.exit_status is ExitStatus.BAD_INPUT


def test_modules_in_eval_mode_are_named(inspect: Inspect) -> None:
    report = inspect("Sleeps", drop_last=True)
    assert report.modes is not None
    assert report.modes.put_to_training == ("norm",)
    assert report.modes.not_training == ("unused",)
    (warning,) = report.warnings
    assert "model() returned these modules in eval mode" in warning


def test_parameters_outside_of_the_optimizer_are_named(inspect: Inspect) -> None:
    (warning,) = inspect("Forgets", drop_last=True).warnings
    assert "unused.weight, unused.bias, norm.weight, norm.bias" in warning


def test_what_before_step_freezes_is_frozen_in_the_report(inspect: Inspect) -> None:
    parameters = inspect("FreezesFirst", drop_last=True).parameters
    assert parameters is not None
    assert "unused.weight" in [info.name for info in parameters.frozen]
    assert parameters.unused == ()


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("Closure", "needs a closure"),
        ("Detached", "not attached to the graph"),
        ("Dynamic", "compiled for dynamic shapes"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_what_training_would_refuse_is_refused(
    workload: str, message: str, inspect: Inspect
) -> None:
    report = inspect(workload)
    assert report.exit_status is ExitStatus.BAD_INPUT
    (line,) = report.refused
    assert message in line


def test_batch_norm_with_a_shard_of_one_sample_is_refused_with_advice(inspect: Inspect) -> None:
    report = inspect("Fine", batch_size=4, shards=4)
    assert report.exit_status is ExitStatus.BAD_INPUT
    assert "set drop_last: true, another batch_size or fewer shards" in report.refused[0]
    assert report.parameters is not None  # and what was known until then is told


@pytest.mark.parametrize("workload", ["Raises", "RaisesInEvaluate"])
def test_an_exception_of_the_workload_is_told_with_its_traceback(
    workload: str, inspect: Inspect
) -> None:
    report = inspect(workload, drop_last=True)
    assert report.exit_status is ExitStatus.FAILED
    assert "raised KeyError: 'label'" in report.refused[0]
    assert "inspected_cases.py" in report.refused[0]


def test_a_loss_that_is_not_finite_is_a_warning_and_still_json(inspect: Inspect) -> None:
    report = inspect("NotFinite", drop_last=True)
    assert any("the loss of step 0, shard 0 is" in warning for warning in report.warnings)
    json.dumps(report.to_json(), allow_nan=False)


def test_more_shards_than_samples_in_a_batch_is_a_warning(inspect: Inspect) -> None:
    report = inspect("Logs", batch_size=2, shards=4, workers=1)
    assert any("the last 2 shards are always empty" in warning for warning in report.warnings)


def test_loss_scaling_is_part_of_the_dry_step(inspect: Inspect) -> None:
    report = inspect("Fine", drop_last=True, precision="fp16")
    assert report.refused == []
    assert report.loss is not None


def test_nothing_of_the_process_is_changed(inspect: Inspect) -> None:
    path, threads = list(sys.path), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    inspect("Fine", threads=threads + 1)
    assert sys.path == path
    assert torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_parameters_that_the_workload_keeps_beside_its_model_are_named(inspect: Inspect) -> None:
    (warning,) = inspect("Beside").warnings
    assert "head.weight, head.bias, scale" in warning
    assert "teacher" not in warning
    assert "make them part of the module that model() returns" in warning
