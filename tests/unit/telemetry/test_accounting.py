from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.names import Event, TimePart
from samestep.telemetry.accounting import NOTICED_LATE, OPENED, PROCESS_STARTED, TIMING, Accounting
from samestep.telemetry.records import EventRecord, StepRecord

Record = StepRecord | EventRecord


def event(kind: Event, time: float, step: int = 0, **fields: Any) -> EventRecord:
    return EventRecord(event=kind, step=step, attempt=1, time=time, fields=fields)


def started(time: float, start_step: int = 0, known: int = 0, **fields: Any) -> EventRecord:
    given = {"start_step": start_step, "known_steps": known, "world_size": 2}
    return event(Event.ATTEMPT_STARTED, time, start_step, **given, **fields)


def step(number: int, time: float | None, **timing: float) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=0,
        samples=8,
        loss=0.5,
        shard_losses=[0.5],
        shard_weights=[8.0],
        grad_norm=1.0,
        lr=[0.1],
        ids="0",
        timing=timing,
        time=time,
    )


def account(records: Sequence[Record]) -> dict[TimePart, float]:
    accounting = Accounting()
    for record in records:
        accounting.add(record)
    assert math.isclose(sum(accounting.seconds.values()), accounting.wall_s, abs_tol=1e-6)
    return {part: round(seconds, 6) for part, seconds in accounting.seconds.items() if seconds}


def test_an_undisturbed_run_goes_to_waiting_starting_and_what_its_steps_tell() -> None:
    parts = account(
        [
            started(110.0, **{OPENED: 100.0, PROCESS_STARTED: 104.0}),
            # Both came in with one message.
            step(0, 113.0, training_s=0.6, data_s=0.3, communication_s=0.1, elapsed_s=1.0),
            step(1, 113.0, training_s=0.5, checkpoint_s=0.3, idle_s=0.2, elapsed_s=2.0),
            event(Event.ATTEMPT_ENDED, 115.0, 2, reason="done"),
            event(
                Event.FINISHED,
                115.0,
                2,
                **{TIMING: {"evaluation_s": 1.0, "checkpoint_s": 1.5, "elapsed_s": 4.5}},
            ),
        ]
    )
    assert parts == {
        TimePart.WAITING: 4.0,
        TimePart.STARTING: 6.0,
        TimePart.KEPT: 1.1,
        TimePart.DATA: 0.3,
        TimePart.COMMUNICATION: 0.1,
        TimePart.CHECKPOINT: 1.8,
        TimePart.EVALUATION: 1.0,
        TimePart.IDLE: 0.7,
    }


def test_steps_taken_again_are_redone_though_they_leave_no_lines() -> None:
    parts = account(
        [
            started(100.0, **{OPENED: 100.0}),
            step(0, 101.0, training_s=1.0, elapsed_s=1.0),
            step(1, 102.0, training_s=1.0, elapsed_s=2.0),
            event(Event.ATTEMPT_ENDED, 107.0, 2, reason="restarted", **{NOTICED_LATE: True}),
            started(107.0, 0, 2, **{PROCESS_STARTED: 103.0}),
            step(2, 111.0, training_s=1.0, elapsed_s=3.0),  # 0 and 1 again in the first 2 s
        ]
    )
    assert parts == {
        TimePart.KEPT: 3.0,
        TimePart.REDONE: 2.0,
        TimePart.WAITING: 1.0,
        TimePart.STARTING: 4.0,
    }


def test_a_fault_that_was_noticed_before_the_next_start_leaves_idle_time() -> None:
    accounting = Accounting()
    for record in (
        started(100.0),
        step(0, 101.0, training_s=1.0, elapsed_s=1.0),
        event(Event.ATTEMPT_ENDED, 131.0, 1, reason="restarted"),
        started(132.0, 1, 1, **{PROCESS_STARTED: 50.0}),  # the process lived on
    ):
        accounting.add(record)
    assert accounting.seconds[TimePart.IDLE] == 30.0
    assert accounting.seconds[TimePart.STARTING] == 1.0
    assert accounting.recoveries == [31.0]


def test_an_attempt_that_ends_before_a_new_step_was_all_redone() -> None:
    parts = account(
        [
            started(100.0),
            step(0, 101.0, training_s=1.0, elapsed_s=1.0),
            started(101.0, 0, 1),
            event(Event.ATTEMPT_ENDED, 103.0, 1, reason="restarted"),
            started(104.0, 0, 1),
        ]
    )
    assert parts == {TimePart.KEPT: 1.0, TimePart.REDONE: 2.0, TimePart.STARTING: 1.0}


def test_a_step_written_again_under_other_numerics_was_redone() -> None:
    parts = account(
        [
            started(100.0),
            step(0, 101.0, training_s=1.0, elapsed_s=1.0),
            started(101.0, 0, 1),
            step(0, 102.0, training_s=1.0, elapsed_s=1.0),
            step(1, 103.0, training_s=1.0, elapsed_s=2.0),
        ]
    )
    assert parts == {TimePart.KEPT: 2.0, TimePart.REDONE: 1.0}


def test_time_in_which_nobody_ran_the_run_is_not_part_of_it() -> None:
    day = 86_400.0
    accounting = Accounting()
    ended = [event(Event.ATTEMPT_ENDED, 102.0, 1), event(Event.FINISHED, 102.0, 1)]
    for record in (
        started(100.0, **{OPENED: 99.0}),
        step(0, 101.0, training_s=1.0, elapsed_s=1.0),
        *ended,
        started(day + 105.0, 1, 1, **{OPENED: day + 100.0}),
        step(1, day + 106.0, training_s=1.0, elapsed_s=1.0),
        # Its driver dies here without a word, and another takes over a day later.
        event(Event.ATTEMPT_ENDED, 2 * day + 3.0, 2, reason="died", **{NOTICED_LATE: True}),
        started(2 * day + 3.0, 2, 2, **{OPENED: 2 * day}),
        step(2, 2 * day + 4.0, training_s=1.0, elapsed_s=1.0),
    ):
        accounting.add(record)
    assert accounting.wall_s == pytest.approx(3.0 + 6.0 + 4.0)
    assert accounting.seconds[TimePart.KEPT] == pytest.approx(3.0)
    assert accounting.goodput() == pytest.approx(3 / 13)
    assert accounting.goodput(2 * day + 14.0) == pytest.approx(3 / 23)
    assert accounting.recoveries == []


def test_clocks_that_disagree_never_move_time_beyond_what_has_passed() -> None:
    parts = account(
        [started(100.0), step(0, 101.0, training_s=3.0, data_s=1.0, elapsed_s=4.0)],
    )
    assert parts == {TimePart.KEPT: 0.75, TimePart.DATA: 0.25}


def test_records_without_a_timesheet_are_accounted_by_their_step_and_waits() -> None:
    parts = account(
        [
            started(100.0),
            step(0, 102.0, step_s=1.0, data_wait_s=0.25, exchange_wait_s=0.25),
            step(1, None, step_s=1.0),
        ]
    )
    assert parts == {TimePart.KEPT: 1.5, TimePart.DATA: 0.25, TimePart.COMMUNICATION: 0.25}


@st.composite
def ledgers(draw: st.DrawFn) -> list[Record]:
    """Lines as they may come, with clocks that drift, gaps, batches and missing fields."""
    seconds = st.floats(0, 100, allow_nan=False)
    now, done = draw(st.floats(0, 2e9)), 0
    records: list[Record] = []
    for _ in range(draw(st.integers(1, 5))):
        now += draw(seconds)
        start_step = draw(st.integers(0, done))
        fields = {
            name: now - draw(st.floats(-10, 100))
            for name in (OPENED, PROCESS_STARTED)
            if draw(st.booleans())
        }
        records.append(started(now, start_step, done, **fields))
        elapsed = 0.0
        for number in range(
            draw(st.sampled_from([start_step, done])), done + draw(st.integers(0, 3))
        ):
            timing = {
                name: draw(seconds)
                for name in ("training_s", "data_s", "idle_s", "checkpoint_s", "step_s")
                if draw(st.booleans())
            }
            elapsed += sum(timing.values()) * draw(st.floats(0.5, 2))
            if draw(st.booleans()):
                timing["elapsed_s"] = elapsed
            now += draw(seconds)
            records.append(step(number, now if draw(st.booleans()) else None, **timing))
            done = max(done, number + 1)
        if draw(st.booleans()):
            late = {NOTICED_LATE: True} if draw(st.booleans()) else {}
            records.append(event(Event.ATTEMPT_ENDED, now + draw(seconds), done, **late))
        if draw(st.booleans()):
            now += draw(seconds)
            tail = {TIMING: {"checkpoint_s": 1.0, "elapsed_s": elapsed + 1.0}}
            records.append(
                event(Event.FINISHED, now, done, **(tail if draw(st.booleans()) else {}))
            )
    return records


@given(ledgers())
@settings(deadline=None)
def test_the_parts_add_up_to_the_wall_clock_and_none_ever_shrinks(records: list[Record]) -> None:
    accounting = Accounting()
    before = dict(accounting.seconds)
    for record in records:
        accounting.add(record)
        assert all(accounting.seconds[part] >= before[part] for part in TimePart)
        before = dict(accounting.seconds)
        assert sum(before.values()) == pytest.approx(accounting.wall_s, abs=1e-3)
    assert accounting.goodput() is None or 0 <= accounting.goodput() <= 1 + 1e-9
