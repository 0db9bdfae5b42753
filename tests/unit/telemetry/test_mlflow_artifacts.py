"""Files and models in MLflow: each once, also where it refused them before."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from fake_mlflow import Server, finish, texts_of

from samestep.checkpoint.storage import Storage
from samestep.incidents.record import Incident
from samestep.names import LEDGER_ARTIFACT, IncidentKind, Tag
from samestep.telemetry.ledger import HEADER, read_ledger
from samestep.telemetry.mlflow_upload import RETRY_S
from samestep.telemetry.recorder import Recorder

REGISTERED = {"tracking": {"registered_model": "digits", "alias": "champion"}}
ARTIFACTS = ["ledger.jsonl.gz", "params.json", "requirements.txt", "spec.yaml"]


def end_with_models(run: Storage, recorder: Recorder, attempt: int, *folders: str) -> None:
    for folder in folders:
        run.write(f"{folder}/MLmodel", folder.encode())
    finish(recorder, attempt, "done")


def test_incidents_and_the_packed_model_arrive(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
    attempt = tell(recorder, 0, 3)
    incident = Incident(kind=IncidentKind.HANG, step=2, attempt=attempt, message="m")
    name = recorder.record_incident(attempt, incident.to_json())
    run.write("model/data/model.pt2", b"graph")
    run.write("model/MLmodel", b"flavors: {}")
    finish(recorder, attempt, "done")
    (only,) = server.runs.values()
    assert only.tags[Tag.INCIDENTS] == "1"
    assert f"incidents/{name}/incident.json" in only.files
    assert only.models == {"m-0": ["MLmodel", "data"]}


def test_the_ledger_goes_along_at_each_end_and_is_the_runs_own(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
    attempt = tell(recorder, 0, 3)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    assert LEDGER_ARTIFACT not in only.files
    finish(recorder, attempt, "interrupted")
    first = gzip.decompress(only.files[LEDGER_ARTIFACT])
    recorder = open_tracked()
    finish(recorder, tell(recorder, 3, 5), "done")
    whole = gzip.decompress(only.files[LEDGER_ARTIFACT])
    assert whole.startswith(first)
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line for line in lines if line["type"] != HEADER] == list(read_ledger(run))
    assert len(lines) > len(list(read_ledger(run)))


@pytest.mark.parametrize("folders", [("model",), ("model", "best_model")])
def test_the_best_model_is_registered_or_else_the_final_one(
    run: Storage, server: Server, open_tracked: Any, tell: Any, folders: tuple[str, ...]
) -> None:
    recorder = open_tracked(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), *folders)
    (only,) = server.runs.values()
    assert list(only.names.values()) == list(folders)
    last = f"m-{len(folders) - 1}"
    assert only.registered == [(last, "digits", "champion")]
    assert any("version 1 of digits, models:/digits@champion" in t for t in texts_of(recorder))
    open_tracked(**REGISTERED).close()
    assert len(only.registered) == 1


def test_a_registry_that_refuses_costs_one_warning(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    server.no_registry = True
    recorder = open_tracked(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), "model")
    (only,) = server.runs.values()
    assert only.status == "FINISHED"
    assert only.models == {"m-0": ["MLmodel"]}
    assert len(only.registered) == 1
    told = [text for text in texts_of(recorder) if "does not register" in text]
    assert len(told) == 1
    assert "there is no registry" in told[0]


def test_artifacts_that_are_refused_hold_up_no_metrics_and_are_told_once(
    server: Server, open_tracked: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_tracked()
    attempt = tell(recorder, 0, 3)
    finish(recorder, attempt, "done")
    (run,) = server.runs.values()
    assert len(run.losses()) == 3
    assert run.files == {}
    texts = texts_of(recorder)
    assert sum("does not take artifacts (no bucket)" in text for text in texts) == 1


def test_artifacts_that_were_refused_at_the_end_come_with_the_next_start_and_only_once(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_tracked(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), "model", "best_model")
    (only,) = server.runs.values()
    assert (only.status, only.sent, only.models, only.registered) == ("FINISHED", [], {}, [])
    open_tracked(**REGISTERED).close()  # still refused
    server.no_files = False
    for _ in range(2):
        open_tracked(**REGISTERED).close()
        assert sorted(only.sent) == ARTIFACTS
        assert only.names == {"m-0": "model", "m-1": "best_model"}
        assert (only.num_filled, set(only.steps.values())) == (2, {3})
        assert only.registered == [("m-1", "digits", "champion")]
        assert (only.status, only.statuses) == ("FINISHED", ["FINISHED"])
    kept = [json.loads(line) for line in gzip.decompress(only.files[LEDGER_ARTIFACT]).splitlines()]
    assert [line for line in kept if line["type"] != HEADER] == list(read_ledger(run))


def test_the_model_of_an_end_comes_late_though_the_run_goes_on(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_tracked()
    end_with_models(run, recorder, tell(recorder, 0, 3), "model")
    server.no_files = False
    recorder = open_tracked()
    attempt = tell(recorder, 3, 5)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    assert sorted(only.sent) == ARTIFACTS
    assert (only.names, only.steps, only.status) == ({"m-0": "model"}, {"m-0": 3}, "RUNNING")
    run.write("model/MLmodel", b"of five steps")
    finish(recorder, attempt, "done")
    assert sorted(only.sent) == sorted([*ARTIFACTS, LEDGER_ARTIFACT])
    assert (only.num_filled, only.steps) == (2, {"m-0": 3, "m-1": 5})


def test_no_model_is_registered_in_place_of_a_better_one_that_was_refused(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked(**REGISTERED)
    attempt = tell(recorder, 0, 3)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    server.no_models.add("best_model")
    end_with_models(run, recorder, attempt, "model", "best_model")
    assert only.models == {"m-0": ["MLmodel"]}
    assert only.registered == []
    server.no_models.clear()
    open_tracked(**REGISTERED).close()
    assert only.registered == [("m-1", "digits", "champion")]
    assert only.num_filled == 2


def test_files_that_were_refused_are_offered_again_once_a_minute_while_the_run_goes_on(
    server: Server, open_tracked: Any, tell: Any, make_step: Any
) -> None:
    server.no_files = True
    recorder = open_tracked()
    attempt = tell(recorder, 0, 3)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    server.no_files = False
    for sequence, now_s in enumerate([1_000.0 + RETRY_S - 1.0, 1_000.0 + RETRY_S], 2):
        assert only.sent == []
        server.now_s = now_s
        recorder.push(attempt, "0", sequence, [make_step(sequence + 1).to_json()])
        assert recorder.drain() == []
    assert sorted(only.sent) == ARTIFACTS[1:]
    recorder.close()
