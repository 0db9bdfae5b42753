from __future__ import annotations

import json
from typing import Any

import pytest
from fake_mlflow import JOB, URI, Server, finish

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, StorageError
from samestep.names import TRACKING_FILE, Tag
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.mlflow_sink import MlflowSink
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.tracking_file import (
    Tracked,
    read_tracked,
    without_password,
    write_tracked,
)


@pytest.mark.parametrize(
    ("status", "shown"), [("done", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")]
)
def test_a_run_ends_in_mlflow_as_it_ended(
    server: Server, open_tracked: Any, tell: Any, status: str, shown: str
) -> None:
    recorder = open_tracked()
    finish(recorder, tell(recorder, 0, 3), status)
    (run,) = server.runs.values()
    assert run.status == shown
    assert run.tags[Tag.STATUS] == status
    assert run.tags[Tag.MESSAGE] == "why"
    assert run.tags[Tag.ATTEMPT] == "1"
    assert run.tags[Tag.WORKERS] == "2"


def test_a_batch_whose_answer_was_lost_is_sent_again_as_the_same_points(
    server: Server, open_tracked: Any, tell: Any
) -> None:
    server.deaf = True
    recorder = open_tracked()
    tell(recorder, 0, 5)
    assert recorder.drain() == ["mlflow"]
    server.deaf = False
    assert recorder.drain() == []
    (run,) = server.runs.values()
    assert [step for step, _ in run.losses()] == [0, 1, 2, 3, 4]
    recorder.close()


def test_a_run_whose_id_was_lost_is_found_by_its_key(
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
    tell(recorder, 0, 3)
    recorder.close()
    kept = json.loads(run.read(TRACKING_FILE))
    zero = {"segment": 0, "offset_bytes": 0}
    lost = {**kept, "run_id": None, "position": zero, "next_step": 0, "next_evaluation": 0}
    run.write(TRACKING_FILE, json.dumps(lost).encode())
    recorder = open_tracked()
    tell(recorder, 3, 5)
    recorder.close()
    (only,) = server.runs.values()
    assert [step for step, _ in only.losses()] == [0, 1, 2, 3, 4]


def test_steps_taken_again_under_other_numerics_keep_their_first_points(
    server: Server, open_tracked: Any, make_step: Any
) -> None:
    recorder = open_tracked()
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
    server: Server, open_tracked: Any, make_step: Any
) -> None:
    recorder = open_tracked()
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
    run: Storage, server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
    tell(recorder, 0, 3)
    recorder.close()
    server.runs.clear()
    recorder = open_tracked("http://elsewhere")
    tell(recorder, 3, 5)
    recorder.close()
    (only,) = server.runs.values()
    assert [step for step, _ in only.losses()] == [0, 1, 2, 3, 4]
    tracked = read_tracked(run)
    assert tracked is not None
    assert tracked.uri == "http://elsewhere"


def test_fields_that_changed_at_a_resume_are_tags_since_parameters_stay(
    server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
    tell(recorder, 0, 1)
    recorder.close()
    recorder = open_tracked(max_steps=200)
    tell(recorder, 1, 2)
    recorder.close()
    (run,) = server.runs.values()
    assert run.params["max_steps"] == "100"
    assert run.tags["samestep.spec.max_steps"] == "200"
    assert b"max_steps: 200" in run.files["spec.yaml"]


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


def test_a_server_that_is_away_is_told_once_without_its_password(
    server: Server, open_tracked: Any, tell: Any
) -> None:
    server.away = True
    recorder = open_tracked()
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


def test_no_password_is_written_down(run: Storage, open_tracked: Any, tell: Any) -> None:
    recorder = open_tracked()
    tell(recorder, 0, 1)
    recorder.close()
    assert b"secret" not in run.read(TRACKING_FILE)
    assert without_password("postgresql://u:p@h/db?x=1") == "postgresql://h/db?x=1"
    assert without_password("sqlite:////a@b/c.db") == "sqlite:////a@b/c.db"


def test_a_required_server_refuses_a_start_but_no_return(
    run: Storage, server: Server, open_tracked: Any
) -> None:
    server.away = True
    with pytest.raises(InputError, match=r"http://host:5000 can't be used: no answer"):
        open_tracked(required=True)
    sink = MlflowSink(URI, experiment="e", required=True, connect=server.connect)
    spec_yaml = dump_spec(parse_spec(JOB))
    Recorder(run.uri, run="r", spec_yaml=spec_yaml, sinks=[sink], returning=True).close()


def test_a_damaged_position_file_is_told_with_what_to_do(run: Storage, open_tracked: Any) -> None:
    run.write(TRACKING_FILE, b"{}")
    with pytest.raises(StorageError, match=r"mlflow\.json is damaged.*delete it"):
        open_tracked()


def test_what_attempts_ran_as_is_a_tag_that_stays_short(
    server: Server, open_tracked: Any, tell: Any
) -> None:
    recorder = open_tracked()
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
    server: Server, open_tracked: Any, tell: Any
) -> None:
    def data(digest: str, num_sampled: int = 8) -> list[dict[str, Any]]:
        found = DatasetInfo(
            context="training", kind="m.Rows", size=9, num_sampled=num_sampled, digest=digest
        )
        return [found.to_json()]

    recorder = open_tracked()
    for start, told in enumerate([data("a"), data("a"), data("slow", 0), data("b")]):
        tell(recorder, start, start + 1, datasets=told)
    recorder.close()
    (run,) = server.runs.values()
    assert [info.digest for info in run.datasets] == ["a", "b"]


def test_nodes_are_shown_once_in_ten_seconds_and_not_kept_for_a_server_that_is_away(
    server: Server, open_tracked: Any, tell: Any
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
    recorder = open_tracked()
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
