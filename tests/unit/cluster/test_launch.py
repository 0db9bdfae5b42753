"""`train` in mode local: names, conflicts, extension, starting over."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep import (
    BudgetError,
    CheckpointError,
    ExitStatus,
    JobSpec,
    RunConflictError,
    SpecError,
    StorageError,
    load_weights,
    parse_spec,
    train,
)
from samestep.checkpoint.reading import choose
from samestep.checkpoint.storage import Storage
from samestep.replay.summary import summarize
from samestep.telemetry.past import read_past
from samestep.telemetry.targets import announce, announced

WORKLOAD = """
import torch
from torch import nn

import samestep


class Line(samestep.Workload):
    def __init__(self, lr=0.1, score=1.0):
        self.lr, self.score = lr, float(score)

    def model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def data(self):
        return torch.utils.data.TensorDataset(torch.randn(10, 2))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluation_data(self):
        return self.data()

    def evaluate(self, model, batch):
        return {"score": self.score}

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "line.py").write_text(WORKLOAD)
    yield tmp_path
    sys.modules.pop("line", None)  # others have one of that name


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., JobSpec]:
    def make(**fields: Any) -> JobSpec:
        base = {
            "workload": "line:Line",
            "batch_size": 4,
            "shards": 2,
            "epochs": 2,
            "mode": "local",
            "storage": str(tmp_path / "runs"),
            "checkpoint": {"every_steps": 2},
            "tracking": {"enabled": False},
        }
        return parse_spec({**base, **fields})

    return make


def test_a_run_is_named_after_its_workloads_module_unless_it_is_given_a_name(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    assert train(make_spec(), search=[folder]).name == "line"
    assert train(make_spec(name="given"), search=[folder]).name == "given"
    with pytest.raises(SpecError, match=r"the run name '\.\./up'"):
        train(make_spec(), name="../up", search=[folder])


def test_storage_that_can_not_be_written_is_refused_before_a_step(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    (folder / "taken").write_text("no folder")
    storage = str(folder / "taken" / "runs")
    with pytest.raises(
        StorageError, match=f"can't create {re.escape(storage)}.* a part of the path"
    ) as caught:
        train(make_spec(storage=storage), search=[folder])
    assert caught.value.exit_status is ExitStatus.BAD_INPUT


def test_a_finished_run_is_returned_as_it_is_and_extended_when_more_is_asked_for(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    done = train(make_spec(), search=[folder])
    assert (done.status, done.step) == ("done", 6)
    again = train(make_spec(), search=[folder])
    assert again == done
    assert len(read_past(Storage.at(done.run)).attempts) == 1
    longer = train(make_spec(epochs=3), search=[folder])
    straight = train(make_spec(epochs=3), name="straight", search=[folder])
    assert (longer.step, longer.digest) == (9, straight.digest)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"threads": 2}, {"args": {"lr": 0.2}}, {"shards": 4}, {"precision": "bf16"}],
)
def test_a_run_of_another_job_is_refused_with_the_fields_that_differ(
    make_spec: Callable[..., JobSpec], folder: Path, change: dict[str, Any]
) -> None:
    train(make_spec(epochs=1), search=[folder])
    with pytest.raises(RunConflictError, match=f"{next(iter(change))}: .* against ") as caught:
        train(make_spec(epochs=1, **change), search=[folder])
    assert caught.value.exit_status is ExitStatus.BAD_INPUT


def test_a_run_that_stopped_early_is_done_until_it_is_given_more_patience(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    def job(patience: int) -> JobSpec:
        return make_spec(epochs=5, early_stop={"metric": "score", "patience": patience})

    done = train(job(2), search=[folder])
    assert (done.status, done.exit_status, done.step) == ("done", ExitStatus.DONE, 9)
    assert done.message.startswith("early stop: score did not improve")
    assert train(job(2), search=[folder]) == done
    assert train(job(1), search=[folder]) == done
    more = train(job(3), search=[folder])
    assert (more.step, more.status) == (12, "done")
    assert more.digest == train(job(3), name="straight", search=[folder]).digest


def test_a_budget_that_is_used_up_stops_the_run_and_a_higher_one_resumes_it(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    tiny = {"budget": {"wall_hours": 1e-6}, "checkpoint": {"every_steps": 0}}
    stopped = train(make_spec(epochs=100_000, **tiny), search=[folder])
    assert (stopped.status, stopped.exit_status) == (
        "budget_exhausted",
        ExitStatus.BUDGET_EXHAUSTED,
    )
    assert stopped.message.startswith("budget.wall_hours is used up (")
    assert stopped.checkpoint is not None
    with pytest.raises(BudgetError, match=r"line does not go on: budget\.wall_hours is used"):
        train(make_spec(epochs=100_000, **tiny), search=[folder])
    steps = {"epochs": None, "max_steps": stopped.step + 2}
    done = train(make_spec(budget={"wall_hours": 1.0}, **steps), search=[folder])
    straight = train(make_spec(**steps), name="straight", search=[folder])
    assert (done.status, done.digest) == ("done", straight.digest)


def test_a_run_starts_from_one_that_is_named_and_goes_on_without_it(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    source = train(make_spec(epochs=1), name="source", search=[folder])
    messages: list[str] = []

    def observe(status: dict[str, Any]) -> None:
        messages.extend(message["text"] for message in status["messages"])

    spec = make_spec(epochs=1, init_from="source")
    first = train(spec, name="fine", search=[folder], observer=observe)
    assert any(f"starts from the weights of {source.run}, step 3" in text for text in messages)
    assert first.digest != source.digest
    Path(source.run).rename(folder / "elsewhere")
    again = train(make_spec(epochs=2, init_from="source"), name="fine", search=[folder])
    assert (again.status, again.step) == ("done", 6)
    with pytest.raises(RunConflictError, match=r"init_from\.path: '.*/source' against None"):
        train(make_spec(epochs=2), name="fine", search=[folder])


def test_a_relative_source_is_refused_inside_a_submitted_job(
    make_spec: Callable[..., JobSpec], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(SpecError, match=r"init_from\.path '\./source' is relative"):
        train(make_spec(init_from="./source"), search=[folder])


def test_when_the_metric_was_always_nan_the_latest_stands_for_the_best_and_the_run_says_so(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    messages: list[str] = []

    def observe(status: dict[str, Any]) -> None:
        messages.extend(message["text"] for message in status["messages"])

    best = {"every_steps": 2, "keep": 1, "best": {"metric": "score"}}
    spec = make_spec(checkpoint=best, args={"score": "nan"})
    done = train(spec, search=[folder], observer=observe)
    assert done.best is None
    assert any("no checkpoint is the best one: score was NaN" in text for text in messages)
    summary = summarize(Storage.at(done.run))
    assert summary.best is None
    assert summary.latest is not None
    assert summary.latest.step == 6
    assert choose(Storage.at(done.run), "best").step == 6


def test_restart_starts_over_and_keeps_the_run_before(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    first = train(make_spec(), search=[folder])
    other = train(make_spec(seed=1), search=[folder], restart=True)
    assert other.run == first.run
    assert other.digest != first.digest
    kept = json.loads(Path(f"{first.run}.replaced-1/result.json").read_text())
    assert kept["digest"] == first.digest


def test_a_start_takes_back_what_killed_runs_beside_it_told_prometheus(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    place = Storage.at(make_spec().storage)
    announce(place.child("left"), "127.0.0.1:4711")
    train(make_spec(metrics={"enabled": False}), search=[folder])
    assert announced(place) == {}


def test_other_data_on_resume_is_refused_with_both_sizes(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    train(make_spec(epochs=1), search=[folder])
    (folder / "line.py").write_text(WORKLOAD.replace("randn(10", "randn(9"))
    import sys

    sys.modules.pop("line")
    outcome = train(make_spec(epochs=2), search=[folder])
    assert outcome.exit_status is ExitStatus.BAD_INPUT
    assert "the training data has 9 samples" in outcome.message
    assert "was made with 10" in outcome.message


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_gives_the_same_end(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    straight = train(make_spec(), name="straight", search=[folder])
    half = train(make_spec(epochs=None, max_steps=5), name="half", search=[folder])
    (newest,) = Path(half.run, "checkpoints/step-00000005").glob("state-*.safetensors")
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    end = train(make_spec(epochs=None, max_steps=6), name="half", search=[folder])
    assert end.digest == straight.digest
    run = Path(end.run)
    assert [
        path.name.startswith("step-00000005") for path in (run / "checkpoints/damaged").iterdir()
    ]
    (incident,) = (json.loads(p.read_text()) for p in run.glob("incidents/*/incident.json"))
    assert incident["kind"] == "damaged_checkpoint"
    assert newest.name in incident["message"]
    past = read_past(Storage.at(end.run))
    assert (past.attempts[-1].start_step, past.num_redone) == (4, 1)


@pytest.mark.parametrize("lost", ["step-*/state-*", "step-*/manifest.json", "step-*"])
def test_no_whole_checkpoint_stops_and_says_so_until_the_run_is_started_over(
    make_spec: Callable[..., JobSpec], folder: Path, lost: str
) -> None:
    first = train(make_spec(), search=[folder])
    for path in Path(first.run).glob(f"checkpoints/{lost}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    left = sorted(Path(first.run).glob("checkpoints/step-*/*"))
    outcome = train(make_spec(epochs=3), search=[folder])
    assert outcome.exit_status is CheckpointError.exit_status
    assert "no checkpoint of" in outcome.message
    assert "--restart" in outcome.message
    assert sorted(Path(first.run).glob("checkpoints/step-*/*")) == left
    assert train(make_spec(epochs=3), search=[folder], restart=True).status == "done"


def test_relative_storage_is_refused_inside_a_submitted_job(
    make_spec: Callable[..., JobSpec], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(StorageError, match=r"storage './runs' is relative"):
        train(make_spec(storage="./runs"), search=[folder])


def test_a_workload_of_the_same_name_in_another_folder_is_another_workload(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    first = train(make_spec(epochs=1), name="first", search=[folder])
    (folder / "other").mkdir()
    (folder / "other/line.py").write_text(WORKLOAD.replace("Linear(2, 4)", "Linear(2, 3)"))
    (folder / "other/line.py").write_text(
        (folder / "other/line.py").read_text().replace("Linear(4, 1)", "Linear(3, 1)")
    )
    second = train(make_spec(epochs=1), name="second", search=[folder / "other"])
    assert load_weights(first.run)["0.weight"].shape == (4, 2)
    assert load_weights(second.run)["0.weight"].shape == (3, 2)


def test_what_a_workload_draws_does_not_touch_the_callers_generators(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    import random

    import numpy as np
    import torch

    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    train(make_spec(epochs=1), search=[folder])
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert not torch.are_deterministic_algorithms_enabled()
