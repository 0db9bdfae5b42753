from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.cluster.budget import LOOK_S, BudgetWatch
from samestep.errors import ExitStatus, SpecError
from samestep.names import Event
from samestep.spec import dump_spec, parse_spec
from samestep.spec_budget import Budget
from samestep.telemetry.accounting import NOTICED_LATE
from samestep.telemetry.budget import Spending, ended_by_budget
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord, StepRecord

JOB = {"workload": "a:B", "batch_size": 8, "shards": 4, "max_steps": 100}
LIMITS = Budget(wall_hours=1.0, worker_hours=2.0, cost=30.0, cost_per_worker_hour=10.0)


def event(kind: Event, time: float, **fields: Any) -> EventRecord:
    return EventRecord(event=kind, step=0, attempt=1, time=time, fields=fields)


def spent(*lines: EventRecord | StepRecord, now_s: float | None = None) -> dict[str, float]:
    spending = Spending()
    for line in lines:
        spending.add(line)
    return {name: round(use.used, 6) for name, use in spending.uses(LIMITS, now_s).items()}


def test_time_is_that_of_attempts_times_their_workers() -> None:
    first = [event(Event.ATTEMPT_STARTED, 1000.0, world_size=2), event(Event.ATTEMPT_ENDED, 2800.0)]
    # Nobody ran the run between the two.
    second = [event(Event.ATTEMPT_STARTED, 9000.0, world_size=4), event(Event.FINISHED, 9900.0)]
    found = spent(*first, *second)
    assert found == {"wall_hours": 0.75, "worker_hours": 2.0, "cost": 20.0}
    assert spent(*first, *second, now_s=99_000.0) == found


def test_the_attempt_that_is_under_way_counts_up_to_now() -> None:
    started = event(Event.ATTEMPT_STARTED, 0.0, world_size=2)
    assert spent(started, now_s=1800.0) == {"wall_hours": 0.5, "worker_hours": 1.0, "cost": 10.0}


def test_one_that_died_counts_up_to_its_last_line(make_step: Callable[..., StepRecord]) -> None:
    started = event(Event.ATTEMPT_STARTED, 0.0, world_size=1)
    step = StepRecord(**{**vars(make_step(0)), "time": 360.0})
    late = event(Event.ATTEMPT_ENDED, 9000.0, **{NOTICED_LATE: True})
    assert spent(started, step, late)["wall_hours"] == 0.1
    again = event(Event.ATTEMPT_STARTED, 9000.0, world_size=1)
    assert spent(started, step, again, now_s=9360.0)["wall_hours"] == 0.2


def test_what_is_used_up_is_named_with_its_limit() -> None:
    spending = Spending()
    spending.add(event(Event.ATTEMPT_STARTED, 0.0, world_size=4))
    assert spending.exhausted(LIMITS, 1700.0) is None
    told = spending.exhausted(LIMITS, 1800.0)
    assert told is not None
    assert told.startswith("budget.worker_hours is used up (2 of 2); raise it and run the same")
    assert spending.exhausted(Budget(), 1e9) is None


def test_a_cost_needs_a_price() -> None:
    with pytest.raises(SpecError, match=r"budget: cost is 5\.0, but cost_per_worker_hour is not"):
        parse_spec({**JOB, "budget": {"cost": 5.0}})


def test_a_stop_for_the_budget_ends_with_a_status_of_its_own() -> None:
    result = {"status": "interrupted", "exit_status": 3, "message": "", "reason": "stop", "step": 7}
    assert ended_by_budget(result, "Ctrl-C") == result
    assert ended_by_budget(result, None) == result
    reason = "budget.cost is used up (2 of 2)"
    assert ended_by_budget({**result, "status": "done"}, reason)["status"] == "done"
    ended = ended_by_budget(result, reason)
    assert (ended["status"], ended["exit_status"]) == (
        "budget_exhausted",
        ExitStatus.BUDGET_EXHAUSTED,
    )
    assert (ended["message"], ended["step"]) == (reason, 7)


def test_the_driver_follows_the_ledger_and_looks_now_and_then(run: Storage) -> None:
    budget = {"wall_hours": 0.5}
    spec = parse_spec({**JOB, "budget": budget})
    now = [1000.0]
    recorder = Recorder(run.uri, run="r", spec_yaml=dump_spec(spec), clock=lambda: now[0])
    watch = BudgetWatch(run, spec.budget, clock=lambda: now[0])
    assert watch.exhausted() is None
    recorder.begin_attempt({"start_step": 0, "mode": "ddp", "world_size": 2})
    now[0] += 1799.0
    assert watch.exhausted() is None
    now[0] += LOOK_S / 2
    assert watch.exhausted() is None  # it looked just before
    now[0] += LOOK_S
    told = watch.exhausted()
    assert told is not None
    recorder.request_stop(told)
    result = {"status": "interrupted", "step": 0, "digest": "", "evaluation": None, "message": ""}
    recorder.finish(1, {**result, "exit_status": 3})
    assert recorder.result() is not None
    assert recorder.result()["status"] == "budget_exhausted"  # type: ignore[index]
    recorder.close()
