"""A run told to a recorder as workers would, and what a real MLflow has of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.names import Event
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.sinks import SinkPlan, plan_sinks
from samestep.telemetry.tracking_file import read_tracked

JOB = {"workload": "digits:Digits", "batch_size": 8, "shards": 2, "max_steps": 100}
NO_METRICS = {"enabled": False}
NUMERICS = {"binding": {"torch": "2.13"}, "informational": {}}


class Story:
    """A run whose values depend on the step alone, told to a recorder as workers would."""

    def __init__(self, folder: Path, name: str = "a", **fields: Any) -> None:
        self.spec: JobSpec = parse_spec(
            {**JOB, "metrics": NO_METRICS, "storage": str(folder / "runs"), **fields}
        )
        self.name = name
        self.uri = str(folder / "runs" / name)
        self.messages: list[str] = []
        self.recorder: Any = None
        self.attempt = self.sequence = 0

    def plan(self) -> SinkPlan:
        return plan_sinks(self.spec, self.uri, workload_folder=Path(__file__).parent, environ={})

    def open(self) -> None:
        plan = self.plan()
        self.recorder = Recorder(
            self.uri,
            run=self.name,
            spec_yaml=dump_spec(self.spec),
            sinks=plan.make(),
            about=plan.about,
        )
        self.seen = 0

    def begin(self, start_step: int, workers: int = 2) -> None:
        info = {"start_step": start_step, "mode": "ddp", "world_size": workers}
        self.attempt = self.recorder.begin_attempt({**info, "numerics": NUMERICS})
        self.sequence = 0

    def steps(self, start: int, stop: int) -> None:
        self.push([step_record(step).to_json() for step in range(start, stop)])

    def push(self, records: list[dict[str, Any]]) -> None:
        self.sequence += 1
        self.recorder.push(self.attempt, "0", self.sequence, records)

    def evaluate(self, step: int) -> None:
        fields = {"metrics": {"accuracy": step / 100}, "samples": 5}
        event = EventRecord(
            event=Event.EVALUATION, step=step, attempt=self.attempt, time=5.0 + step, fields=fields
        )
        self.push([event.to_json()])

    def finish(self, status: str = "done", step: int = 0) -> None:
        result = {"status": status, "step": step, "digest": "d" * 64, "message": ""}
        self.recorder.finish(self.attempt, {**result, "evaluation": None, "exit_status": 0})

    def heard(self) -> list[str]:
        status = self.recorder.status(self.seen)
        self.seen = max([self.seen, *(item["number"] for item in status["messages"])])
        self.messages += [item["text"] for item in status["messages"]]
        return self.messages

    def num_delivered(self) -> int:
        tracked = read_tracked(Storage.at(self.uri))
        return tracked.next_step if tracked else 0


MakeStory = Callable[..., Story]


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        samples=8,
        loss=1.0 / (step + 3),
        shard_losses=[0.1, None],
        shard_weights=[8.0, None],
        grad_norm=0.5,
        lr=[0.1, 0.2],
        ids=f"{step:032x}",
        metrics={"accuracy": step / 100, "a+b": float("nan")},
        timing={"step_s": 0.01, "data_wait_s": 0.001},
    )


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))


def only_run(uri: str) -> Any:
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("samestep")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
