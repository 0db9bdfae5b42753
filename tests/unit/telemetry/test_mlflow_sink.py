from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, StorageError
from samestep.incidents.record import Incident
from samestep.names import LEDGER_ARTIFACT, TRACKING_FILE, IncidentKind, Tag
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.ledger import HEADER, read_ledger
from samestep.telemetry.mlflow_client import Point, TrackingError
from samestep.telemetry.mlflow_sink import MlflowSink
from samestep.telemetry.mlflow_upload import RETRY_S
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord
from samestep.telemetry.tracking_file import (
    Tracked,
    read_tracked,
    without_password,
    write_tracked,
)

URI = "http://me:secret@host:5000"
JOB = {"workload": "a:B", "batch_size": 8, "shards": 2, "max_steps": 100}


class Server:
    """Keeps what runs send; away while `away` is set; drops answers while `deaf` is."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.away = self.deaf = self.no_files = self.no_registry = False
        self.no_models: set[str] = set()
        self.num_connections = 0
        self.now_s = 1_000.0

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
        self.sent: list[str] = []
        self.statuses: list[str] = []
        self.models: dict[str, list[str]] = {}
        self.made: dict[tuple[str, str], str] = {}
        self.names: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.num_filled = 0
        self.datasets: list[DatasetInfo] = []
        self.registered: list[tuple[str, str, str]] = []
        self.start_ms = 1_000_000

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
        self.sent.append(name)
        self.files[name] = data

    def log_datasets(self, found: Sequence[DatasetInfo]) -> None:
        self._reached()
        self.datasets += found

    def create_model(self, name: str, step: int, *, digest: str) -> str:
        model_id = self.made.setdefault((name, digest), f"m-{len(self.made)}")
        self.names[model_id] = name
        self.steps[model_id] = step
        return model_id

    def register_model(self, model_id: str, *, name: str, alias: str) -> str:
        self.registered.append((model_id, name, alias))
        if self.server.no_registry:
            raise TrackingError("there is no registry")
        return str(len(self.registered))

    def fill_model(self, model_id: str, folder: Path) -> None:
        if self.server.no_files or self.names[model_id] in self.server.no_models:
            raise TrackingError("no bucket")
        self.num_filled += 1
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
            uri,
            experiment="e",
            required=required,
            connect=server.connect,
            interval_s=0.0,
            clock=lambda: server.now_s,
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
    texts = texts_of(recorder)
    assert sum("does not take artifacts (no bucket)" in text for text in texts) == 1


ARTIFACTS = ["ledger.jsonl.gz", "params.json", "requirements.txt", "spec.yaml"]


def test_artifacts_that_were_refused_at_the_end_come_with_the_next_start_and_only_once(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_recorder(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), "model", "best_model")
    (only,) = server.runs.values()
    assert (only.status, only.sent, only.models, only.registered) == ("FINISHED", [], {}, [])
    open_recorder(**REGISTERED).close()  # still refused
    server.no_files = False
    for _ in range(2):
        open_recorder(**REGISTERED).close()
        assert sorted(only.sent) == ARTIFACTS
        assert only.names == {"m-0": "model", "m-1": "best_model"}
        assert (only.num_filled, set(only.steps.values())) == (2, {3})
        assert only.registered == [("m-1", "digits", "champion")]
        assert (only.status, only.statuses) == ("FINISHED", ["FINISHED"])
    kept = [json.loads(line) for line in gzip.decompress(only.files[LEDGER_ARTIFACT]).splitlines()]
    assert [line for line in kept if line["type"] != HEADER] == list(read_ledger(run))


def test_the_model_of_an_end_comes_late_though_the_run_goes_on(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    server.no_files = True
    recorder = open_recorder()
    end_with_models(run, recorder, tell(recorder, 0, 3), "model")
    server.no_files = False
    recorder = open_recorder()
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
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder(**REGISTERED)
    attempt = tell(recorder, 0, 3)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    server.no_models.add("best_model")
    end_with_models(run, recorder, attempt, "model", "best_model")
    assert only.models == {"m-0": ["MLmodel"]}
    assert only.registered == []
    server.no_models.clear()
    open_recorder(**REGISTERED).close()
    assert only.registered == [("m-1", "digits", "champion")]
    assert only.num_filled == 2


def test_files_that_were_refused_are_offered_again_once_a_minute_while_the_run_goes_on(
    server: Server, open_recorder: Any, tell: Any, make_step: Any
) -> None:
    server.no_files = True
    recorder = open_recorder()
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


def test_a_file_of_before_refusals_were_noted_is_read(run: Storage, server: Server) -> None:
    tracked = Tracked(key="k", uri="u", experiment="e", run_id="r", status="FINISHED")
    write_tracked(run, tracked)
    kept = json.loads(run.read(TRACKING_FILE))
    assert kept.pop("format") == 2
    old = {name: value for name, value in kept.items() if not name.startswith("lacks_")}
    assert len(old) == len(kept) - 2
    run.write(TRACKING_FILE, json.dumps({"format": 1, **old}).encode())
    assert read_tracked(run) == tracked
    run.write(TRACKING_FILE, json.dumps({"format": 3, **kept}).encode())
    with pytest.raises(StorageError, match=r"has format 3; this samestep reads 1 to 2"):
        read_tracked(run)


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


def test_the_ledger_goes_along_at_each_end_and_is_the_runs_own(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
    attempt = tell(recorder, 0, 3)
    assert recorder.drain() == []
    (only,) = server.runs.values()
    assert LEDGER_ARTIFACT not in only.files
    finish(recorder, attempt, "interrupted")
    first = gzip.decompress(only.files[LEDGER_ARTIFACT])
    recorder = open_recorder()
    finish(recorder, tell(recorder, 3, 5), "done")
    whole = gzip.decompress(only.files[LEDGER_ARTIFACT])
    assert whole.startswith(first)
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line for line in lines if line["type"] != HEADER] == list(read_ledger(run))
    assert len(lines) > len(list(read_ledger(run)))


def texts_of(recorder: Recorder) -> list[str]:
    return [item["text"] for item in recorder.status()["messages"]]


def test_what_attempts_ran_as_is_a_tag_that_stays_short(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    recorder = open_recorder()
    for start, world_size in enumerate([2, 2, 3, 2]):
        tell(recorder, start, start + 1, world_size=world_size)
    assert recorder.drain() == []
    (run,) = server.runs.values()
    assert run.tags[Tag.ATTEMPTS] == (
        "1-2: ddp, 2 workers from step 0; 3: ddp, 3 workers from step 2; "
        "4: ddp, 2 workers from step 3"
    )
    for start in range(4, 60):
        tell(recorder, start, start + 1, world_size=1 + start % 2)
    recorder.close()
    text = run.tags[Tag.ATTEMPTS]
    assert len(text) <= 1000
    assert text.startswith("...; ")
    assert text.endswith("60: ddp, 2 workers from step 59")


def test_datasets_are_told_once_and_again_when_they_change(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    def data(digest: str, num_sampled: int = 8) -> list[dict[str, Any]]:
        found = DatasetInfo(
            context="training", kind="m.Rows", size=9, num_sampled=num_sampled, digest=digest
        )
        return [found.to_json()]

    recorder = open_recorder()
    for start, told in enumerate([data("a"), data("a"), data("slow", 0), data("b")]):
        tell(recorder, start, start + 1, datasets=told)
    recorder.close()
    (run,) = server.runs.values()
    assert [info.digest for info in run.datasets] == ["a", "b"]


def end_with_models(run: Storage, recorder: Recorder, attempt: int, *folders: str) -> None:
    for folder in folders:
        run.write(f"{folder}/MLmodel", folder.encode())
    finish(recorder, attempt, "done")


REGISTERED = {"tracking": {"registered_model": "digits", "alias": "champion"}}


@pytest.mark.parametrize("folders", [("model",), ("model", "best_model")])
def test_the_best_model_is_registered_or_else_the_final_one(
    run: Storage, server: Server, open_recorder: Any, tell: Any, folders: tuple[str, ...]
) -> None:
    recorder = open_recorder(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), *folders)
    (only,) = server.runs.values()
    assert list(only.names.values()) == list(folders)
    last = f"m-{len(folders) - 1}"
    assert only.registered == [(last, "digits", "champion")]
    assert any("version 1 of digits, models:/digits@champion" in t for t in texts_of(recorder))
    open_recorder(**REGISTERED).close()
    assert len(only.registered) == 1


def test_a_registry_that_refuses_costs_one_warning(
    run: Storage, server: Server, open_recorder: Any, tell: Any
) -> None:
    server.no_registry = True
    recorder = open_recorder(**REGISTERED)
    end_with_models(run, recorder, tell(recorder, 0, 3), "model")
    (only,) = server.runs.values()
    assert only.status == "FINISHED"
    assert only.models == {"m-0": ["MLmodel"]}
    assert len(only.registered) == 1
    told = [text for text in texts_of(recorder) if "does not register" in text]
    assert len(told) == 1
    assert "there is no registry" in told[0]


def test_nodes_are_shown_once_in_ten_seconds_and_not_kept_for_a_server_that_is_away(
    server: Server, open_recorder: Any, tell: Any
) -> None:
    gpu = {"index": 1, "memory_bytes": 10, "memory_limit_bytes": 40, "busy_percent": 50.0}
    node = {
        "host": "a+b",
        "cpu_percent": 12.5,
        "memory_bytes": 2_000_000,
        "memory_limit_bytes": 8_000_000,
        "gpus": [gpu],
    }
    report = {"num_steps": 0, "num_samples": 0, "own_s": 0.0, "host_bytes": 1, "node": node}
    recorder = open_recorder()
    attempt = tell(recorder, 0, 1)

    def show(now_s: float, *world_ranks: int) -> None:
        server.now_s = now_s
        for world_rank in world_ranks:
            told = {**report, "attempt": attempt, "world_rank": world_rank, "host_limit_bytes": 2}
            assert recorder.report(told)
        assert recorder.drain() == []

    assert recorder.drain() == []
    show(1_000.0, 0, 1)
    show(1_009.0, 0)
    show(1_010.0, 1)
    server.away = True
    show(1_020.0, 0)
    server.away = False
    (run,) = server.runs.values()
    start = "system/a:2b:b"
    points = sorted((p.step, p.name, p.value) for p in run.points if p.name.startswith(f"{start}/"))
    values = {
        "cpu_utilization_percentage": 12.5,
        "gpu_1_memory_usage_megabytes": 0.0,
        "gpu_1_memory_usage_percentage": 25.0,
        "gpu_1_utilization_percentage": 50.0,
        "system_memory_usage_megabytes": 2.0,
        "system_memory_usage_percentage": 25.0,
    }
    assert points == [(slot, f"{start}/{k}", v) for slot in (0, 1) for k, v in values.items()]
    recorder.close()
