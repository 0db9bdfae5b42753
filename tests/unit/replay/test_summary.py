from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from samestep.checkpoint.storage import Storage
from samestep.incidents.record import Incident, write
from samestep.incidents.wrong_hosts import wrong_hosts
from samestep.names import IncidentKind
from samestep.replay.summary import summarize, why_ended
from samestep.spec import dump_spec
from samestep.telemetry.identity import read_spec
from samestep.telemetry.recorder import Recorder

MakeRun = Callable[..., Storage]


def reopened(run: Storage, *, lease: bool = False) -> Recorder:
    return Recorder(run.uri, run="a", spec_yaml=dump_spec(read_spec(run)), lease=lease)


def test_a_finished_run_in_short(make_run: MakeRun) -> None:
    run = make_run(
        "a",
        evaluation={6: 0.8},
        checkpoints={3: 1.0, 6: 2.0},
        result={"status": "done", "step": 6, "digest": "abc"},
    )
    summary = summarize(run)
    assert summary.status == "done"
    assert (summary.num_steps, summary.total_steps, summary.num_redone) == (6, 100, 0)
    assert summary.evaluation == {"step": 6, "metrics": {"accuracy": 0.8}, "samples": 5}
    assert [(info.step, info.whole) for info in summary.checkpoints] == [(3, True), (6, True)]
    assert [why_ended(attempt) for attempt in summary.attempts] == ["done"]
    assert summary.incidents == ()


def test_a_run_whose_process_is_gone_has_died(make_run: MakeRun) -> None:
    summary = summarize(make_run("a"))
    assert summary.status == "died"
    assert summary.holder is None
    assert why_ended(summary.attempts[0]) == ""


def test_a_run_that_is_being_trained_is_running(make_run: MakeRun) -> None:
    run = make_run("a")
    recorder = reopened(run, lease=True)
    try:
        summary = summarize(run)
        assert summary.status == "running"
        assert summary.holder is not None
    finally:
        recorder.close()


def test_attempts_tell_what_they_redid_and_why_they_ended(make_run: MakeRun) -> None:
    run = make_run("a", num_steps=4)
    records = [data.to_json() for data in _steps(run)]
    recorder = reopened(run)
    attempt = recorder.begin_attempt({"start_step": 1, "mode": "local", "world_size": 1})
    recorder.push(attempt, "0", 1, records[1:])
    recorder.fail(attempt, "UserCodeError:1", "boom")
    recorder.record_incident(attempt, {"kind": "exception", "step": 3, "message": "boom"})
    recorder.finish(attempt, {"status": "failed", "message": "boom"})
    summary = summarize(run)
    assert [why_ended(attempt) for attempt in summary.attempts] == [
        "died",
        "failed (UserCodeError:1)",
    ]
    assert [attempt.num_redone for attempt in summary.attempts] == [0, 3]
    assert summary.num_redone == 3
    assert [incident.message for incident in summary.incidents] == ["boom"]


def test_the_summary_is_plain_json_even_with_values_that_json_lacks(make_run: MakeRun) -> None:
    data = summarize(make_run("a", loss_at={5: math.nan})).to_json()
    assert json.loads(json.dumps(data, allow_nan=False))["loss"] == "nan"


def _steps(run: Storage) -> list:
    from samestep.telemetry.ledger import steps

    return list(steps(run).values())


@pytest.mark.parametrize(("policy", "avoided"), [("avoid", ("b", "a")), ("retry", ())])
def test_nodes_that_computed_wrongly_are_avoided_where_the_job_says_so(
    make_run: MakeRun, policy: str, avoided: tuple[str, ...]
) -> None:
    run = make_run("a", incidents={"audit": policy})
    for time_s, host in ((3.0, "a"), (1.0, "b"), (2.0, ""), (4.0, "b")):
        write(
            run,
            Incident(
                kind=IncidentKind.CORRUPTION,
                step=3,
                attempt=1,
                message="m",
                host=host,
                time=time_s,
            ),
        )
    write(run, Incident(kind=IncidentKind.CRASH, step=4, attempt=1, message="m", host="c"))
    assert wrong_hosts(run) == ("b", "a")
    assert summarize(run).avoided == avoided
    assert summarize(run).to_json()["avoided"] == list(avoided)
