"""A fork goes on from any step of a run, and is what the run would have been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import PLACES, Train
from pool import spec_of

from samestep.replay.compare import Verdict, compare_runs
from samestep.replay.summary import summarize
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.identity import read_spec
from samestep.telemetry.ledger import events, steps

Results = Callable[..., list[Any]]
NUM_STEPS = 10
EVALUATION = {"every_steps": 3, "every_epochs": 0}


def spec(**fields: Any) -> dict[str, Any]:
    rest = {"max_steps": NUM_STEPS, "checkpoint": {"every_steps": 4, "keep": 9}, **fields}
    return spec_of("feature_cases:Scored", args={"schedule": "step"}, evaluate=EVALUATION, **rest)


def data_of(run: Path) -> dict[str, Any]:
    from samestep.checkpoint.storage import Storage

    return read_spec(Storage.at(str(run))).model_dump(mode="json")


@pytest.mark.parametrize("at", [0, 4, 6, NUM_STEPS])
def test_a_fork_without_changes_comes_to_the_same(
    train: Train, results: Results, tmp_path: Path, at: int
) -> None:
    parent = train(spec(), "parent", **PLACES[at % 4])
    [made] = results("forked", run=str(parent.folder), step=at, called="fork")
    assert made["num_taken"] == (2 if at == 6 else 0)
    fork = train(data_of(tmp_path / "fork"), "fork", **PLACES[(at + 1) % 4])
    assert fork.digest == parent.digest
    found = compare_runs(parent.storage, fork.storage)
    assert (found.verdict, found.num_compared) == (Verdict.IDENTICAL, NUM_STEPS)
    assert found.evaluations_compared == len(parent.evaluations())
    summary = summarize(fork.storage)
    assert summary.fork is not None
    assert (summary.fork["parent"], summary.fork["step"]) == (parent.storage.uri, at)
    assert summary.attempts[0].start_step == at


def test_a_fork_leaves_batches_out_as_if_told_from_the_start(
    train: Train, results: Results, tmp_path: Path
) -> None:
    parent = train(spec(), "parent")
    results("forked", run=str(parent.folder), step=5, called="fork", skip=[(6, 8)])
    assert summarize_status(tmp_path / "fork") == "forked"
    fork = train(data_of(tmp_path / "fork"), "fork", world_size=2)
    told = train(spec(incidents={"leave_out": [[6, 8]]}), "told", world_size=3)
    assert fork.digest == told.digest != parent.digest
    assert [step for step, record in steps(fork.storage).items() if record.loss is None] == [6, 7]


def summarize_status(run: Path) -> str:
    from samestep.checkpoint.storage import Storage

    return summarize(Storage.at(str(run))).status


def test_a_fork_of_a_run_that_went_back_leaves_the_same_batches_out(
    train: Train, results: Results, tmp_path: Path
) -> None:
    incidents = {"non_finite": "rollback", "rollback_steps": 1}
    went_back = spec_of(
        "poisoned:Poisoned",
        incidents=incidents,
        max_steps=8,
        checkpoint={"every_steps": 3, "keep": 9},
    )
    parent = train(went_back, "parent", world_size=2)
    results("forked", run=str(parent.folder), step=7, called="fork")
    fork = train(data_of(tmp_path / "fork"), "fork")
    assert fork.digest == parent.digest
    # And a fork of the fork, from a step before all that.
    results("forked", run=str(fork.folder), step=1, called="again")
    assert train(data_of(tmp_path / "again"), "again").digest == parent.digest
    assert len(events(fork.storage)) > 0


def test_what_does_not_fit_is_told_and_leaves_nothing_behind(
    train: Train, results: Results, failures: Callable[..., Any], tmp_path: Path
) -> None:
    parent = train(spec(), "parent")
    refused = {
        "shards can't become 2 in a fork": {"overrides": {"shards": 2}},
        "does not fit the workload": {
            "overrides": {"workload": "cases:Conv", "args": {}, "evaluate": {}}
        },
        "has taken 10 steps": {"step": 11},
        "must be A:B with 5 <= A < B": {"skip": [(4, 6)]},
        "told by --skip-steps": {"overrides": {"incidents.leave_out": [[6, 7]]}},
        "exists already": {"called": "parent"},
        "the run name": {"called": "../x"},
    }
    for text, arguments in refused.items():
        given = {"step": 5, "called": "fork", **arguments}
        [(_, message)] = failures("forked", run=str(parent.folder), **given)
        assert text in message
        assert not (tmp_path / "fork").exists()


def test_a_changed_job_takes_effect_behind_the_fork(
    train: Train, results: Results, tmp_path: Path
) -> None:
    parent = train(spec(), "parent")
    results("forked", run=str(parent.folder), step=5, called="fork", overrides={"clip_norm": 1e-3})
    fork = train(data_of(tmp_path / "fork"), "fork")
    before, after = steps(parent.storage), steps(fork.storage)
    assert [before[step].loss == after[step].loss for step in (4, 5, 6)] == [True, True, False]
    changed = parse_spec({**spec(), "clip_norm": 1e-3})
    assert dump_spec(read_spec(fork.storage)) == dump_spec(changed)
