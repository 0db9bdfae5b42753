from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, StorageError
from samestep.incidents.record import Incident
from samestep.names import TRACKING_FILE, IncidentKind, Tag
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.mlflow_client import Point, TrackingError
from samestep.telemetry.mlflow_sink import MlflowSink
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord
from samestep.telemetry.tracking_file import read_tracked, without_password

URI = "http://me:secret@host:5000"
JOB = {"workload": "a:B", "batch_size": 8, "shards": 2, "max_steps": 100}


class Server:
    """Keeps what runs send; away while `away` is set; drops answers while `deaf` is."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.away = self.deaf = self.no_files = False
        self.num_connections = 0

    def connect(self, uri: str, *, key: str, run_id: str | None, **_: Any) -> FakeRun:
        if self.away:
            raise TrackingError(f"no answer from {uri}")
        self.num_connections += 1
        if run_id in self.runs:
            return self.runs[str(run_id)]
        for run in self.runs.values():
            if run.key == key:
                return run
        run = FakeRun(self, key, f"run-{len(self.runs)}")
        self.runs[run.run_id] = run
        return run


class FakeRun:
    def __init__(self, server: Server, key: str, run_id: str) -> None:
        self.server, self.key, self.run_id = server, key, run_id
        self.status = "RUNNING"
        self.params: dict[str, str] = {}
        self.points: set[Point] = set()
        self.tags: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.statuses: list[str] = []
        self.models: dict[str, list[str]] = {}

    def _reached(self) -> None:
        if self.server.away:
            raise TrackingError("no answer")

    def log_points(self, points: Sequence[Point]) -> None:
        self._reached()
        self.points |= set(points)
        if self.server.deaf:
            raise TrackingError("the answer was lost")

    def log_params(self, params: dict[str, str]) -> None:
        self._reached()
        self.params = {**params, **self.params}

    def set_tags(self, tags: dict[str, str]) -> None:
        self._reached()
        self.tags |= tags

    def set_status(self, status: str, time_ms: int) -> None:
        self._reached()
        self.status = status
        self.statuses.append(status)

    def log_file(self, name: str, data: bytes) -> None:
        self._reached()
        if self.server.no_files:
            raise TrackingError("no bucket")
        self.files[name] = data

    def create_model(self, name: str, step: int) -> str:
        return f"m-{len(self.models)}"

    def fill_model(self, model_id: str, folder: Path) -> None:
        self.models[model_id] = sorted(path.name for path in folder.iterdir())

    def losses(self) -> list[tuple[int, float]]:
        return sorted((p.step, p.value) for p in self.points if p.name == "loss")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def open_recorder(run: Storage, server: Server) -> Callable[..., Recorder]:
    def make(uri: str = URI, *, required: bool = False, **fields: Any) -> Recorder:
        sink = MlflowSink(
            uri, experiment="e", required=required, connect=server.connect, interval_s=0.0
        )
        spec = parse_spec({**JOB, **fields})
        return Recorder(run.uri, run="r", spec_yaml=dump_spec(spec), sinks=[sink])

    return make


@pytest.fixture
def tell(make_step: Callable[..., StepRecord]) -> Callable[..., int]:
    def steps(recorder: Recorder, start: int, stop: int, **info: Any) -> int:
        known = {"start_step": start, "mode": "ddp", "world_size": 2, **info}
        attempt = recorder.begin_attempt(known)
        recorder.push(attempt, "0", 1, [make_step(s).to_json() for s in range(start, stop)])
        return attempt

    return steps


def finish(recorder: Recorder, attempt: int, status: str) -> None:
    result = {"status": status, "step": 3, "digest": "d", "evaluation": None, "message": "why"}
    recorder.finish(attempt, result)
    recorder.close()


@pytest.mark.parametrize(
    ("status", "shown"), [("done", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")]
)
def test_a_run_ends_in_mlflow_as_it_ended(
    server: Server, open_recorder: Any, tell: Any, status: str, shown: str
) -> None:
    recorder = open_recorder()
    finish(recorder, tell(recorder, 0, 3), status)
    (run,) = server.runs.values()
    assert run.status == shown
    assert run.tags[Tag.STATUS] == status
    assert run.tags[Tag.MESSAGE] == "why"
    assert run.tags[Tag.ATTEMPT] == "1"
    assert run.tags[Tag.WORKERS] == "2"


def test_a_batch_whose_answer_was_lost_is_sent_again_as_the_same_points(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    server.deaf = True
    recorder = open_recorder()
    tell(recorder, 0, 5)
    assert recorder.drain() == ["mlflow"]
    server.deaf = False
    assert recorder.drain() == []
    (run,) = server.runs.values()
    assert [step for step, _ in run.losses()] == [0, 1, 2, 3, 4]
    recorder.close()


def test_a_run_whose_id_was_lost_is_found_by_its_key(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
    tell(recorder, 0, 3)
    recorder.close()
    kept = json.loads(run.read(TRACKING_FILE))
    zero = {"segment": 0, "offset_bytes": 0}
    lost = {**kept, "run_id": None, "position": zero, "next_step": 0, "next_evaluation": 0}
    run.write(TRACKING_FILE, json.dumps(lost).encode())
    recorder = open_recorder()
    tell(recorder, 3, 5)
    recorder.close()
    (only,) = server.runs.values()
    assert [step for step, _ in only.losses()] == [0, 1, 2, 3, 4]


def test_steps_taken_again_under_other_numerics_keep_their_first_points(
    server: Server, open_recorder: Any, make_step: Any
) -> None:
    recorder = open_recorder()
    for sequence, (torch_version, shift) in enumerate([("2.13", 0.0), ("2.14", 1e-5)]):
        numerics = {"binding": {"torch": torch_version}, "informational": {}}
        info = {"start_step": 0, "mode": "ddp", "world_size": 1, "numerics": numerics}
        attempt = recorder.begin_attempt(info)
        records = [make_step(s, loss=0.5 + shift).to_json() for s in range(3 + sequence)]
        recorder.push(attempt, "0", 1, records)
    recorder.close()
    (run,) = server.runs.values()
    assert run.losses() == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5 + 1e-5)]


def test_steps_behind_a_rollback_have_points_of_their_own(
    server: Server, open_recorder: Any, make_step: Any
) -> None:
    recorder = open_recorder()
    info = {"start_step": 0, "mode": "ddp", "world_size": 1}
    attempt = recorder.begin_attempt(info)
    recorder.push(attempt, "0", 1, [make_step(s, loss=0.5).to_json() for s in range(4)])
    recorder.roll_back(attempt, {"to": 2, "until": 4, "attempt": attempt})
    attempt = recorder.begin_attempt({**info, "num_rollbacks": 1})
    recorder.push(attempt, "0", 1, [make_step(s, loss=0.5).to_json() for s in range(2)])
    recorder.push(attempt, "0", 2, [make_step(s, loss=0.25).to_json() for s in range(2, 5)])
    recorder.close()
    (run,) = server.runs.values()
    assert sorted(run.losses()) == [
        *((0, 0.5), (1, 0.5), (2, 0.25), (2, 0.5), (3, 0.25), (3, 0.5), (4, 0.25)),
    ]
    assert run.tags[Tag.BRANCH] == "1"


def test_another_server_gets_the_whole_run(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
    tell(recorder, 0, 3)
    recorder.close()
    server.runs.clear()
    recorder = open_recorder("http://elsewhere")
    tell(recorder, 3, 5)
    recorder.close()
    (only,) = server.runs.values()
    assert [step for step, _ in only.losses()] == [0, 1, 2, 3, 4]
    tracked = read_tracked(run)
    assert tracked is not None
    assert tracked.uri == "http://elsewhere"


def test_fields_that_changed_at_a_resume_are_tags_since_parameters_stay(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
    tell(recorder, 0, 1)
    recorder.close()
    recorder = open_recorder(max_steps=200)
    tell(recorder, 1, 2)
    recorder.close()
    (run,) = server.runs.values()
    assert run.params["max_steps"] == "100"
    assert run.tags["samestep.spec.max_steps"] == "200"
    assert b"max_steps: 200" in run.files["spec.yaml"]


def test_artifacts_that_are_refused_hold_up_no_metrics_and_are_told_once(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_recorder()
    attempt = tell(recorder, 0, 3)
    finish(recorder, attempt, "done")
    (run,) = server.runs.values()
    assert len(run.losses()) == 3
    assert run.files == {}
    texts = [item["text"] for item in recorder.status()["messages"]]
    assert sum("does not take artifacts (no bucket)" in text for text in texts) == 1


def test_incidents_and_the_packed_model_arrive(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
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


def test_a_server_that_is_away_is_told_once_without_its_password(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    server.away = True
    recorder = open_recorder()
    tell(recorder, 0, 3)
    assert recorder.drain() == ["mlflow"]
    assert recorder.drain() == ["mlflow"]
    status = recorder.status()
    texts = [item["text"] for item in status["messages"]]
    assert sum("does not take records" in text for text in texts) == 1
    assert "secret" not in " ".join(texts)
    assert status["mlflow"] == {
        "uri": "http://host:5000",
        "run_id": None,
        "up": False,
        "num_steps": 0,
    }
    recorder.close()


def test_no_password_is_written_down(run: Storage, open_recorder: Any, tell: Any) -> None:
    recorder = open_recorder()
    tell(recorder, 0, 1)
    recorder.close()
    assert b"secret" not in run.read(TRACKING_FILE)
    assert without_password("postgresql://u:p@h/db?x=1") == "postgresql://h/db?x=1"
    assert without_password("sqlite:////a@b/c.db") == "sqlite:////a@b/c.db"


def test_a_required_server_refuses_a_start_but_no_return(
    run: Storage, server: Server, open_recorder: Any
) -> None:
    server.away = True
    with pytest.raises(InputError, match=r"http://host:5000 can't be used: no answer"):
        open_recorder(required=True)
    sink = MlflowSink(URI, experiment="e", required=True, connect=server.connect)
    spec_yaml = dump_spec(parse_spec(JOB))
    Recorder(run.uri, run="r", spec_yaml=spec_yaml, sinks=[sink], returning=True).close()


def test_a_damaged_position_file_is_told_with_what_to_do(run: Storage, open_recorder: Any) -> None:
    run.write(TRACKING_FILE, b"{}")
    with pytest.raises(StorageError, match=r"mlflow\.json is damaged.*delete it"):
        open_recorder()
