"""An MLflow that keeps in memory what runs send, and refuses what it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.mlflow_client import Point, TrackingError
from samestep.telemetry.recorder import Recorder

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


def finish(recorder: Recorder, attempt: int, status: str) -> None:
    result = {"status": status, "step": 3, "digest": "d", "evaluation": None, "message": "why"}
    recorder.finish(attempt, result)
    recorder.close()


def texts_of(recorder: Recorder) -> list[str]:
    return [item["text"] for item in recorder.status()["messages"]]
