"""Python state that a forward changes is found and named."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.engine.suspects import changes, take_snapshot


@dataclass
class Inner:
    seen: dict[str, int] = field(default_factory=dict)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.alias = [self.linear.weight, self.steps]
        self.calls = 0
        self.history: list[Any] = [1, {"a": (2.5, "text")}]
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.names = {"b", "a"}
        self.cache: Tensor | None = None
        self.table = np.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.old_numpy = np.random.RandomState(1)
        self.python = random.Random(1)
        self.inner = Inner()
        self.callback = len


def count(layer: Layer) -> None:
    layer.calls += 1


def append(layer: Layer) -> None:
    layer.history[1]["a"] = (2.5, "other")


def rotate(layer: Layer) -> None:
    layer.recent.append(3)


def add_name(layer: Layer) -> None:
    layer.names.add("c")


def fill_cache(layer: Layer) -> None:
    layer.cache = torch.ones(2)


def write_table(layer: Layer) -> None:
    layer.table[1] = 5


def draw_torch(layer: Layer) -> None:
    torch.rand(1, generator=layer.generator)


def draw_numpy(layer: Layer) -> None:
    layer.numpy.random()


def draw_old_numpy(layer: Layer) -> None:
    layer.old_numpy.rand()


def draw_python(layer: Layer) -> None:
    layer.python.random()


def deep(layer: Layer) -> None:
    layer.inner.seen["x"] = 1


def new_attribute(layer: Layer) -> None:
    layer.extra = "new"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (count, "model.0.calls"),
        (append, "model.0.history.1.a.1"),
        (rotate, "model.0.recent.0"),
        (add_name, "model.0.names"),
        (fill_cache, "model.0.cache"),
        (write_table, "model.0.table"),
        (draw_torch, "model.0.generator"),
        (draw_numpy, "model.0.numpy"),
        (draw_old_numpy, "model.0.old_numpy"),
        (draw_python, "model.0.python"),
        (deep, "model.0.inner.seen.x"),
        (new_attribute, "model.0.extra"),
    ],
)
def test_a_changed_attribute_is_named(change: Callable[[Layer], None], path: str) -> None:
    layer = Layer()
    roots = {"model": nn.Sequential(layer)}
    before = take_snapshot(roots)
    change(layer)
    assert path in changes(before, take_snapshot(roots))


def test_parameters_buffers_and_other_names_for_them_are_left_out() -> None:
    layer = Layer()
    before = take_snapshot({"model": layer})
    with torch.no_grad():
        layer.linear.weight.add_(1)
        layer.steps.add_(1)
    layer.train(False)
    assert changes(before, take_snapshot({"model": layer})) == {}


def test_a_change_tells_both_values() -> None:
    layer = Layer()
    before = take_snapshot({"model": layer})
    layer.calls = 7
    assert changes(before, take_snapshot({"model": layer})) == {"model.calls": "0 became 7"}


def test_private_generators_are_found_by_kind() -> None:
    assert take_snapshot({"model": Layer()}).generators == {
        "model.generator": "torch._C.Generator",
        "model.numpy": "numpy.random._generator.Generator",
        "model.old_numpy": "numpy.random.mtrand.RandomState",
        "model.python": "random.Random",
    }


def test_objects_that_hold_themselves_and_long_lists_come_to_an_end() -> None:
    layer = Layer()
    layer.history = [layer.history, list(range(100_000))]
    layer.history.append(layer.history)
    assert len(take_snapshot({"model": layer}).values) < 2000
