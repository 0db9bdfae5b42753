from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from cases import Base, Rows
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from samestep.engine.devices import gpu_loads, memory, physical_index
from samestep.engine.feed import Feed, Fetched
from samestep.exact.order import Order


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Batch:
    pairs: list[Pair]
    more: dict[str, Any]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each tensor that is pinned begins with; without a GPU none can be."""
    found: list[float] = []

    def pin(tensor: Tensor) -> Tensor:
        found.append(float(tensor.flatten()[0]))
        return tensor + 0.5

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return found


def test_every_tensor_of_a_batch_of_any_type_is_pinned_by_the_loaders_thread(
    pinned: list[float],
) -> None:
    one, two, three = (torch.full((2,), float(n)) for n in (1, 2, 3))
    made = Fetched(batch=Batch(pairs=[Pair(one, two)], more={"z": three, "name": "a"}))
    found = pin_memory(made).batch
    assert pinned == [1, 2, 3]
    assert isinstance(found, Batch)
    assert isinstance(found.pairs[0], Pair)
    assert found.pairs[0].y.tolist() == [2.5, 2.5]
    assert found.more["z"].tolist() == [3.5, 3.5]
    assert found.more["name"] == "a"


@pytest.mark.parametrize("pins", [True, False])
def test_a_batch_is_pinned_without_loader_processes_too(pinned: list[float], pins: bool) -> None:
    order = Order(dataset_size=4, batch_size=4, shards=1, drop_last=False, seed=0)
    feed = Feed(
        workload=Base(), dataset=Rows(4, (2,)), order=order, turns=[0], seed=0,
        start_step=0, end_step=1, loader_processes=0, pin_memory=pins,
    )  # fmt: skip
    feed.take(order.shards_of(0)[0], torch.device("cpu"))
    assert len(pinned) == 2 * int(pins)


@pytest.mark.parametrize(
    ("index", "visible", "number"),
    [
        (0, None, 0),
        (1, "", 1),
        (0, "3", 3),
        (1, "6, 2", 2),
        (0, "GPU-5a1b", 0),  # by UUID: which number that is only the driver knows
        (4, "6,2", 4),
    ],
)
def test_a_device_has_the_number_that_its_machine_gives_it(
    index: int, visible: str | None, number: int
) -> None:
    assert physical_index(index, visible) == number


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    device = torch.device("cpu")
    assert memory(device) == (0, 0)
    assert gpu_loads([device]) == []
