"""When a group forms: workers that are not alike are refused, or told of where that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import Run
from pool import Pool, spec_of

from samestep.names import Event
from samestep.telemetry.ledger import read_ledger

Each = Callable[..., list[dict[str, Any]]]
OTHER_THREADS = "worker 1: threads: 2 against 1"


@pytest.fixture
def attempted(pool: Pool, tmp_path: Path) -> Each:
    """An attempt in which worker 1 was given other arguments than the others."""

    def attempted(told: dict[str, Any], world_size: int = 2, **of_worker_1: Any) -> Any:
        arguments = {"spec": told, "run": str(tmp_path / "run"), "where": pool.fresh_path()}
        tasks = []
        for rank in range(world_size):
            own = of_worker_1 if rank == 1 else {}
            place = {"world_rank": rank, "world_size": world_size}
            tasks.append(("attempt", {**arguments, **place, **own}))
        answers = pool.run(tasks)
        assert [kind for kind, _ in answers] == ["done"] * world_size, answers
        return [answer for _, answer in answers]

    return attempted


def job(workload: str = "Mlp", **fields: Any) -> dict[str, Any]:
    return spec_of(workload, **{"max_steps": 3, **fields})


def differences_told(run: Run) -> list[list[str]]:
    events = [line for line in read_ledger(run.storage) if line["type"] == "event"]
    return [
        event["fields"]["differences"]
        for event in events
        if event["event"] == Event.PLACEMENT_DEPENDENT
    ]


def test_workers_of_other_numerics_are_refused_and_the_error_names_who_and_what(
    attempted: Each, tmp_path: Path
) -> None:
    answers = attempted(job(), 3, spec=job(threads=2))
    run = Run(tmp_path / "run", answers)
    assert run.verdict["kind"] == "RunConflictError:2"
    message = run.verdict["message"]
    assert "the workers' numerics differ, so the bits would depend on which worker" in message
    assert [line.strip() for line in message.splitlines() if ": threads:" in line] == [
        OTHER_THREADS
    ]
    assert "worker 2" not in message
    assert "or set numerics.mixed: allow" in message
    assert run.steps() == []


def test_workers_of_other_numerics_train_where_that_is_allowed_and_the_ledger_tells_it(
    attempted: Each, tmp_path: Path
) -> None:
    allowed = {"numerics": {"mixed": "allow"}}
    answers = attempted(job(**allowed), 3, spec=job(threads=2, **allowed))
    run = Run(tmp_path / "run", answers)
    assert len(run.steps()) == 3
    assert run.digest
    assert differences_told(run) == [[OTHER_THREADS]]


def test_a_worker_that_computes_other_bits_trains_where_that_is_allowed_and_is_told_of(
    attempted: Each, tmp_path: Path
) -> None:
    fields = {"incidents": {"audit_every": 0}, "args": {"rank": 1, "at": 0}}
    flipping = job("flipping:Flipping", numerics={"mixed": "allow"}, **fields)
    run = Run(tmp_path / "run", attempted(flipping))
    assert len(run.steps()) == 3
    [[line]] = differences_told(run)
    assert line.startswith("worker 1: canary ")
    of_worker_1, against, of_worker_0 = line.removeprefix("worker 1: canary ").split()
    assert against == "against"
    assert of_worker_1 != of_worker_0


def test_workers_that_are_alike_are_told_to_be_nothing_else(
    attempted: Each, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", attempted(job(numerics={"mixed": "allow"})))
    assert run.digest
    assert differences_told(run) == []
    assert not (tmp_path / "run" / "probes").exists()


def test_a_run_directory_that_not_every_worker_shares_is_refused_and_says_who_does_not_see_whom(
    attempted: Each, tmp_path: Path
) -> None:
    answers = attempted(job(), run=str(tmp_path / "elsewhere"))
    run = Run(tmp_path / "run", answers)
    assert run.verdict["kind"] == "StorageError:2"
    for part in (
        "worker 0 on ",
        "does not see what worker 1 wrote to ",
        "storage must be a file system that all nodes share",
        "set storage: in the job file",
    ):
        assert part in run.verdict["message"]
    assert run.steps() == []


def test_a_run_directory_that_one_worker_can_not_write_is_refused_on_all_and_says_which(
    attempted: Each, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    blocked = str(tmp_path / "file" / "run")
    run = Run(tmp_path / "run", attempted(job(), 3, run=blocked))
    assert run.verdict["kind"] == "StorageError:2"
    assert (
        f"worker 1 can't write the run directory: can't write {blocked}" in (run.verdict["message"])
    )
    assert run.steps() == []
