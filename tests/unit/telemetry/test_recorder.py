from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from recording import CPU_A, CPU_B, begin, kinds, save

from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.storage import Storage
from samestep.errors import (
    DivergenceError,
    RecorderError,
    RunConflictError,
)
from samestep.incidents.record import list_incidents
from samestep.names import Event, IncidentKind
from samestep.telemetry.ledger import events, read_ledger, steps
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord

MakeStep = Callable[..., Any]


def test_attempts_are_counted_over_the_life_of_the_run(
    recorder: Recorder, open_recorder: Callable[..., Recorder]
) -> None:
    assert begin(recorder) == 1
    assert begin(recorder) == 2
    assert begin(open_recorder()) == 3


def test_an_earlier_attempt_is_refused_from_the_moment_the_next_begins(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    first = begin(recorder)
    push(recorder, first, 1, 0, 1)
    manifest = save(run, 2)
    second = begin(recorder)
    assert push(recorder, first, 2, 2, 2)["refused"]
    with pytest.raises(RecorderError, match="attempt 1 is refused: the present one is 2"):
        recorder.commit(first, manifest, 3)
    with pytest.raises(RecorderError, match="attempt 1 is refused"):
        recorder.record_incident(first, {"kind": "crash", "step": 1, "message": "late"})
    with pytest.raises(RecorderError, match="attempt 1 is refused"):
        recorder.finish(first, {"status": "done"})
    recorder.end_attempt(first, "late")
    assert not push(recorder, second, 1, 0, 0)["refused"]
    assert list(steps(run)) == [0, 1]
    assert list_checkpoints(run)[0].whole is False
    assert list_incidents(run) == []


def test_an_attempt_cannot_begin_beyond_the_ledger(recorder: Recorder) -> None:
    with pytest.raises(RecorderError, match="can't start at step 3"):
        begin(recorder, 3)


def test_a_directory_of_another_job_is_refused_without_keeping_the_lease(
    open_recorder: Callable[..., Recorder],
) -> None:
    open_recorder(lease=True).close()
    with pytest.raises(RunConflictError, match="seed: 0 against 1"):
        open_recorder(lease=True, seed=1)
    open_recorder(lease=True)


def test_records_reach_the_ledger_before_they_are_acknowledged(
    run: Storage, recorder: Recorder, push: Any, make_step: MakeStep
) -> None:
    attempt = begin(recorder)
    ack = push(recorder, attempt, 1, 0, 4)
    assert ack == {"acknowledged": 1, "stop": False, "divergence": None, "refused": False}
    found = steps(run)
    assert list(found) == [0, 1, 2, 3, 4]
    assert replace(found[3], time=None) == make_step(3, attempt=1)


def test_a_batch_sent_twice_is_taken_once(run: Storage, recorder: Recorder, push: Any) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    assert push(recorder, attempt, 1, 0, 1)["acknowledged"] == 1
    assert [data["step"] for data in read_ledger(run) if data["type"] == "step"] == [0, 1]
    assert recorder.status()["redone"] == 0


def test_a_gap_is_refused_with_what_is_expected(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    ack = push(recorder, attempt, 3, 4, 5)
    assert (ack["acknowledged"], ack["expected"]) == (1, 2)
    assert list(steps(run)) == [0, 1]


def test_an_empty_question_learns_of_a_stop(recorder: Recorder) -> None:
    attempt = begin(recorder)
    assert not recorder.push(attempt, "1", 0, [])["stop"]
    recorder.request_stop("Ctrl-C")
    recorder.request_stop("Ctrl-C")
    assert recorder.push(attempt, "1", 0, [])["stop"]
    assert recorder.status()["state"] == "stopping"


def test_a_stop_ends_with_the_attempt_it_was_for(run: Storage, recorder: Recorder) -> None:
    begin(recorder)
    recorder.request_stop("Ctrl-C")
    assert not recorder.push(begin(recorder), "0", 0, [])["stop"]
    assert kinds(run).count("stop_requested") == 1


@pytest.mark.parametrize("step", [1, 7])
def test_steps_out_of_order_are_refused_and_nothing_is_taken(
    run: Storage, recorder: Recorder, make_step: MakeStep, step: int
) -> None:
    attempt = begin(recorder)
    records = [make_step(step).to_json()]
    with pytest.raises(RecorderError, match=f"sent step {step}, expected 0"):
        recorder.push(attempt, "0", 1, records)
    assert recorder.push(attempt, "0", 0, [])["acknowledged"] == 0
    assert steps(run) == {}


def test_a_record_of_an_unknown_type_is_refused(recorder: Recorder) -> None:
    attempt = begin(recorder)
    with pytest.raises(RecorderError, match="type 'poem'"):
        recorder.push(attempt, "0", 1, [{"type": "poem"}])


def test_two_senders_of_the_same_steps_count_once(
    run: Storage, recorder: Recorder, push: Any, make_step: MakeStep
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 2)
    records = [make_step(step).to_json() for step in range(4)]
    recorder.push(attempt, "1", 1, records)
    assert [data["step"] for data in read_ledger(run) if data["type"] == "step"] == [0, 1, 2, 3]


def test_equal_steps_taken_again_are_counted_and_not_logged_twice(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 4)
    attempt = begin(recorder, 2)
    assert push(recorder, attempt, 1, 2, 6)["divergence"] is None
    recorder.end_attempt(attempt, "done")
    lines = [(data["step"], data["attempt"]) for data in read_ledger(run) if data["type"] == "step"]
    assert lines == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert recorder.status()["redone"] == 3
    assert events(run, Event.ATTEMPT_ENDED)[-1].fields == {"reason": "done", "redone": 3}


def test_a_step_that_differs_is_an_incident_and_the_worker_is_told(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 4)
    attempt = begin(recorder, 2)
    push(recorder, attempt, 1, 2, 2)
    ack = push(recorder, attempt, 2, 3, 5, loss=math.nextafter(1 / 6, 1))
    assert ack["acknowledged"] == 2
    assert "step 3" in ack["divergence"]
    assert (
        "loss: 0x1.5555555555555p-3 (0.166666667) against 0x1.5555555555556p-3"
        in (ack["divergence"])
    )
    (incident,) = list_incidents(run)
    assert (incident.kind, incident.step, incident.attempt) == (IncidentKind.DIVERGENCE, 3, 2)
    assert incident.seen["differences"][0].startswith("loss: ")
    assert list(steps(run)) == [0, 1, 2, 3, 4]
    assert steps(run)[3].loss == 1 / 6
    assert push(recorder, attempt, 3, 6, 6)["divergence"] == ack["divergence"]
    assert recorder.status()["incidents"] == 1


def test_no_checkpoint_of_a_diverged_attempt_is_committed(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 1)
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1, loss=5.0)
    with pytest.raises(DivergenceError, match="step 2 is not committed: step 0 taken again"):
        recorder.commit(attempt, save(run, 2), 3)


def test_the_next_attempt_starts_without_the_divergence_of_the_last(
    recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 1)
    push(recorder, begin(recorder), 1, 0, 1, loss=5.0)
    attempt = begin(recorder)
    assert push(recorder, attempt, 1, 0, 1)["divergence"] is None


def test_an_evaluation_taken_again_must_be_equal_too(run: Storage, recorder: Recorder) -> None:
    def evaluation(accuracy: float) -> dict[str, Any]:
        fields = {"metrics": {"accuracy": accuracy}, "samples": 5}
        record = EventRecord(event=Event.EVALUATION, step=0, attempt=0, time=0.0, fields=fields)
        return record.to_json()

    recorder.push(begin(recorder), "0", 1, [evaluation(0.8)])
    attempt = begin(recorder)
    assert recorder.push(attempt, "0", 1, [evaluation(0.8)])["divergence"] is None
    assert len(events(run, Event.EVALUATION)) == 1
    attempt = begin(recorder)
    ack = recorder.push(attempt, "0", 1, [evaluation(0.6)])
    assert "metrics.accuracy" in ack["divergence"]


def test_under_other_numerics_steps_are_held_to_a_tolerance_and_logged_again(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 2, loss=1.0)
    attempt = begin(recorder, 1, numerics=CPU_B)
    assert push(recorder, attempt, 1, 1, 2, loss=1.0001)["divergence"] is None
    assert [record.loss for record in steps(run).values()] == [1.0, 1.0001, 1.0001]
    (changed,) = events(run, Event.NUMERICS_CHANGED)
    assert changed.fields["differences"] == ["torch: '2.13' against '2.14'"]
    far = begin(recorder, 1, numerics=CPU_A)
    assert "loss" in push(recorder, far, 1, 1, 1, loss=1.1)["divergence"]


def test_lines_of_the_same_numerics_are_held_to_the_bit_whatever_came_between(
    recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 0, loss=1.0)
    push(recorder, begin(recorder, 0, numerics=CPU_B), 1, 0, 0, loss=1.0001)
    attempt = begin(recorder, 0, numerics=CPU_B)
    ack = push(recorder, attempt, 1, 0, 0, loss=1.00011)
    assert ack["divergence"] is not None


def test_a_group_that_depends_on_placement_says_so_and_is_held_to_a_tolerance(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 0, loss=1.0)
    attempt = begin(recorder, 0, placement_dependent=["worker 1: avx2 against avx512"])
    assert push(recorder, attempt, 1, 0, 0, loss=1.0001)["divergence"] is None
    assert kinds(run).count("placement_dependent") == 1


def test_with_reduction_fast_steps_taken_again_are_not_checked(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any
) -> None:
    recorder = open_recorder(reduction="fast", mode="ddp")
    push(recorder, begin(recorder), 1, 0, 0, loss=1.0)
    attempt = begin(recorder)
    assert push(recorder, attempt, 1, 0, 0, loss=3.0)["divergence"] is None
    assert steps(run)[0].loss == 3.0


def test_a_digest_that_the_ledger_lacked_is_added(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 0)
    push(recorder, begin(recorder), 1, 0, 0, state_digest="abc")
    assert steps(run)[0].state_digest == "abc"


def test_a_checkpoint_waits_for_its_ledger_lines(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    manifest = save(run, 3)
    with pytest.raises(RecorderError, match="step 2 is not in the ledger yet"):
        recorder.commit(attempt, manifest, 3)
    push(recorder, attempt, 2, 2, 2)
    recorder.commit(attempt, manifest, 3)
    assert [(info.step, info.whole) for info in list_checkpoints(run)] == [(3, True)]
    assert recorder.status()["last_checkpoint"]["step"] == 3


def test_steps_taken_again_must_be_checked_before_their_checkpoint(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 3)
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 0)
    with pytest.raises(RecorderError, match="step 1 is not in the ledger yet"):
        recorder.commit(attempt, save(run, 2), 3)


def test_committing_again_changes_nothing_and_is_told_once(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    manifest = save(run, 2)
    recorder.commit(attempt, manifest, 3)
    recorder.commit(attempt, manifest, 3)
    assert kinds(run).count("checkpoint_committed") == 1


def test_only_the_newest_checkpoints_are_kept(run: Storage, recorder: Recorder, push: Any) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 9)
    for step in (2, 4, 6, 8):
        recorder.commit(attempt, save(run, step), 2)
    assert [info.step for info in list_checkpoints(run)] == [6, 8]
