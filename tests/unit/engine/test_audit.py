"""The audit: it changes no bits, finds a single flipped one, and tells whose it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import PLACES, Run, Train, replayed
from hypothesis import given
from hypothesis import strategies as st
from pool import spec_of

from samestep import parse_spec
from samestep.engine.audit import Task, differing, judged, plan_audit
from samestep.exact.tree import shard_range
from samestep.incidents.record import list_incidents
from samestep.names import IncidentKind

Results = Callable[..., list[Any]]
NUM_STEPS = 12


def spec(audit_every: int = 1, **fields: Any) -> dict[str, Any]:
    args = {key: fields.pop(key) for key in ("rank", "at", "marker", "lr") if key in fields}
    incidents = {"audit_every": audit_every, **fields.pop("incidents", {})}
    rest = {"shards": 6, "batch_size": 13, "max_steps": NUM_STEPS, **fields}
    return spec_of("flipping:Flipping", args=args, incidents=incidents, **rest)


def task_of(step: int, world_size: int, shards: int = 6) -> Task:
    parsed = parse_spec(spec(shards=shards))
    task = plan_audit(
        parsed,
        step,
        [2] * shards,
        world_size=world_size,
        replicas=[range(shards)],
        pairs_in_place=True,
    )
    assert task is not None
    return task


def step_where(wanted: Callable[[Task], bool], world_size: int) -> int:
    return next(step for step in range(4, NUM_STEPS) if wanted(task_of(step, world_size)))


@pytest.fixture
def calm(train: Train) -> str:
    return train(spec(0), "calm").digest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_audit_of_every_step_changes_no_bits_and_finds_nothing(
    train: Train, precision: str
) -> None:
    calm = train(spec(0, precision=precision), "calm")
    for number, place in enumerate(PLACES):
        run = train(spec(precision=precision), f"audited-{number}", **place)
        assert run.digest == calm.digest
        assert list_incidents(run.storage) == []


def test_gradients_that_are_converted_and_short_batches_are_audited_too(train: Train) -> None:
    fields = {"reduce_dtype": "float32", "batch_size": 5, "lr": 0.001, "loader_processes": 1}
    calm = train(spec(0, **fields), "calm")
    run = train(spec(**fields), "audited", world_size=3)
    assert run.digest == calm.digest
    assert list_incidents(run.storage) == []


@pytest.mark.parametrize("whose", ["owner", "auditor"])
def test_a_bit_flipped_once_is_found_and_the_step_is_taken_again(
    results: Results, tmp_path: Path, calm: str, whose: str
) -> None:
    at = step_where(lambda task: getattr(task, whose)[0] == 1, world_size=3)
    flipping = spec(rank=1, at=at, marker=str(tmp_path / "flipped"))
    flipping["checkpoint"] = {"every_steps": 100}
    answers = results("broken_attempts", 3, spec=flipping, run=str(tmp_path / "run"), lost=[None])
    run = Run(tmp_path / "run", answers)
    assert run.digest == calm
    assert answers[0]["redone"] == 0
    (incident,) = list_incidents(run.storage)
    assert (incident.kind, incident.step) == (IncidentKind.CORRUPTION, at)
    assert (incident.world_rank, incident.seen["transient"]) == (1, True)
    assert incident.seen[whose] == 1
    assert "worker 1 on " in incident.message
    assert "computed wrongly, and was right when everybody computed it once more" in (
        incident.message
    )


def test_a_machine_that_is_always_wrong_is_named_and_does_not_get_into_the_next_group(
    results: Results, tmp_path: Path
) -> None:
    at = step_where(lambda task: task.owner[0] == 1, world_size=3)
    flipping = spec(rank=1, at=at)
    answers = results("broken_attempts", 3, spec=flipping, run=str(tmp_path), lost=[None])
    first = list_incidents(Run(tmp_path, answers).storage)[0]
    assert (first.kind, first.step, first.world_rank) == (IncidentKind.CORRUPTION, at, 1)
    assert first.seen["transient"] is False
    (audit, _), (canary, why) = answers[0]["failed"]
    assert (audit, canary) == (False, True)
    assert "worker 1: canary" in why


def test_a_replay_decides_once_more_whose_gradient_was_wrong(
    results: Results, tmp_path: Path
) -> None:
    """Also where the run could not: two workers that each stand by their result."""
    at = step_where(lambda task: task.owner[0] == 1 and len(task.computed) == 1, world_size=3)
    jobs = {
        "sure": (3, spec(rank=1, at=at, marker=str(tmp_path / "flipped"))),
        "unsure": (2, spec(rank=1, at=at, incidents={"audit": "stop"})),
    }
    found = {}
    for name, (world_size, job) in jobs.items():
        run = str(tmp_path / name)
        answers = results("broken_attempts", world_size, spec=job, run=run, lost=[None])
        found[name] = list_incidents(Run(tmp_path / name, answers).storage)[0]

    def command(name: str, *options: str) -> list[str]:
        place = str(tmp_path / name)
        return ["replay", place, found[name].id, "--code", str(Path(__file__).parent), *options]

    flips_too = ["--set", "args.rank=0", "--set", "args.marker=null"]
    answers = replayed(
        tmp_path,
        [
            command("sure", "--report", "page.html"),
            command("sure", "--json"),
            command("unsure", "--json"),
            command("sure", "--json", *flips_too),
            command("sure", "--json", "--set", "seed=4"),
        ],
    )
    told, *rest = answers
    sure, unsure, wrong_too, neither = (json.loads(answer["out"]) for answer in rest)
    seen = found["sure"].seen
    assert [answer["status"] for answer in answers] == [0, 0, 0, 11, 11], answers
    assert (sure["verdict"], sure["audit"]["digest"]) == ("reproduced", seen["right"])
    assert sure["audit"]["right"]["world_rank"] == seen["auditor"] != 1
    assert [claim["world_rank"] for claim in sure["audit"]["wrong"]] == [1]
    assert found["unsure"].seen["right"] is None
    assert [claim["world_rank"] for claim in unsure["audit"]["wrong"]] == [1]
    assert "the run itself could not tell which of them was wrong" in unsure["notes"]
    assert wrong_too["audit"]["right"]["world_rank"] == 1
    assert neither["audit"]["right"] is None
    first = told["out"].splitlines()[0]
    assert first.startswith(f"reproduced bit for bit: the gradient of {seen['parameter']} in shard")
    assert first.endswith(f"by worker 1 on {os.uname().nodename} (as a part of the step) is wrong")
    assert seen["digests"][0] in (tmp_path / "page.html").read_text()


def test_policy_stop_ends_the_run_before_the_update(results: Results, tmp_path: Path) -> None:
    at = step_where(lambda task: task.owner[0] == 1, world_size=2)
    flipping = spec(rank=1, at=at, incidents={"audit": "stop"})
    answers = results("broken_attempts", 2, spec=flipping, run=str(tmp_path), lost=[None])
    assert all(final for final, _ in answers[0]["failed"])
    run = Run(tmp_path, answers)
    assert len(run.steps()) == at
    # Two against two: it can be told that somebody is wrong, but not who.
    found = list_incidents(run.storage)[0]
    assert found.world_rank is None
    assert "does not tell which of them was wrong" in found.message


def test_a_worker_alone_compares_with_itself(train: Train, tmp_path: Path) -> None:
    run = train(spec(rank=0, at=5, marker=str(tmp_path / "flipped")), "alone")
    assert run.verdict["kind"] == "CorruptionError:1"
    (incident,) = list_incidents(run.storage)
    assert incident.seen["culprit"] == 0
    assert train(spec(rank=0, at=5, marker=str(tmp_path / "flipped")), "alone").digest == (
        train(spec(0), "calm").digest
    )


@given(step=st.integers(0, 500), shards=st.integers(1, 40), data=st.data(), in_place=st.booleans())
def test_what_is_audited_lies_with_its_owner_and_is_computed_by_another(
    step: int, shards: int, data: st.DataObject, in_place: bool
) -> None:
    world_size = data.draw(st.integers(1, shards))
    filled = data.draw(st.integers(1, shards))
    sizes = [1] * filled + [0] * (shards - filled)
    parsed = parse_spec(spec(shards=shards))
    given = {"world_size": world_size, "replicas": [range(shards)], "pairs_in_place": in_place}
    task = plan_audit(parsed, step, sizes, **given)
    assert task is not None
    assert task == plan_audit(parsed, step, sizes, **given)
    assert task.shard < filled
    own = shard_range(shards, world_size, task.owner[0])
    assert set(task.computed) <= set(own)
    assert task.computed[-1] == task.shard
    assert len(task.computed) == 1 or (in_place and task.shard % 2 == 1)
    assert (task.auditor == task.owner) == (world_size == 1)


def test_every_shard_and_every_worker_has_its_turn() -> None:
    tasks = [task_of(step, 3) for step in range(300)]
    assert {task.shard for task in tasks} == set(range(6))
    assert {task.auditor[0] for task in tasks} == {0, 1, 2}


def test_nothing_is_audited_in_between_or_where_there_is_nothing() -> None:
    given = {"world_size": 1, "replicas": [range(6)], "pairs_in_place": True}
    every_third = parse_spec(spec(3))
    due = [plan_audit(every_third, step, [1] * 6, **given) is not None for step in range(6)]
    assert due == [False, False, True] * 2
    assert plan_audit(every_third, 2, [0] * 6, **given) is None
    assert plan_audit(parse_spec(spec(0)), 2, [1] * 6, **given) is None


def test_the_majority_is_right_and_a_tie_tells_nothing() -> None:
    task = task_of(step_where(lambda task: task.owner[0] == 1, 3), 3)
    right, wrong = {"w": "a"}, {"w": "b"}
    assert differing(right, right) is None
    assert differing(right, wrong) == "w"

    def culprit(owned: dict[str, str], audited: dict[str, str], *repeats: dict[str, str]) -> Any:
        finding = judged(task, "w", owned, audited, repeats)
        return finding.culprit, finding.is_transient

    assert culprit(wrong, right, right, right, right) == (1, True)
    assert culprit(wrong, right, right, wrong, right) == (1, False)
    assert culprit(right, wrong, right, right, right) == (task.auditor[0], True)
    assert culprit(right, wrong, right, wrong) == (None, False)
