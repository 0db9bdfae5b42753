"""A run that goes back leaves the batches out, and is then as if it had been told so before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import PLACES, Run, Train, everywhere
from pool import spec_of

from samestep.checkpoint.committed import list_checkpoints
from samestep.incidents.record import list_incidents
from samestep.replay.compare import Verdict, compare_runs
from samestep.telemetry.ledger import steps
from samestep.telemetry.past import read_past

Results = Callable[..., list[Any]]
NUM_STEPS = 10
BACK = 2
OWN = ("poison", "bursts_at", "idle", "unreadable", "breaks", "seen", "breaking_rank")


def spec(policy: str = "rollback", **fields: Any) -> dict[str, Any]:
    args = {"drifts": True, **{key: fields.pop(key) for key in OWN if key in fields}}
    incidents = {"non_finite": policy, "rollback_steps": BACK, **fields.pop("incidents", {})}
    rest = {"max_steps": NUM_STEPS, "checkpoint": {"every_steps": 1}, **fields}
    return spec_of("poisoned:Poisoned", args=args, incidents=incidents, **rest)


def ways_back(run: Run) -> list[tuple[int, int]]:
    return [(back.to, back.until) for back in read_past(run.storage).rollbacks]


@pytest.fixture(scope="module")
def straight(pool_of_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("straight")
    where = pool_of_session.fresh_path()
    task = {"spec": spec(), "run": str(folder / "run"), "world_size": 1, "where": where}
    [(kind, answer)] = pool_of_session.run([("attempt", task)])
    assert kind == "done"
    return Run(folder / "run", [answer])


def test_it_is_the_same_in_every_place_and_as_told_from_the_start(
    train: Train, straight: Run
) -> None:
    back = ways_back(straight)
    assert len(back) >= 2
    incidents = list_incidents(straight.storage)
    assert back == [(max(0, each.step - BACK), each.step + 1) for each in incidents]
    # Where the checkpoints lie does not matter: with these most ways back begin at step 0.
    rare = {"checkpoint": {"every_steps": 4, "keep": 1}}
    runs = everywhere(train, spec(**rare))
    assert {run.digest for run in runs} == {straight.digest}
    for run in runs:
        assert ways_back(run) == back
    told = train(spec("stop", incidents={"leave_out": back}), "told", world_size=3)
    assert told.digest == straight.digest
    assert not list_incidents(told.storage)
    found = compare_runs(told.storage, straight.storage)
    assert (found.verdict, found.num_compared) == (Verdict.IDENTICAL, NUM_STEPS)
    left_out = {step for first, end in back for step in range(first, end)}
    for step, record in steps(straight.storage).items():
        assert record.skipped == (step in left_out)
        assert (record.loss is None) == (step in left_out)
        assert record.samples


def test_it_is_the_same_over_a_stop_and_resume(train: Train, straight: Run) -> None:
    to, until = ways_back(straight)[1]
    for stop in (to, to + 1, until - 1, until):
        train(spec(max_steps=stop), f"stop-{stop}", **PLACES[stop % 4])
        resumed = train(spec(), f"stop-{stop}", **PLACES[(stop + 1) % 4])
        assert resumed.digest == straight.digest
        assert ways_back(resumed) == ways_back(straight)


@pytest.mark.parametrize(
    ("when", "lost"),
    [("before", None), ("on the way", 1), ("while passing over", 0), ("after", 1)],
)
def test_it_is_the_same_when_a_worker_fails_around_a_rollback(
    results: Results, tmp_path: Path, straight: Run, when: str, lost: int | None
) -> None:
    to, until = ways_back(straight)[1]
    assert 0 < to < until < NUM_STEPS
    # Step `to` is come to once before the rollback, and again while it is passed over.
    breaks = {
        "before": (until - 1, 1),
        "on the way": (to - 1, 2),
        "while passing over": (until - 1, 2),
        "after": (until, 1),
    }[when]
    folder = tmp_path / "run"
    fields = {"breaks": [list(breaks)], "seen": str(tmp_path), "breaking_rank": 1}
    broken = spec(checkpoint={"every_steps": 3, "snapshot_every": 1}, **fields)
    answers = results("broken_attempts", 3, spec=broken, run=str(folder), lost=[lost])
    run = Run(folder, answers)
    ((is_final, message),) = answers[0]["failed"]  # it has to break once
    assert not is_final, message
    assert run.result["status"] == "done", run.verdict
    assert ways_back(run) == ways_back(straight)
    # The args are no part of the state.
    assert run.digest == straight.digest
    assert max(info.step for info in list_checkpoints(run.storage)) == NUM_STEPS


@pytest.mark.parametrize("when", ["before", "after"])
def test_it_is_the_same_when_whoever_tells_of_it_fails_meanwhile(
    results: Results, tmp_path: Path, straight: Run, when: str
) -> None:
    job = spec(checkpoint={"every_steps": 3, "snapshot_every": 1})
    folder = tmp_path / "run"
    given = {"spec": job, "run": str(folder), "lost": [None], "stumbles": when}
    answers = results("broken_attempts", 3, **given)
    run = Run(folder, answers)
    assert [len(answer["failed"]) for answer in answers] == [1] * 3
    assert f"failed {when} the recorder had it" in answers[0]["failed"][0][1]
    assert run.digest == straight.digest
    assert ways_back(run) == ways_back(straight)


def test_only_so_many_times(train: Train) -> None:
    run = train(spec(incidents={"max_rollbacks": 1}), "run", world_size=2)
    assert len(ways_back(run)) == 1
    assert run.verdict["kind"] == "IncidentError:1"
    assert run.verdict["message"].endswith(
        "the run went back 1 times already, and incidents.max_rollbacks is 1"
    )


def test_weights_that_are_not_finite_are_left_behind(train: Train) -> None:
    fields = {"bursts_at": 4, "poison": 1.0}
    runs = everywhere(train, spec(**fields, incidents={"weights_every": 5, "rollback_steps": 3}))
    assert ways_back(runs[0]) == [(1, 5)]
    leave_out = {"weights_every": 5, "leave_out": [[1, 5]]}
    assert train(spec("stop", **fields, incidents=leave_out), "told").digest == runs[0].digest


def test_a_way_back_that_is_too_short_for_the_weights_ends_the_run(train: Train) -> None:
    incidents = {"weights_every": 5, "rollback_steps": 2}
    run = train(spec(bursts_at=1, idle=True, poison=1.0, incidents=incidents), "run")
    assert ways_back(run) == [(2, 5)]
    assert "was not far enough: incidents.rollback_steps is 2" in run.verdict["message"]


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_what_is_left_out_is_not_even_loaded(
    train: Train, straight: Run, loader_processes: int
) -> None:
    bad = [incident.step for incident in list_incidents(straight.storage)]
    leave_out = {"leave_out": [[step, step + 1] for step in bad]}
    fields = {"unreadable": True, "loader_processes": loader_processes, "incidents": leave_out}
    run = train(spec("stop", **fields), "run", world_size=2)
    assert run.result["status"] == "done", run.verdict
    # Once each: a rollback passes over more, so that it meets fewer of them.
    assert [s for s, record in steps(run.storage).items() if record.loss is None] == bad
