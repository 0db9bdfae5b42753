"""What a rollback does to ledger, checkpoints and what is shown of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import begin, save

from samestep.checkpoint.committed import CheckpointInfo, list_checkpoints
from samestep.checkpoint.retention import way_back
from samestep.checkpoint.storage import Storage
from samestep.errors import PeerLostError, RecorderError
from samestep.exact.ranges import StepRanges
from samestep.incidents.rollback import Rollback, left_out
from samestep.metric_names import Metrics
from samestep.names import Event
from samestep.telemetry.ledger import events, read_ledger, steps
from samestep.telemetry.past import read_past
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord
from samestep.telemetry.spool import Spool
from samestep.telemetry.totals import Totals

Push = Callable[..., dict[str, Any]]
BACK = Rollback(to=4, until=7, attempt=1, message="loss nan")


def evaluated(step: int, score: float) -> dict[str, Any]:
    event = EventRecord(
        event=Event.EVALUATION, step=step, attempt=1, time=0.0, fields={"metrics": {"m": score}}
    )
    return event.to_json()


def gone_back(recorder: Recorder, run: Storage, push: Push) -> int:
    """An attempt took seven steps and goes back to before step 4."""
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    recorder.push(attempt, "0", 2, [evaluated(4, 0.4)])
    recorder.commit(attempt, save(run, 3), 9)
    push(recorder, attempt, 3, 4, 6)
    recorder.push(attempt, "0", 4, [evaluated(6, 0.6)])
    recorder.commit(attempt, save(run, 5), 9)
    recorder.roll_back(attempt, BACK.to_json())
    return attempt


def test_nothing_of_the_attempt_is_taken_any_more_and_its_later_checkpoints_are_gone(
    recorder: Recorder, run: Storage, push: Push
) -> None:
    attempt = gone_back(recorder, run, push)
    assert [info.step for info in list_checkpoints(run)] == [3]
    assert push(recorder, attempt, 5, 7, 7)["refused"]
    with pytest.raises(RecorderError, match="the run went back"):
        recorder.commit(attempt, save(run, 6), 9)
    status = recorder.status()
    assert status["step"] == 4
    assert status["rollbacks"] == [BACK.to_json()]
    assert status["evaluation"]["step"] == 4
    assert status["last_checkpoint"]["step"] == 3
    recorder.roll_back(attempt, BACK.to_json())  # the answer may have been lost
    assert len(events(run, Event.ROLLED_BACK)) == 1


def test_steps_behind_it_may_differ_and_those_before_may_not(
    recorder: Recorder, run: Storage, push: Push
) -> None:
    gone_back(recorder, run, push)
    attempt = begin(recorder, 3, num_rollbacks=1)
    assert push(recorder, attempt, 1, 3, 3)["divergence"] is None
    assert push(recorder, attempt, 2, 4, 5, loss=9.0)["divergence"] is None
    found = steps(run)
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert [found[step].loss == 9.0 for step in found] == [False] * 4 + [True] * 2
    past = read_past(run)
    assert (past.num_steps, past.num_redone, past.rollbacks) == (6, 1, [BACK])
    third = begin(recorder, 3, num_rollbacks=1)
    assert "differs from the ledger" in push(recorder, third, 1, 3, 3, loss=9.0)["divergence"]


def test_what_the_ledger_tells_right_behind_it(
    recorder: Recorder, run: Storage, push: Push
) -> None:
    gone_back(recorder, run, push)
    past = read_past(run)
    assert past.num_steps == 4
    assert past.last_step is not None
    assert past.last_step.step == 3
    assert past.last_events[Event.EVALUATION].step == 4
    assert [event.step for event in events(run, Event.EVALUATION)] == [4]
    assert [event.step for event in events(run, Event.CHECKPOINT_COMMITTED)] == [3]
    assert any(line["type"] == "event" for line in read_ledger(run, 5))
    totals = Totals()
    for line in Spool(run).read(100):
        totals.add(line.record)
    assert totals.num_steps == 4
    assert totals.values[Metrics.STEPS, ()] == 7


def test_an_attempt_that_does_not_know_of_it_is_to_be_formed_again(
    recorder: Recorder, run: Storage, push: Push
) -> None:
    gone_back(recorder, run, push)
    with pytest.raises(PeerLostError, match="the run went back meanwhile"):
        begin(recorder, 3, num_rollbacks=0)


def test_a_recorder_that_died_over_it_makes_up_for_what_lacks(
    open_recorder: Callable[..., Recorder], run: Storage, push: Push, tmp_path: Path
) -> None:
    recorder = open_recorder()
    gone_back(recorder, run, push)
    recorder.close()
    # As if it had died before the checkpoints were deleted.
    assert run.local_path is not None
    folder = run.local_path / "checkpoints"
    shutil.copytree(folder / "step-00000003", folder / "step-00000005")
    again = open_recorder()
    assert again.status()["rollbacks"] == [BACK.to_json()]
    again.roll_back(1, BACK.to_json())
    assert [info.step for info in list_checkpoints(run)] == [3]
    shutil.copytree(folder / "step-00000003", folder / "step-00000005")
    attempt = begin(again, 3, num_rollbacks=1)
    assert [info.step for info in list_checkpoints(run)] == [3]
    push(again, attempt, 1, 3, 5)
    again.commit(attempt, save(run, 6), 9)
    begin(again, 6, num_rollbacks=1)
    assert [info.step for info in list_checkpoints(run)] == [3, 6]
    assert len(events(run, Event.ROLLED_BACK)) == 1


def info_of(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, uri="", num_bytes=0, created_s=None, whole=True)


@given(
    distances=st.lists(st.integers(1, 12), min_size=1, max_size=60),
    back_steps=st.integers(0, 30),
)
def test_a_checkpoint_to_go_back_to_stays_and_only_a_few_do(
    distances: list[int], back_steps: int
) -> None:
    kept: list[int] = []
    last = 0
    for distance in distances:
        last += distance
        kept.append(last)
        stay = way_back([info_of(step) for step in kept], back_steps) | {last}
        kept = [step for step in kept if step in stay]
        # Step 0 needs no checkpoint. The steps to take again are bounded.
        nearest = max((step for step in kept if step <= last - back_steps), default=0)
        assert last - back_steps - nearest < 2 * max(back_steps, 1) + 12
        assert len(kept) <= 6


@given(pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))), step=st.integers(0, 31))
def test_ranges_are_sets_of_steps(pairs: list[tuple[int, int]], step: int) -> None:
    told = StepRanges.of(pairs)
    plain = {s for first, end in pairs for s in range(first, end)}
    assert {s for s in range(40) if s in told} == plain
    assert {s for s in range(40) if s in told.before(step)} == {s for s in plain if s < step}
    assert told.with_step(step) == StepRanges.of([(s, s + 1) for s in plain | {step}])
    assert StepRanges.of(told.to_json()) == told
    assert told.covers(3, 9) == (set(range(3, 9)) <= plain)


def test_what_is_left_out_is_what_the_job_says_and_the_rollbacks() -> None:
    assert left_out([(1, 3)], [BACK]).pairs == ((1, 3), (4, 7))
    assert BACK.describe() == (
        "went back to before step 4: the batches of steps 4 to 6 are left out"
    )
