"""What people meet in distributed training, each with the right behaviour."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import spec_of
from stories import Counting, Still

from samestep import load_weights, parse_spec
from samestep.checkpoint.storage import Storage
from samestep.engine.evaluate import Evaluation
from samestep.engine.peers import Peers
from samestep.exact.digest import ids_digest
from samestep.exact.order import Order
from samestep.names import Event
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.past import read_past
from samestep.telemetry.records import EventRecord, StepRecord

Results = Callable[..., list[dict[str, Any]]]
Train = Callable[..., "Run"]
PLACES = [{"world_size": 1}, {"world_size": 2}, {"world_size": 3}, {"num_devices": 2}]


class Run:
    """What a run left behind."""

    def __init__(self, folder: Path, answers: list[dict[str, Any]]) -> None:
        self.folder, self.storage = folder, Storage.at(str(folder))
        self.result, self.verdict = answers[0]["result"], answers[0]["verdict"]
        assert all(answer["result"] == self.result for answer in answers)
        assert all(answer["verdict"] == self.verdict for answer in answers)

    @property
    def digest(self) -> str:
        assert self.result["status"] == "done", self.verdict
        return str(self.result["digest"])

    def steps(self) -> list[StepRecord]:
        lines = read_ledger(self.storage)
        return [StepRecord.from_json(data) for data in lines if data["type"] == "step"]

    def evaluations(self) -> list[Any]:
        lines = read_ledger(self.storage)
        events = [EventRecord.from_json(data) for data in lines if data["type"] == "event"]
        return [event.fields for event in events if event.event is Event.EVALUATION]


@pytest.fixture
def train(results: Results, tmp_path: Path) -> Train:
    """train(spec, name, world_size=2): one attempt of the run of that name."""

    def train(spec: dict[str, Any], name: str, world_size: int = 1, num_devices: int = 1) -> Run:
        folder = tmp_path / name
        answers = results(
            "attempt", world_size, spec=spec, run=str(folder), num_devices=num_devices
        )
        return Run(folder, answers)

    return train


def everywhere(train: Train, spec: dict[str, Any]) -> list[Run]:
    """The run in each place; all must end with the same digest."""
    runs = [train(spec, f"run-{number}", **place) for number, place in enumerate(PLACES)]
    assert len({run.digest for run in runs}) == 1
    return runs


@pytest.mark.parametrize("size", [13, 10])
def test_a_dataset_that_no_number_divides_is_used_up_with_every_sample_once(
    train: Train, size: int
) -> None:
    spec = story("Counting", size=size, batch_size=4, shards=3, epochs=2)
    order = Order(dataset_size=size, batch_size=4, shards=3, drop_last=False, seed=3)
    for run in everywhere(train, spec):
        steps = run.steps()
        per_epoch = len(steps) // 2
        for step in steps:
            ids = order.step_ids(step.step)
            assert step.ids == ids_digest(ids)
            flat = [index for shard in ids for index in shard]
            assert step.metrics["id"] == sum(flat) / len(flat)
        for epoch in (0, 1):
            taken = [
                index
                for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)
                for shard in order.step_ids(step)
                for index in shard
            ]
            assert sorted(taken) == list(range(size))


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("frozen", r"all are frozen: 0\.weight, 0\.bias, 2\.weight, 2\.bias"),
        ("empty", r"Flatten has no parameter that requires a gradient \(it has none\)"),
    ],
)
def test_a_model_without_anything_to_train_is_refused_once_and_names_the_parameters(
    train: Train, of: str, message: str
) -> None:
    run = train(story("Still", of=of), "run", 2)
    assert run.verdict["kind"] == "WorkloadError:2"
    assert re.search(message, run.verdict["message"])
    assert run.steps() == []


def test_freezing_all_in_mid_run_is_refused_at_that_step(train: Train) -> None:
    run = train(story("Still", of="frozen at 2"), "run", 2)
    assert run.verdict["kind"] == "WorkloadError:2"
    assert "no parameter requires a gradient any more" in run.verdict["message"]
    assert [step.step for step in run.steps()] == [0, 1]


def test_a_frozen_model_evaluates_unwrapped() -> None:
    workload = Counting()
    model = workload.model().requires_grad_(False)
    spec = parse_spec(story("Counting"))
    evaluation = Evaluation(spec, workload, workload.evaluation_data())
    metrics = evaluation.run(model, Peers(None), step=0, device=torch.device("cpu"))
    assert metrics == {"accuracy": 0.8}
    assert Still(of="frozen").model()(torch.zeros(2, 6)).shape == (2, 1)


def test_batch_norm_over_a_shard_of_one_sample_is_refused_before_step_0(train: Train) -> None:
    spec = story("Normed", size=9, batch_size=4, shards=2, epochs=2)
    run = train(spec, "refused", 2)
    assert run.verdict["kind"] == "WorkloadError:2"
    message = run.verdict["message"]
    assert "shards of 1 sample(s) (9 samples, batch_size 4, shards 2)" in message
    assert "set drop_last: true" in message
    assert run.steps() == []
    trained = train({**spec, "drop_last": True}, "trained", 2)
    assert [step.samples for step in trained.steps()] == [4, 4, 4, 4]


def test_a_forward_that_gives_a_dict_has_the_same_losses_and_keys_in_every_mode(
    train: Train,
) -> None:
    runs = everywhere(train, story("Telling", size=9, batch_size=4, shards=4, epochs=2))
    losses = [[step.loss for step in run.steps()] for run in runs]
    assert all(found == losses[0] for found in losses)
    assert len(losses[0]) == 6
    for run in runs:
        assert list(load_weights(run.folder)) == ["seen", "module.weight", "module.bias"]
    devices = [read_past(run.storage).attempts[0].fields["devices"] for run in runs]
    assert devices == [["cpu"], ["cpu"], ["cpu"], ["cpu", "cpu"]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_that_gives_no_step_is_refused_with_the_counts(train: Train, drop_last: bool) -> None:
    for size in (0, *([3] if drop_last else [])):
        spec = story("Counting", size=size, batch_size=4, shards=2, drop_last=drop_last)
        run = train(spec, f"run-{size}", 2)
        assert run.verdict["kind"] == "WorkloadError:2"
        counts = f"{size} samples, {size} in an epoch, batch_size 4, drop_last {drop_last}"
        assert counts in run.verdict["message"]
        assert run.steps() == []


@pytest.mark.parametrize("size", [1, 3])
def test_a_dataset_smaller_than_the_batch_and_the_workers_trains(train: Train, size: int) -> None:
    runs = everywhere(train, story("Counting", size=size, batch_size=8, shards=4, epochs=3))
    for run in runs:
        assert [step.samples for step in run.steps()] == [size] * 3


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_nested_batches_keep_types_keys_and_strings(train: Train, loader_processes: int) -> None:
    spec = story("Nested", size=11, batch_size=4, loader_processes=loader_processes, epochs=1)
    for run in everywhere(train, spec):
        assert len(run.steps()) == 3


def test_an_iterable_dataset_is_refused_and_says_what_to_use(train: Train) -> None:
    run = train(story("Streamed"), "run", 2)
    assert run.verdict["kind"] == "WorkloadError:2"
    assert "data() returned Stream, an IterableDataset" in run.verdict["message"]
    assert "Give a map-style dataset" in run.verdict["message"]


def test_orders_differ_by_epoch_and_a_resume_goes_on_in_the_same_one(train: Train) -> None:
    spec = story("Counting", size=10, batch_size=4, shards=2, epochs=3)
    straight = train({**spec, "loader_processes": 2}, "straight", 2)
    again = train(spec, "again", 1)
    assert [step.ids for step in again.steps()] == [step.ids for step in straight.steps()]
    assert len({tuple(ids) for ids in by_epoch(straight.steps())}) == 3
    for stop in (3, 4, 8):
        name = f"stopped-{stop}"
        train({**spec, "epochs": None, "max_steps": stop, "loader_processes": 2}, name, 2)
        resumed = train(spec, name, 1)
        assert [step.ids for step in resumed.steps()] == [step.ids for step in straight.steps()]
        assert resumed.digest == straight.digest


def by_epoch(steps: list[StepRecord]) -> list[list[str]]:
    return [[s.ids for s in steps if s.epoch == epoch] for epoch in (0, 1, 2)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7])
def test_accuracy_over_five_samples_with_one_wrong_is_exactly_four_fifths(
    train: Train, batch_size: int
) -> None:
    spec = story("Counting", size=4, shards=3, epochs=1, evaluate={"batch_size": batch_size})
    for run in everywhere(train, spec):
        assert run.evaluations() == [{"metrics": {"accuracy": 0.8}, "samples": 5}]
        assert run.result["evaluation"] == {"accuracy": 0.8}


@pytest.mark.parametrize(
    ("kind", "schedule", "precision"),
    [("adam", "multi-step", "fp32"), ("sgd", "cosine", "fp32"), ("sgd", "multi-step", "fp16")],
)
def test_three_steps_a_failure_and_three_steps_end_as_six_do(
    train: Train, tmp_path: Path, kind: str, schedule: str, precision: str
) -> None:
    marker = tmp_path / "marker"
    spec = story(
        "Resumed",
        kind=kind,
        schedule=schedule,
        marker=str(marker),
        max_steps=6,
        precision=precision,
        scaler={"init_scale": 8.0, "growth_interval": 2},
        checkpoint={"every_steps": 3},
    )
    first = train(spec, "broken", 2)
    assert first.result is None
    assert "ValueError: broken once" in first.verdict["message"]
    assert [step.step for step in first.steps()] == [0, 1, 2, 3]
    resumed = train(spec, "broken", 3)
    straight = train(spec, "straight", 1)
    assert resumed.digest == straight.digest
    rates = [step.lr for step in straight.steps()]
    assert [step.lr for step in resumed.steps()] == rates
    assert len({tuple(rate) for rate in rates}) == (6 if schedule == "cosine" else 2)


def story(workload: str, **fields: Any) -> dict[str, Any]:
    """A spec for a workload of stories.py; what is no field of the spec is an argument."""
    own = {"size", "of", "kind", "schedule", "marker"}
    args = {key: value for key, value in fields.items() if key in own}
    rest = {key: value for key, value in fields.items() if key not in own}
    if rest.get("epochs"):
        rest["max_steps"] = None
    return spec_of(f"stories:{workload}", args=args, **rest)
