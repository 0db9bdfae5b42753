from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import DivergenceError, InputError, WorkloadError
from samestep.replay.samples import samples_of_step
from samestep.telemetry.ledger import LedgerWriter, steps

MakeRun = Callable[..., Storage]


def test_an_epoch_takes_every_sample_once(make_run: MakeRun) -> None:
    run = make_run("a")
    epoch = [samples_of_step(run, step) for step in range(3)]
    ids = [index for step in epoch for shard in step.shards for index in shard]
    assert sorted(ids) == list(range(20))
    assert [len(step.shards) for step in epoch] == [2, 2, 2]
    assert [[len(shard) for shard in step.shards] for step in epoch] == [[4, 4], [4, 4], [2, 2]]
    assert samples_of_step(run, 3).epoch == 1


def test_a_step_that_was_not_taken_is_refused_with_those_that_were(make_run: MakeRun) -> None:
    with pytest.raises(InputError, match="has no step 6; it holds steps 0 to 5"):
        samples_of_step(make_run("a"), 6)


def test_what_the_ledger_does_not_confirm_is_not_told(make_run: MakeRun) -> None:
    run = make_run("a")
    altered = steps(run)[2].to_json() | {"ids": "0" * 32}
    LedgerWriter(run).append([altered])
    with pytest.raises(DivergenceError, match="sample ids of step 2"):
        samples_of_step(run, 2)


SHAPES = """
import torch
import samestep

class Shapes(samestep.Workload):
    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        self.last = 19
        return list(range(20))

    def loss(self, model, batch):
        return model(batch).mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def order(self, epoch, generator):
        return [(self.last - index + epoch) % 20 for index in range(20)]
"""


def test_an_order_of_the_workloads_own_is_asked_from_the_workload(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_order_shapes.py").write_text(SHAPES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = make_run(
        "a",
        workload="own_order_shapes:Shapes",
        epoch_order=lambda epoch, _: [(19 - index + epoch) % 20 for index in range(20)],
    )
    try:
        assert samples_of_step(run, 0, search=[tmp_path]).shards == [
            [19, 18, 17, 16],
            [15, 14, 13, 12],
        ]
        assert samples_of_step(run, 3, search=[tmp_path]).shards[0] == [0, 19, 18, 17]
    finally:
        sys.modules.pop("own_order_shapes", None)


def test_without_the_workload_its_own_order_cannot_be_told(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = make_run("a", workload="nowhere:Shapes", epoch_order=lambda *_: range(20))
    with pytest.raises(WorkloadError, match="no module 'nowhere'"):
        samples_of_step(run, 0, search=[tmp_path])
