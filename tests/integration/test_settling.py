"""A run whose recorder is killed: MLflow and Prometheus learn of it from the next command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.names import Tag
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.settling import is_due
from samestep.telemetry.sinks import open_recorder, plan_sinks
from samestep.telemetry.targets import announced

JOB = {
    "workload": "tiny:Tiny",
    "batch_size": 8,
    "shards": 2,
    "max_steps": 9,
}
HELD = """
import sys
from pathlib import Path

from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.sinks import open_recorder, plan_sinks

uri, job = sys.argv[1], eval(sys.argv[2])
spec = parse_spec(job)
plan = plan_sinks(spec, uri, workload_folder=Path("."), environ={})
recorder = open_recorder(plan, uri, run="a", spec_yaml=dump_spec(spec))
recorder.begin_attempt({"start_step": 0, "mode": "local", "world_size": 1, "numerics": {}})
print("lacking", recorder.drain(), flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def killed(tmp_path: Path) -> Storage:
    """A run that was delivered to MLflow's file when its process was killed."""
    job = {**JOB, "storage": str(tmp_path / "runs")}
    uri = str(tmp_path / "runs" / "a")
    command = [sys.executable, "-c", HELD, uri, repr(job)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "lacking []\n"
        finally:
            process.kill()
    return Storage.at(uri)


def test_a_killed_run_is_killed_in_mlflow_after_the_next_look_and_running_when_it_goes_on(
    killed: Storage, start_command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    client = load_mlflow().MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")

    def tracked() -> Any:
        (found,) = client.search_runs([client.get_experiment_by_name("samestep").experiment_id])
        return found

    assert tracked().info.status == "RUNNING"
    assert is_due(killed)
    place = Storage.at(str(tmp_path / "runs"))
    assert list(announced(place)) == ["a"]
    # Any command that is given a run settles it, also one that ends in an error.
    looks = start_command("logs", killed.uri, "--worker", "9", cwd=tmp_path)
    output, _ = looks.communicate(timeout=120)
    assert looks.returncode == 2, output
    assert "MLflow" not in output
    assert not is_due(killed)
    assert announced(place) == {}
    found = tracked()
    assert found.info.status == "KILLED"
    assert found.data.tags[Tag.STATUS] == "died"
    assert found.info.end_time >= found.info.start_time
    spec = parse_spec({**JOB, "storage": str(tmp_path / "runs")})
    plan = plan_sinks(spec, killed.uri, workload_folder=tmp_path, environ={})
    recorder = open_recorder(plan, killed.uri, run="a", spec_yaml=dump_spec(spec))
    try:
        recorder.begin_attempt({"start_step": 0, "mode": "local", "world_size": 1})
        assert recorder.drain() == []
        assert tracked().info.status == "RUNNING"
        assert not is_due(killed)
        show = start_command("show", killed.uri, cwd=tmp_path)
        assert show.wait(120) == 0
        assert list(announced(place)) == ["a"]
    finally:
        recorder.close()
    assert tracked().info.status == "KILLED"
    assert not is_due(killed)
