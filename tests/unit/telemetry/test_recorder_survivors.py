"""What survivors and the controller tell the recorder between two attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recording import begin, kinds

from samestep.checkpoint.storage import Storage
from samestep.names import Event
from samestep.replay.summary import summarize
from samestep.telemetry.ledger import events, steps
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord

INCIDENT = {"kind": "crash", "step": 4, "message": "worker 1 on h was lost", "time": 1.0}


def evaluation(step: int) -> dict[str, Any]:
    fields = {"metrics": {"accuracy": 0.5}, "samples": 3}
    record = EventRecord(event=Event.EVALUATION, step=step, attempt=1, time=0.0, fields=fields)
    return record.to_json()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_survivor_brings_what_worker_0_had_not_sent_and_nothing_twice(
    run: Storage,
    open_recorder: Callable[..., Recorder],
    make_step: Callable[..., Any],
    push: Any,
    comes_back: bool,
) -> None:
    recorder = open_recorder()
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    recorder.push(attempt, "0", 2, [evaluation(2)])
    if comes_back:
        recorder = open_recorder()
    late = [make_step(1), evaluation(2), make_step(2), make_step(3), evaluation(4)]
    records = [item if isinstance(item, dict) else item.to_json() for item in late]
    assert not recorder.push(attempt, "late-x", 1, records)["refused"]
    assert list(steps(run)) == [0, 1, 2, 3]
    assert [event.step for event in events(run, Event.EVALUATION)] == [2, 4]
    assert begin(recorder, start_step=4) == 2
    assert recorder.status()["redone"] == 0


def test_a_crash_is_told_whichever_attempt_has_begun_meanwhile(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    begin(recorder, start_step=4)
    recorder.note_incident({**INCIDENT, "attempt": attempt})
    [incident] = summarize(run).incidents
    assert (incident.attempt, str(incident.kind)) == (attempt, "crash")


def test_a_recovery_is_entered_with_the_steps_that_are_taken_again(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 4)
    again = begin(recorder, start_step=3)
    fields = {"cause": "crash", "detected_s": 0.05, "again_s": 0.4, "planned": False}
    recorder.recovered(again, {**fields, "workers": [2, 1], "message": "lost"})
    [recovery] = summarize(run).recoveries
    assert (recovery["step"], recovery["redone"], recovery["attempt"]) == (3, 2, 2)
    said = [item["text"] for item in recorder.status()["messages"]]
    expected = (
        "crash: noticed after 0.05 s, training again after 0.40 s, 2 steps redone, 2 to 1 workers"
    )
    assert said[-1] == expected


def test_the_controllers_verdict_holds_for_the_present_attempt(
    run: Storage, recorder: Recorder
) -> None:
    attempt = begin(recorder)
    recorder.give_up("UserCodeError:1", "boom")
    verdict = recorder.verdict(attempt)
    assert verdict is not None
    assert (verdict["kind"], verdict["message"]) == ("UserCodeError:1", "boom")
    assert str(Event.RECOVERED) not in kinds(run)


@pytest.mark.parametrize("ends_first", [False, True])
def test_of_a_hang_whose_worker_is_ended_there_is_one_incident(
    run: Storage, recorder: Recorder, ends_first: bool
) -> None:
    """Whether its end is told before or after the recorder has heard all workers."""
    attempt = begin(recorder, world_size=2)
    stall = {"order": [4, 3, 0], "place": "forward of step 4", "still_s": 9.0, "stacks": "s"}
    recorder.stalled(attempt, 1, "h", stall)
    if ends_first:
        assert recorder.note_incident({**INCIDENT, "attempt": attempt}) == ""
    recorder.stalled(attempt, 0, "h", {**stall, "order": [4, 5, 0], "place": "exchange"})
    recorder.status()
    [hang] = summarize(run).incidents
    assert recorder.note_incident({**INCIDENT, "attempt": attempt, "time": hang.time}) == hang.id
    begin(recorder, world_size=2)
    [kept] = summarize(run).incidents
    assert (str(kept.kind), kept.world_rank) == ("hang", 1)
    assert kinds(run).count("incident") == 1


def test_workers_that_run_out_of_memory_together_are_one_incident(
    run: Storage, recorder: Recorder
) -> None:
    attempt = begin(recorder, world_size=2)
    told = {**INCIDENT, "kind": "out_of_memory"}
    first = recorder.record_incident(attempt, {**told, "world_rank": 0})
    assert recorder.record_incident(attempt, {**told, "world_rank": 1, "step": 5}) == first
    assert recorder.note_incident({**told, "world_rank": 1, "attempt": attempt}) == first
    assert len(summarize(run).incidents) == 1
