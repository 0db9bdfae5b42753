from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.reading import list_checkpoints
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.errors import (
    DivergenceError,
    RecorderError,
    RunConflictError,
    RunInUseError,
    StorageError,
)
from samestep.incidents.record import list_incidents
from samestep.names import Event, IncidentKind
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry import identity
from samestep.telemetry.ledger import events, read_ledger, segments, steps
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord

MakeStep = Callable[..., Any]
CPU_A = {"binding": {"torch": "2.13", "threads": 1}, "informational": {}}
CPU_B = {"binding": {"torch": "2.14", "threads": 1}, "informational": {}}


def job(**changes: object) -> str:
    spec = {"workload": "digits:Digits", "batch_size": 8, "max_steps": 100, "shards": 2}
    return dump_spec(parse_spec({**spec, **changes}))


@pytest.fixture
def open_recorder(run: Storage) -> Iterator[Callable[..., Recorder]]:
    """Opens recorders of `run` without a lease, as one after another would; closes them all."""
    opened: list[Recorder] = []

    def open_one(*, lease: bool = False, **changes: object) -> Recorder:
        recorder = Recorder(run.uri, run="r", spec_yaml=job(**changes), lease=lease)
        opened.append(recorder)
        return recorder

    yield open_one
    for recorder in opened:
        recorder.close()


@pytest.fixture
def recorder(open_recorder: Callable[..., Recorder]) -> Recorder:
    return open_recorder()


def begin(recorder: Recorder, start_step: int = 0, **info: object) -> int:
    given = {"start_step": start_step, "mode": "local", "world_size": 1, "numerics": CPU_A}
    return recorder.begin_attempt({**given, **info})


@pytest.fixture
def push(make_step: MakeStep) -> Callable[..., dict[str, Any]]:
    """Sends steps `first` to `last` as one batch."""

    def send(
        recorder: Recorder,
        attempt: int,
        sequence: int,
        first: int,
        last: int,
        **changes: Any,
    ) -> dict[str, Any]:
        records = [make_step(step, **changes).to_json() for step in range(first, last + 1)]
        return recorder.push(attempt, "0", sequence, records)

    return send


def save(run: Storage, step: int) -> str:
    state = State(step=step, tensors={"model/w": torch.full((3,), step)}, values={"extras": {}})
    meta = CheckpointMeta(numerics=CPU_A, spec={}, created_s=0.0)
    return write_files(run, state, meta).to_json()


def kinds(run: Storage) -> list[str]:
    return [str(event.event) for event in events(run)]


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
    assert run.local_path is not None
    (lease,) = run.local_path.glob("lease-*.json")
    taken = json.loads(lease.read_text()) | {"owner": "another"}
    lease.with_name("lease-00000002.json").write_text(json.dumps(taken))
    recorder._lease.renew()  # type: ignore[union-attr]
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
    with pytest.raises(RecorderError, match="'great'; allowed: done, interrupted, failed"):
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
