from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.exact.digest import ids_digest
from samestep.exact.order import EpochOrder, Order
from samestep.names import Event
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord, StepRecord

MakeRun = Callable[..., Storage]
DATASET_SIZE = 20
JOB = {"workload": "shapes:Shapes", "batch_size": 8, "shards": 2, "max_steps": 100}


def numerics(torch_version: str = "2.13") -> dict[str, dict[str, str]]:
    return {"binding": {"torch": torch_version}, "informational": {"cpu": "some"}}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Lets a recorder write a run; values depend on the step alone, but for what is given.

    Options: `num_steps`; `loss_at` {step: loss}; `shift` added to every loss; `torch_version`;
    `evaluation` {steps taken: accuracy}; `checkpoints` {steps taken: value of the weights};
    `epoch_order` of the workload's own; `result` written at the end; other names are fields of
    the job.
    """

    def make(
        name: str,
        *,
        num_steps: int = 6,
        loss_at: dict[int, float] | None = None,
        shift: float = 0.0,
        torch_version: str = "2.13",
        evaluation: dict[int, float] | None = None,
        checkpoints: dict[int, float] | None = None,
        epoch_order: EpochOrder | None = None,
        result: dict[str, object] | None = None,
        **job: object,
    ) -> Storage:
        spec = parse_spec({**JOB, **job})
        run = Storage.at(str(tmp_path / "runs" / name))
        recorder = Recorder(run.uri, run=name, spec_yaml=dump_spec(spec), lease=False)
        info = {"start_step": 0, "mode": "ddp", "world_size": 2, "total_steps": 100}
        attempt = recorder.begin_attempt(
            {
                **info,
                "numerics": numerics(torch_version),
                "dataset_size": DATASET_SIZE,
                "custom_order": epoch_order is not None,
            }
        )
        order = Order(
            dataset_size=DATASET_SIZE,
            batch_size=spec.batch_size,
            shards=spec.shards,
            drop_last=spec.drop_last,
            seed=spec.seed,
            epoch_order=epoch_order,
        )
        records = []
        for step in range(num_steps):
            loss = (loss_at or {}).get(step, 1.0 / (step + 3)) + shift
            ids = order.step_ids(step)
            record = StepRecord(
                step=step,
                epoch=order.epoch_of(step),
                samples=sum(map(len, ids)),
                loss=loss,
                shard_losses=[loss, loss],
                shard_weights=[4.0, 4.0],
                grad_norm=0.5,
                lr=[0.1],
                ids=ids_digest(ids),
                metrics={"accuracy": 0.25},
            )
            records.append(record.to_json())
        for step, accuracy in (evaluation or {}).items():
            event = EventRecord(
                event=Event.EVALUATION,
                step=step,
                attempt=attempt,
                time=0.0,
                fields={"metrics": {"accuracy": accuracy}, "samples": 5},
            )
            records.append(event.to_json())
        recorder.push(attempt, "0", 1, records)
        for step, value in (checkpoints or {}).items():
            state = State(
                step=step,
                tensors={"model/w": torch.full((3,), value)},
                values={"extras": {}},
            )
            accuracy_then = (evaluation or {}).get(step)
            meta = CheckpointMeta(
                numerics={},
                spec={},
                created_s=0.0,
                evaluation={} if accuracy_then is None else {"accuracy": accuracy_then},
                ranking=Ranking.of(spec.checkpoint.best),
            )
            recorder.commit(attempt, write_files(run, state, meta).to_json(), 9)
        if result is not None:
            recorder.finish(attempt, result)
        return run

    return make
