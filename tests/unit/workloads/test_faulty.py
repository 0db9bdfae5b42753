from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import WorkloadError

Load = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]

# Goes through the steps of the job as a worker would that owns some of the shards.
WORKER = """
import json, sys
import numpy as np, torch
from pathlib import Path
from samestep.workload import load_workload

args, shards, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
faulty = load_workload("faulty:Faulty", args, [Path("workloads/faulty")])
model, data = faulty.model(), faulty.data()
for step in range(steps):
    faulty.before_step(model, step)
    parts = np.array_split(faulty.ids_of(step), 4)
    for shard in shards:
        faulty.loss(model, faulty.collate([data[int(i)] for i in parts[shard]]))
    print("step", step, flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a process that takes steps on the given shards of four."""

    def start(shards: list[int], steps: int = 4, **args: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": "platform", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(args), json.dumps(shards), str(steps)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_a_crash_kills_the_process_at_its_step_and_only_once(
    worker: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    args = {"crash_at": 2, "marker": str(tmp_path)}
    first = worker([0, 1], **args)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    assert [line for line in out.splitlines() if line.startswith("step")] == ["step 0", "step 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["crash-2"]

    second = worker([0, 1], **args)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert "step 3" in out


def test_a_hang_stops_the_process_and_leaves_it_alive(
    worker: Callable[..., subprocess.Popen[str]],
) -> None:
    with worker([0], hang_at=1) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "step 0\n"
            assert process.stdout.readline().startswith("faulty: hang at step 1")
            ready, _, _ = select.select([process.stdout], [], [], 0.5)
            assert not ready
            assert process.poll() is None
        finally:
            process.kill()


def test_only_the_worker_that_holds_the_sample_is_hit(load: Load) -> None:
    for position, hit in [(0, 0), (4, 1), (11, 2), (15, 3)]:
        _, faulty = load("faulty", raise_at=3, position=position)
        assert shards_that_raise(faulty, step=3) == [hit]
        assert shards_that_raise(faulty, step=2) == []


def test_in_a_short_batch_the_last_sample_stands_in_for_the_position(load: Load) -> None:
    _, faulty = load("faulty", raise_at=15, position=15)
    assert len(faulty.ids_of(15)) == 10
    assert shards_that_raise(faulty, step=15) == [3]


def test_faults_come_at_each_of_several_steps(load: Load, tmp_path: Path) -> None:
    _, faulty = load("faulty", raise_at=[1, 3], marker=str(tmp_path))
    assert [step for step in range(5) if shards_that_raise(faulty, step=step)] == [1, 3]
    assert [step for step in range(5) if shards_that_raise(faulty, step=step)] == []


def test_without_a_marker_a_fault_strikes_every_time(load: Load) -> None:
    _, faulty = load("faulty", raise_at=1)
    assert shards_that_raise(faulty, step=1) == [0]
    assert shards_that_raise(faulty, step=1) == [0]


def test_an_error_names_the_step_and_the_argument(load: Load) -> None:
    _, faulty = load("faulty", raise_at=1)
    with pytest.raises(RuntimeError, match=r"raises at step 1, as args\.raise_at says"):
        shard_loss(faulty, step=1, shard=0)


def test_nan_spoils_loss_and_gradients_of_one_shard_each_time(load: Load, tmp_path: Path) -> None:
    _, faulty = load("faulty", nan_at=1, marker=str(tmp_path))
    model = faulty.model()
    for _ in range(2):
        losses = [shard_loss(faulty, step=1, shard=shard, model=model) for shard in range(4)]
        assert [math.isnan(loss.value.item()) for loss in losses] == [True, False, False, False]
    losses[0].value.backward()
    assert all(bool(p.grad.isnan().any()) for p in model.parameters())
    assert not math.isnan(shard_loss(faulty, step=2, shard=0).value.item())


def test_a_flipped_bit_is_in_the_gradient_once_and_nowhere_else(load: Load, tmp_path: Path) -> None:
    _, faulty = load("faulty", flip_at=1, dropout=0.0, marker=str(tmp_path))
    model = faulty.model()

    def gradients() -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        loss = shard_loss(faulty, step=1, shard=0, model=model).value
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()]

    (loss, wrong), (same_loss, right) = gradients(), gradients()
    assert loss == same_loss
    differing = [not torch.equal(a, b) for a, b in zip(wrong, right, strict=True)]
    assert any(differing)
    assert all(torch.allclose(a, b) for a, b in zip(wrong, right, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients()[1], right, strict=True))


def test_memory_grows_by_the_step_up_to_the_limit_and_in_one_worker_only(load: Load) -> None:
    limits = {"grow_bytes": 1000, "grow_limit_bytes": 2500}
    workers = [load("faulty", grow_at=1, **limits)[1] for _ in range(2)]
    taken = []
    for step in range(5):
        for shard, faulty in enumerate(workers):
            shard_loss(faulty, step=step, shard=shard)
        taken.append([sum(map(len, faulty.taken)) for faulty in workers])
    assert taken == [[0, 0], [1000, 0], [2000, 0], [2500, 0], [2500, 0]]


def test_a_loss_outside_a_step_brings_no_fault(load: Load) -> None:
    _, faulty = load("faulty", raise_at=0)
    data = faulty.data()
    faulty.loss(faulty.model(), faulty.collate([data[i] for i in range(250)]))


def test_every_epoch_has_another_order_that_holds_each_sample_once(load: Load) -> None:
    _, faulty = load("faulty")
    orders = [faulty.order(epoch, torch.Generator()).tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(250))
    assert [sample for step in range(16, 32) for sample in faulty.ids_of(step)] == orders[1]


def test_items_are_functions_of_the_index(load: Load) -> None:
    _, faulty = load("faulty")
    item = faulty.data()[3]
    assert int(item["index"]) == 3
    assert item["x"].dtype == item["y"].dtype == torch.float32
    assert item["x"].tolist() == pytest.approx([math.sin(0.37 * 3 * k) for k in range(1, 9)])
    batch = faulty.collate([faulty.data()[i] for i in range(3)])
    for name, dims in type(faulty).dimensions.items():
        assert batch[name].shape == tuple(3 if dim is None else dim for dim in dims)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"position": 16}, r"position must be in 0\.\.15, got 16"),
        ({"crash_at": -1}, "crash_at takes a step"),
        ({"hang_at": ["2"]}, "hang_at takes a step"),
        ({"flip_at": 3}, "flip_at needs a marker"),
        ({"marker": "runs/marker"}, "marker must be an absolute path"),
    ],
)
def test_bad_arguments_are_refused(load: Load, args: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load("faulty", **args)


def test_the_calm_job_trains_and_evaluates(
    load: Load, train_plainly: Callable[..., Any], evaluate_plainly: Callable[..., Any]
) -> None:
    spec, faulty = load("faulty")
    assert spec.args["batch_size"] == spec.batch_size
    model, losses = train_plainly(spec, faulty)
    assert len(losses) == 4 * 16
    assert losses[-1] < losses[0] / 5
    assert evaluate_plainly(faulty, model)["squared_error"] < 0.1


def shard_loss(faulty: Any, *, step: int, shard: int, model: Any = None) -> Any:
    model = model or faulty.model()
    data = faulty.data()
    faulty.before_step(model, step)
    part = np.array_split(faulty.ids_of(step), 4)[shard]
    return faulty.loss(model, faulty.collate([data[int(i)] for i in part]))


def shards_that_raise(faulty: Any, *, step: int) -> list[int]:
    hit = []
    for shard in range(4):
        try:
            shard_loss(faulty, step=step, shard=shard)
        except RuntimeError:
            hit.append(shard)
    return hit
