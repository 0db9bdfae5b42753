from __future__ import annotations

import json
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import InputError
from samestep.names import Env, Tag
from samestep.spec import parse_spec
from samestep.telemetry import provenance
from samestep.telemetry.sinks import SinkPlan, plan_sinks

JOB = {"workload": "a:B", "batch_size": 8, "max_steps": 1}
REMOTE = "s3://bucket/runs?region=us-east-1"
HERE = Path(__file__).parent


def plan(
    storage: str, environ: dict[str, str] | None = None, folder: Path = HERE, **fields: Any
) -> SinkPlan:
    spec = parse_spec({**JOB, "storage": storage, **fields})
    path, mark, query = storage.partition("?")
    return plan_sinks(
        spec, f"{path}/r{mark}{query}", workload_folder=HERE, environ=environ or {}, folder=folder
    )


def test_without_a_server_a_file_beside_the_runs_is_used(tmp_path: Path) -> None:
    found = plan(str(tmp_path))
    assert found.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert found.artifact_root == f"file://{tmp_path}/mlartifacts"
    assert "mlflow ui --backend-store-uri sqlite:///" in found.hint
    assert found.metrics == ("127.0.0.1", 0)


def test_the_spec_goes_before_the_environment(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://env:5000", "MLFLOW_TRACKING_TOKEN": "t", "X": "y"}
    assert plan(str(tmp_path), environ).tracking_uri == "http://env:5000"
    found = plan(str(tmp_path), environ, tracking={"uri": "https://spec"})
    assert found.tracking_uri == "https://spec"
    assert found.artifact_root is None
    assert set(found.environment) == {"MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"}
    assert "MLFLOW_TRACKING_TOKEN" not in repr(found)


def test_the_experiment_is_the_jobs_or_else_the_environments(tmp_path: Path) -> None:
    environ = {"MLFLOW_EXPERIMENT_NAME": "team"}
    assert plan(str(tmp_path)).experiment == "samestep"
    assert plan(str(tmp_path), environ).experiment == "team"
    assert plan(str(tmp_path), environ, tracking={"experiment": "own"}).experiment == "own"


def test_remote_storage_without_a_server_says_once_that_records_wait() -> None:
    found = plan(REMOTE)
    assert found.tracking_uri is None
    assert len(found.notes) == 1
    assert "MLFLOW_TRACKING_URI" in found.notes[0]
    with pytest.raises(InputError, match=r"tracking\.required is true.*no MLflow server"):
        plan(REMOTE, tracking={"required": True})


def test_a_relative_file_is_taken_from_the_folder_of_the_user(tmp_path: Path) -> None:
    found = plan(str(tmp_path), {"MLFLOW_TRACKING_URI": "sqlite:///x/m.db"}, folder=tmp_path)
    assert found.tracking_uri == f"sqlite:///{tmp_path}/x/m.db"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "localhost:5000", "s3://b/x"])
def test_a_uri_that_mlflow_keeps_no_runs_in_is_refused_by_name(tmp_path: Path, uri: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(uri)}.*starts with http"):
        plan(str(tmp_path), tracking={"uri": uri})


def test_a_refused_uri_is_shown_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        plan(str(tmp_path), tracking={"uri": "ftp://me:secret@host/x"})
    assert "secret" not in str(caught.value)


def test_what_is_switched_off_is_not_made(tmp_path: Path) -> None:
    off = plan(str(tmp_path), tracking={"enabled": False}, metrics={"enabled": False})
    assert off.make() == []
    assert [sink.name for sink in plan(str(tmp_path)).make()] == ["mlflow", "prometheus"]


def test_a_plan_can_be_sent_to_another_process(tmp_path: Path) -> None:
    found = plan(str(tmp_path))
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_plan_of_a_submitted_job_knows_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_7"}}
    monkeypatch.setenv(Env.RAY_JOB_CONFIG, json.dumps(told))
    found = plan(str(tmp_path))
    assert found.about[Tag.JOB_ID] == "raysubmit_7"
    # In the recorder's process, where Ray's own variables are those of another job.
    monkeypatch.delenv(Env.RAY_JOB_CONFIG)
    monkeypatch.setenv(Env.SAMESTEP_JOB_ID, found.environment[Env.SAMESTEP_JOB_ID])
    assert provenance.job_id() == "raysubmit_7"


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"metadata": null}', '{"metadata": {}}'])
def test_a_plan_of_a_job_that_was_not_submitted_knows_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setenv(Env.RAY_JOB_CONFIG, config)
    assert Tag.JOB_ID not in plan(str(tmp_path)).about


def test_a_plan_knows_who_starts_the_run(tmp_path: Path) -> None:
    assert Tag.USER in plan(str(tmp_path)).about


def test_the_commit_of_a_workload_is_known_and_whether_its_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        command = ["git", "-C", tmp_path, *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    assert Tag.GIT_COMMIT not in provenance.facts(tmp_path)  # nothing was committed yet
    (tmp_path / "workload.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    found = provenance.facts(tmp_path)
    assert (found[Tag.GIT_COMMIT], found[Tag.GIT_CHANGED]) == (git("rev-parse", "HEAD"), "false")
    (tmp_path / "workload.py").write_text("a = 2\n")
    assert provenance.facts(tmp_path) == {**found, Tag.GIT_CHANGED: "true"}
