"""What comes of a run afterwards, in a real MLflow: the report of an incident, and a fork."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tracked_story import MakeStory, Story, free_port, history, only_run

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.names import LEDGER_ARTIFACT, Series, Tag
from samestep.replay.fork import fork_run
from samestep.replay.report_delivery import deliver
from samestep.spec import dump_spec
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.sinks import deliver_rest
from samestep.telemetry.tracking_file import read_tracked, write_tracked

INCIDENT = "exception-step-00000002-attempt-1"
REPORT = (f"incidents/{INCIDENT}/report.html", INCIDENT)
"""Where the report lies, and the incident that it is of."""
DELIVERY_S = 120.0

pytestmark = pytest.mark.timeout(400)


def end(story: Story, *, step: int) -> None:
    """The run's end, once all of it is in MLflow."""
    story.finish(step=step)
    assert story.recorder.drain(DELIVERY_S) == []
    story.recorder.close()


def test_a_fork_is_another_mlflow_run_that_tells_its_parents_id_name_and_step(
    tmp_path: Path, make_story: MakeStory
) -> None:
    story = make_story()
    story.open()
    story.begin(0)
    story.steps(0, 6)
    state = State(step=4, tensors={"model/w": torch.ones(3)}, values={"extras": {}})
    meta = CheckpointMeta(numerics={}, spec={}, created_s=0.0)
    manifest = write_files(Storage.at(story.uri), state, meta)
    story.recorder.commit(story.attempt, manifest.to_json(), 1)
    end(story, step=6)
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    parent = only_run(uri)
    made = fork_run(Storage.at(story.uri), step=4, name="b")
    fork = make_story(name="b")
    assert fork.spec == made.spec
    fork.open()
    fork.begin(4)
    fork.steps(4, 6)
    end(fork, step=6)
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    found = client.search_runs([parent.info.experiment_id])
    [new] = [run for run in found if run.info.run_id != parent.info.run_id]
    assert (parent.info.run_name, new.info.run_name) == ("a", "b")
    assert new.data.tags[Tag.PARENT_RUN_ID] == parent.info.run_id
    assert new.data.tags[Tag.PARENT] == f"{story.uri} after 4 steps"
    assert not {Tag.PARENT, Tag.PARENT_RUN_ID} & parent.data.tags.keys()
    assert [step for step, _ in history(uri, new.info.run_id, Series.LOSS)] == list(range(6))


def test_mlflow_gets_no_secret_of_the_job_nor_one_that_a_failure_tells(
    tmp_path: Path, make_story: MakeStory
) -> None:
    story = make_story(
        args={"token": "hush-hush", "pin": "7"},
        incidents={"bundle": {"secret_args": ["token", "pin"]}},
    )
    story.open()
    story.begin(0)
    story.steps(0, 2)
    message = "can't log in with hush-hush"
    told = {"kind": "exception", "step": 2, "message": message, "traceback": f"E: {message}"}
    story.recorder.record_incident(story.attempt, told)
    story.recorder.fail(story.attempt, "ValueError", message)
    story.recorder.finish(
        story.attempt,
        {"status": "failed", "step": 2, "digest": None, "message": message, "exit_status": 1},
    )
    assert story.recorder.drain(DELIVERY_S) == []
    story.recorder.close()
    run = only_run(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert run.data.params["args.token"] == run.data.params["args.pin"] == "(left out: secret)"
    assert run.data.tags[Tag.MESSAGE] == "can't log in with (left out: secret)"
    files = [path for path in (tmp_path / "runs" / "mlartifacts").rglob("*") if path.is_file()]
    read = {path.name: path.read_bytes() for path in files}
    read[LEDGER_ARTIFACT] = gzip.decompress(read[LEDGER_ARTIFACT])
    read["mlflow.db"] = (tmp_path / "runs" / "mlflow.db").read_bytes()
    assert {"spec.yaml", "params.json", "incident.json"} <= read.keys()
    assert [name for name, data in read.items() if b"hush" in data] == []


def test_artifacts_that_were_refused_at_the_end_are_delivered_on_request_and_only_once(
    tmp_path: Path, make_story: MakeStory
) -> None:
    artifacts = tmp_path / "runs" / "mlartifacts"
    artifacts.parent.mkdir()
    artifacts.write_text("in the way of the folder")
    story = make_story(tracking={"registered_model": "scored"})
    story.open()
    story.begin(0)
    story.steps(0, 3)
    Storage.at(story.uri).write("model/MLmodel", b"flavors: {}")
    end(story, step=3)
    assert sum("MLflow does not take artifacts" in text for text in story.heard()) == 1
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    before = only_run(uri)
    assert before.info.status == "FINISHED"
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    assert client.search_registered_models() == []
    known = {"run": "a", "spec_yaml": dump_spec(story.spec)}
    artifacts.unlink()
    told = deliver_rest(story.plan(), story.uri, **known)
    assert any("the model is version 1 of scored" in line for line in told)
    assert deliver_rest(story.plan(), story.uri, **known) == []
    after = only_run(uri)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    [model] = client.search_logged_models([after.info.experiment_id])
    assert (model.name, str(model.status)) == ("model", "READY")
    assert [output.model_id for output in after.outputs.model_outputs] == [model.model_id]
    [version] = client.search_model_versions("name = 'scored'")
    assert version.source == model.artifact_location
    found = {path.name for path in artifacts.rglob("*") if path.is_file()}
    assert {"MLmodel", LEDGER_ARTIFACT, "spec.yaml"} <= found


def delivered(story: Story) -> Storage:
    """The directory of a run of two steps that is whole in MLflow."""
    story.open()
    story.begin(0)
    story.steps(0, 2)
    end(story, step=2)
    return Storage.at(story.uri)


def test_the_report_of_an_incident_is_an_artifact_equal_to_the_file_beside_the_incident(
    tmp_path: Path, make_story: MakeStory
) -> None:
    run = delivered(make_story())
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    there = only_run(uri)
    name, incident = REPORT
    for page in ("<p>the first</p>", "<p>h\u00fcbsch, made once more</p>\n"):
        assert deliver(run, incident, page) == [
            f"report: {run.uri}/{name}",
            f"report: artifact {name} of MLflow run {there.info.run_id} at {uri}",
        ]
        found = load_mlflow().artifacts.download_artifacts(
            f"{there.info.artifact_uri}/{name}", dst_path=str(tmp_path / "found")
        )
        assert Path(found).read_bytes() == run.read(name) == page.encode()
    after = only_run(uri)
    assert (after.info.run_id, after.info.status) == (there.info.run_id, "FINISHED")


def test_a_report_that_mlflow_can_not_take_stays_with_the_run_and_one_line_tells_why(
    tmp_path: Path, make_story: MakeStory
) -> None:
    run = delivered(make_story())
    database = tmp_path / "runs" / "mlflow.db"
    uri = f"sqlite:///{database}"
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    there, tracked = only_run(uri), read_tracked(run)
    assert tracked is not None
    name, incident = REPORT

    def told_why(page: str) -> str:
        own, told = deliver(run, incident, page)
        assert own == f"report: {run.uri}/{name}"
        assert run.read(name) == page.encode()
        return told.removeprefix("the report is not in MLflow: ")

    write_tracked(run, replace(tracked, uri=f"http://127.0.0.1:{free_port()}"))
    assert told_why("no server").startswith("no answer: ")
    write_tracked(run, tracked)
    client.delete_run(there.info.run_id)
    assert told_why("no run").startswith("there is no run ")
    # Nothing is made in MLflow for the report's sake.
    assert client.search_runs([there.info.experiment_id]) == []
    database.unlink()
    assert told_why("no file") == f"there is no file {uri}"
    assert not database.exists()
