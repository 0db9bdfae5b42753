"""Makes bundles as a worker does, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kept_shapes import Points, Shapes

from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.engine.bundling import Bundling, Copied, Material
from samestep.engine.feed import Fetcher
from samestep.engine.rereading import Rereading
from samestep.engine.survivor import HELD_KEY, Rest, Stage
from samestep.exact.order import Order
from samestep.incidents.bundle import StateSource, folder_of
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.link import InProcess
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord

JOB = {"workload": "kept_shapes:Shapes", "batch_size": 6, "shards": 2, "max_steps": 100}
NUMERICS = {"binding": {"torch": torch.__version__}, "informational": {}}
STATE_STEP, STEP = 2, 3
WAIT_S = 30.0


def order(spec: JobSpec) -> Order:
    return Order(
        dataset_size=len(Points()),
        batch_size=spec.batch_size,
        shards=spec.shards,
        drop_last=False,
        seed=spec.seed,
    )


def state() -> State:
    rest = Rest(stage=Stage.SETTLED, begun=True, values={"loss": float("nan"), "lr": (0.1,)})
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).T
    return State(
        step=STATE_STEP,
        tensors={"model/w": weight, "model/b": torch.zeros(2, dtype=torch.bfloat16)},
        values={"model": {}, "extras": {HELD_KEY: rest.to_extras(), "nominal_weight": 3.0}},
    )


def record(step: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "samples": 6,
        "loss": 0.1 * step,
        "shard_losses": [0.1, None],
        "shard_weights": [3.0, None],
        "grad_norm": float("nan"),
        "lr": [0.1],
        "ids": "0" * 32,
        "metrics": {"accuracy": 0.5},
    }
    return StepRecord(**{**fields, **changes})


def make_bundle(
    folder: Path,
    *,
    spoil: Callable[[int], None] = lambda index: None,
    message: str = "boom",
    **job: Any,
) -> Storage:
    """The folder of a bundle as a worker writes it, of step 3, with the state after 2 steps."""
    spec = parse_spec({**JOB, **job})
    run = Storage.at(str(folder))
    recorder = Recorder(run.uri, run="r", spec_yaml=dump_spec(spec), lease=False)
    info = {"start_step": 0, "mode": "local", "world_size": 1, "numerics": NUMERICS}
    attempt = recorder.begin_attempt(info)
    recorder.push(attempt, "0", 1, [record(step).to_json() for step in range(STEP)])
    incident = Incident(
        kind=IncidentKind.EXCEPTION,
        step=STEP,
        attempt=attempt,
        message=message,
        seen={"phase": "forward"},
        traceback="Traceback ...",
    )
    incident_id = recorder.record_incident(attempt, incident.to_json())
    token = recorder.claim_bundle(incident_id)["token"]
    workload = Shapes(spoil)
    reading = Rereading(
        Fetcher(workload, workload.data(), spec.seed),
        order(spec).shards_of,
        [STEP, STATE_STEP],
        max_bytes=1 << 20,
        redact=str,
    )
    material = Material(
        incident=Incident(**{**vars(incident), "id": incident_id}),
        token=token,
        spec=spec,
        copied=Copied(state()),
        source=StateSource.SNAPSHOT,
        samples=reading,
        record=record(STEP),
        records=[record(STEP - 1).to_json()],
        numerics=NUMERICS,
        module=Path(__file__).with_name("kept_shapes.py"),
    )
    bundling = Bundling(material, run=run, target=InProcess(recorder))
    assert bundling.wait(WAIT_S)
    recorder.close()
    return folder_of(run, incident_id)
