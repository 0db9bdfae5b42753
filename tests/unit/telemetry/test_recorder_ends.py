"""Recorders that come back, lose their lease, and end a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording import begin, kinds, save, take_over

from samestep.checkpoint.storage import Storage
from samestep.errors import (
    RecorderError,
    RunInUseError,
    StorageError,
)
from samestep.names import Event
from samestep.telemetry import identity
from samestep.telemetry.ledger import events, read_ledger, segments, steps
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord

MakeStep = Callable[..., Any]


def test_a_recorder_that_comes_back_goes_on_with_the_attempt(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any
) -> None:
    first = open_recorder()
    attempt = begin(first, total_steps=10)
    push(first, attempt, 1, 0, 2)
    second = open_recorder()
    status = second.status()
    assert (status["attempt"], status["step"], status["state"]) == (1, 3, "running")
    assert status["total_steps"] == 10
    assert push(second, attempt, 2, 3, 4)["acknowledged"] == 2
    assert list(steps(run)) == [0, 1, 2, 3, 4]


def test_a_batch_whose_answer_was_lost_with_the_recorder_is_taken_once(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any
) -> None:
    first = open_recorder()
    attempt = begin(first)
    push(first, attempt, 1, 0, 2)
    second = open_recorder()
    assert push(second, attempt, 1, 0, 2)["acknowledged"] == 1
    assert push(second, attempt, 2, 3, 3)["acknowledged"] == 2
    assert [data["step"] for data in read_ledger(run) if data["type"] == "step"] == [0, 1, 2, 3]
    assert second.status()["redone"] == 0


@pytest.mark.parametrize("cut", [10, 700, 1100])
def test_a_batch_that_was_half_written_is_completed(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any, cut: int
) -> None:
    first = open_recorder()
    attempt = begin(first)
    push(first, attempt, 1, 0, 0)
    push(first, attempt, 2, 1, 3)
    assert run.local_path is not None
    path: Path = run.local_path / segments(run)[-1]
    path.write_bytes(path.read_bytes()[:-cut])
    second = open_recorder()
    assert push(second, attempt, 2, 1, 3)["acknowledged"] == 2
    assert [data["step"] for data in read_ledger(run) if data["type"] == "step"] == [0, 1, 2, 3]


def test_steps_taken_again_are_still_checked_after_the_recorder_came_back(
    open_recorder: Callable[..., Recorder], push: Any
) -> None:
    first = open_recorder()
    push(first, begin(first), 1, 0, 5)
    attempt = begin(first)
    push(first, attempt, 1, 0, 2)
    second = open_recorder()
    assert push(second, attempt, 2, 3, 4)["divergence"] is None
    assert "step 5" in push(second, attempt, 3, 5, 5, loss=9.0)["divergence"]


def test_a_stop_outlives_the_recorder(open_recorder: Callable[..., Recorder]) -> None:
    first = open_recorder()
    attempt = begin(first)
    first.request_stop("SIGTERM")
    assert open_recorder().push(attempt, "0", 0, [])["stop"]


def test_a_write_that_failed_is_read_back_before_the_batch_is_taken_again(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 0)
    assert run.local_path is not None
    segment = run.local_path / segments(run)[-1]
    kept = segment.with_name("aside")
    segment.rename(kept)
    segment.mkdir()
    with pytest.raises(StorageError):
        push(recorder, attempt, 2, 1, 2)
    segment.rmdir()
    kept.rename(segment)
    assert push(recorder, attempt, 2, 1, 2)["acknowledged"] == 2
    assert [data["step"] for data in read_ledger(run) if data["type"] == "step"] == [0, 1, 2]


def test_a_second_recorder_of_a_live_run_is_refused(
    run: Storage, open_recorder: Callable[..., Recorder]
) -> None:
    open_recorder(lease=True)
    with pytest.raises(RunInUseError, match="in use by process"):
        open_recorder(lease=True)


def test_a_recorder_whose_lease_was_taken_writes_nothing_more(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any
) -> None:
    recorder = open_recorder(lease=True)
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 0)
    take_over(run, recorder)
    assert push(recorder, attempt, 2, 1, 1)["refused"]
    with pytest.raises(RecorderError, match=r"lease .* is lost"):
        recorder.commit(attempt, save(run, 1), 3)
    with pytest.raises(RecorderError, match=r"lease .* is lost"):
        begin(recorder)
    assert recorder.status()["state"] == "fenced"
    assert list(steps(run)) == [0]


def test_a_closed_recorder_says_that_it_is_closed(open_recorder: Callable[..., Recorder]) -> None:
    recorder = open_recorder(lease=True)
    recorder.close()
    with pytest.raises(RecorderError, match="is closed; make a new one"):
        begin(recorder)


def test_the_end_of_a_run_is_written_and_the_lease_given_back(
    run: Storage, open_recorder: Callable[..., Recorder], push: Any
) -> None:
    recorder = open_recorder(lease=True)
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    assert recorder.result() is None
    result = {"status": "done", "step": 2, "evaluation": {"accuracy": 0.1}, "exit_status": 0}
    recorder.finish(attempt, result)
    recorder.finish(attempt, result)
    written = identity.read_result(run)
    assert written is not None
    assert written.items() >= result.items()
    assert recorder.result() == written
    assert kinds(run) == ["attempt_started", "attempt_ended", "finished"]
    assert recorder.status()["state"] == "done"
    assert push(recorder, attempt, 2, 2, 2)["refused"]
    with pytest.raises(RecorderError, match=r"the run has ended \(done\)"):
        recorder.commit(attempt, save(run, 2), 3)
    open_recorder(lease=True)


def test_a_run_that_goes_on_has_no_result(
    run: Storage, open_recorder: Callable[..., Recorder]
) -> None:
    first = open_recorder()
    first.finish(begin(first), {"status": "interrupted"})
    begin(open_recorder())
    assert identity.read_result(run) is None


def test_a_run_may_end_before_its_first_attempt(
    run: Storage, open_recorder: Callable[..., Recorder]
) -> None:
    first = open_recorder()
    first.record_incident(0, {"kind": "damaged_checkpoint", "step": 4, "message": "cut"})
    first.finish(0, {"status": "failed", "message": "none whole"})
    assert kinds(run) == ["incident", "finished"]


def test_an_end_that_is_none_of_the_list_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RecorderError, match="'great'; allowed: done, interrupted, budget"):
        recorder.finish(begin(recorder), {"status": "great"})


def test_the_first_verdict_of_an_attempt_stays(run: Storage, recorder: Recorder) -> None:
    attempt = begin(recorder)
    assert recorder.verdict(attempt) is None
    recorder.fail(attempt, "UserCodeError:1", "boom\ntraceback")
    recorder.fail(attempt, "PeerLostError:1", "connection reset")
    verdict = recorder.verdict(attempt)
    assert verdict is not None
    assert (verdict["kind"], verdict["message"]) == ("UserCodeError:1", "boom\ntraceback")
    recorder.end_attempt(attempt, "failed")
    assert events(run, Event.ATTEMPT_ENDED)[0].fields["cause"] == "UserCodeError:1"
    assert recorder.verdict(begin(recorder)) is None


def test_the_status_tells_how_the_run_stands(
    recorder: Recorder, push: Any, make_step: MakeStep
) -> None:
    attempt = begin(recorder, total_steps=100, world_size=3, mode="ddp")
    push(recorder, attempt, 1, 0, 11)
    fields = {"metrics": {"accuracy": 0.5}, "samples": 4}
    event = EventRecord(event=Event.EVALUATION, step=12, attempt=1, time=0.0, fields=fields)
    recorder.push(attempt, "0", 2, [event.to_json()])
    status = recorder.status()
    assert (
        status.items()
        >= {
            "run": "r",
            "state": "running",
            "attempt": 1,
            "mode": "ddp",
            "workers": 3,
            "step": 12,
            "epoch": 1,
            "total_steps": 100,
            "loss": make_step(11).loss,
            "evaluation": {"step": 12, "metrics": {"accuracy": 0.5}, "samples": 4},
        }.items()
    )
    assert status["samples_per_s"] == pytest.approx(800)
    assert status["eta_s"] == pytest.approx(0.88)
    json.dumps(status)


def test_messages_are_numbered_and_told_once(recorder: Recorder) -> None:
    begin(recorder)
    first = recorder.status()["messages"]
    recorder.say("hello")
    (second,) = recorder.status(first[-1]["number"])["messages"]
    assert second["text"] == "hello"


def test_the_status_stays_small_however_long_the_run(recorder: Recorder, push: Any) -> None:
    attempt = begin(recorder)
    for sequence in range(60):
        push(recorder, attempt, sequence + 1, sequence * 10, sequence * 10 + 9)
        recorder.say("x")
    for _ in range(600):
        recorder.say("y")
    assert len(recorder.status()["messages"]) == 500
