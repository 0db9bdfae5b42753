from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.mlflow_sink import MlflowSink
from samestep.telemetry.prometheus_sink import PrometheusSink
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_mlflow import JOB, URI, Server
from pages import SPEC, Open
from recording import job

MakeStep = Callable[..., StepRecord]


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


@pytest.fixture
def make_step() -> MakeStep:
    """Builds a step record; the values depend on the step alone, unless given."""

    def make(step: int, **changes: Any) -> StepRecord:
        fields: dict[str, Any] = {
            "step": step,
            "epoch": step // 10,
            "samples": 8,
            "loss": 1.0 / (step + 3),
            "shard_losses": [0.1 * step, None],
            "shard_weights": [8.0, None],
            "grad_norm": 0.5,
            "lr": [0.1],
            "ids": f"{step:032x}",
            "metrics": {"accuracy": step / 100},
            "timing": {"step_s": 0.01},
        }
        return StepRecord(**{**fields, **changes})

    return make


@pytest.fixture
def open_recorder(run: Storage) -> Iterator[Callable[..., Recorder]]:
    """Opens recorders of `run` without a lease, as one after another would; closes them all."""
    opened: list[Recorder] = []

    def open_one(*, lease: bool = False, **changes: object) -> Recorder:
        recorder = Recorder(run.uri, run="r", spec_yaml=job(**changes), lease=lease)
        opened.append(recorder)
        return recorder

    yield open_one
    for recorder in opened:
        recorder.close()


@pytest.fixture
def recorder(open_recorder: Callable[..., Recorder]) -> Recorder:
    return open_recorder()


@pytest.fixture
def push(make_step: MakeStep) -> Callable[..., dict[str, Any]]:
    """Sends steps `first` to `last` as one batch."""

    def send(
        recorder: Recorder,
        attempt: int,
        sequence: int,
        first: int,
        last: int,
        **changes: Any,
    ) -> dict[str, Any]:
        records = [make_step(step, **changes).to_json() for step in range(first, last + 1)]
        return recorder.push(attempt, "0", sequence, records)

    return send


@pytest.fixture
def open_page(run: Storage) -> Iterator[Open]:
    """Opens recorders with a page; closes them all."""
    opened: list[Recorder] = []

    def make(run: Storage = run, name: str = "r", **options: Any) -> Any:
        sink = PrometheusSink(**{"host": "127.0.0.1", "port": 0, "interval_s": 0.0, **options})
        recorder = Recorder(run.uri, run=name, spec_yaml=dump_spec(SPEC), sinks=[sink])
        opened.append(recorder)
        return recorder, sink

    yield make
    for recorder in opened:
        recorder.close()


@pytest.fixture
def tell_steps(make_step: Callable[..., StepRecord]) -> Callable[..., int]:
    """Begins an attempt that takes steps, and waits until the sinks have them."""

    def steps(recorder: Recorder, start: int, stop: int, source: str = "", **changes: Any) -> int:
        info = {"start_step": start, "mode": "ddp", "world_size": 2, "source": source}
        attempt = recorder.begin_attempt(info)
        records = [make_step(step, **changes).to_json() for step in range(start, stop)]
        recorder.push(attempt, "0", 1, records)
        recorder.drain()
        return attempt

    return steps


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def open_tracked(run: Storage, server: Server) -> Callable[..., Recorder]:
    """Opens recorders of `run` that deliver to `server`."""

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
    """Tells a recorder of an attempt and its steps; gives the attempt's number."""

    def steps(recorder: Recorder, start: int, stop: int, **info: Any) -> int:
        known = {"start_step": start, "mode": "ddp", "world_size": 2, **info}
        attempt = recorder.begin_attempt(known)
        recorder.push(attempt, "0", 1, [make_step(s).to_json() for s in range(start, stop)])
        return attempt

    return steps
