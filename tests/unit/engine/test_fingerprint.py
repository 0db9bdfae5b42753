"""What is told of data: the same for the same data, and nothing of it disturbs the training."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attempts import Train
from pool import spec_of
from torch import Tensor
from torch.utils.data import Dataset

from samestep.engine.fingerprint import LIMIT_S, MAX_TENSOR_BYTES, NUM_SAMPLES, fingerprints, places
from samestep.names import Event
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.ledger import events


class Rows(Dataset[Any]):
    """Samples of several sorts, with a random transform; one may be another than before."""

    def __init__(self, size: int = 100, *, changed: int | None = None, odd: object = None) -> None:
        self.size, self.changed, self.odd = size, changed, odd
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        if isinstance(self.odd, BaseException):
            raise self.odd
        value = torch.full((3,), float(index)) + torch.rand(3) + random.random()
        array = np.arange(4) + np.random.randint(9)
        return {"x": value + (index == self.changed), "y": array, "odd": self.odd}


def told(data: Rows, size: int | None = None, **options: Any) -> DatasetInfo:
    built: Any = SimpleNamespace(
        dataset=data, dataset_size=data.size if size is None else size, evaluation=None
    )
    (found,) = fingerprints(built, **options)
    return found


def test_the_same_data_tells_the_same_and_no_generator_moves() -> None:
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate()
    data = Rows()
    first = told(data)
    assert data.read == places(100)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    torch.manual_seed(6)
    assert told(Rows()) == first
    assert (first.size, first.num_sampled, first.context) == (100, NUM_SAMPLES, "training")
    assert first.kind.endswith(".Rows")
    assert len(first.digest) == 32


def test_another_sample_or_size_tells_something_else() -> None:
    digests = {told(Rows(changed=99)).digest, told(Rows()).digest, told(Rows(101)).digest}
    assert len(digests) == 3


@pytest.mark.parametrize(
    "odd", [object(), ValueError("no such file"), SystemExit("over"), lambda: None]
)
def test_data_that_cannot_be_hashed_or_read_is_told_by_size_and_class(odd: object) -> None:
    found = told(Rows(odd=odd))
    assert found.num_sampled == 0
    assert found.digest == told(Rows(odd=object())).digest
    assert found.digest != told(Rows(50, odd=odd)).digest


def test_slow_data_is_not_read_any_further() -> None:
    data = Rows()
    assert told(data, monotonic=itertools.count(step=LIMIT_S * 0.6).__next__).num_sampled == 0
    assert len(data.read) == 1


def test_only_the_beginning_of_large_samples_is_hashed() -> None:
    class Large(Rows):
        def __getitem__(self, index: int) -> Tensor:
            value = torch.zeros(MAX_TENSOR_BYTES // 4 + 10)
            value[-1] = float(self.changed or 0)
            return value

    assert told(Large(2)) == told(Large(2, changed=7))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 10**9])
def test_the_places_are_within_the_data_and_few(size: int) -> None:
    found = places(size)
    assert found == sorted(set(found))
    assert len(found) == min(size, NUM_SAMPLES)
    assert all(0 <= place < size for place in found)


def test_an_attempt_tells_of_training_and_evaluation_data_and_takes_the_same_steps(
    train: Train, tmp_path: Path
) -> None:
    spec = spec_of("feature_cases:Scored", max_steps=2, batch_size=12)
    runs = [train(spec, f"run-{size}", world_size=size) for size in (1, 2)]
    assert runs[0].digest == runs[1].digest
    found = []
    for run in runs:
        (started,) = events(run.storage, Event.ATTEMPT_STARTED)
        found.append([DatasetInfo.from_json(data) for data in started.fields["datasets"]])
    assert found[0] == found[1]
    assert [info.context for info in found[0]] == ["training", "evaluation"]
    assert [(info.size, info.num_sampled) for info in found[0]] == [(20, NUM_SAMPLES), (7, 7)]
