"""What a workload's code does to the process around it: refused, told, or put right."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from attempts import Train, everywhere
from pool import spec_of
from torch import Tensor, nn

from samestep import parse_spec
from samestep.checkpoint.state import Parts
from samestep.engine.batch import map_tensors
from samestep.engine.shard import metric_sums
from samestep.engine.update import apply_update, make_scaler
from samestep.errors import WorkloadError


def meddling(deed: str) -> dict[str, Any]:
    return spec_of("stories:Meddling", args={"size": 8, "deed": deed}, batch_size=4, max_steps=6)


@pytest.mark.parametrize(
    ("deed", "kind", "message"),
    [
        ("threads", "NotExactError:2", r"this thread has 3 intra-op threads.*set threads in"),
        ("nondeterministic", "NotExactError:2", r"use_deterministic_algorithms off"),
        ("exit", "UserCodeError:1", r"loss of step 1, shard 0 raised SystemExit"),
        ("weight", "WorkloadError:2", r"returned the weight tensor.*\(step 1, shard 0\)"),
    ],
)
def test_what_would_change_bits_or_end_the_process_is_told_with_its_step(
    train: Train, deed: str, kind: str, message: str
) -> None:
    run = train(meddling(deed), "run", 1)
    assert run.verdict["kind"] == kind
    assert re.search(message, run.verdict["message"], re.DOTALL)


def test_a_mode_that_forward_switches_is_put_back_before_every_shard(train: Train) -> None:
    runs = everywhere(train, meddling("mode"))
    assert [step.step for step in runs[0].steps()] == list(range(6))


def test_a_state_that_grows_in_the_first_forward_is_refused_before_step_0(train: Train) -> None:
    spec = spec_of("stories:Growing", args={"size": 8}, batch_size=4, shards=2, max_steps=2)
    run = train(spec, "run", 1)
    assert run.verdict["kind"] == "WorkloadError:2"
    assert "model/seen" in run.verdict["message"]
    assert run.steps() == []


def test_parameters_outside_the_optimizer_count_neither_for_the_norm_nor_for_clipping() -> None:
    spec = parse_spec(
        {
            "workload": "a:B",
            "batch_size": 1,
            "epochs": 1,
            "precision": "fp16",
            "clip_norm": 1.0,
            "scaler": {"init_scale": 1024.0},
        }
    )
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    optimizer = torch.optim.SGD([model[0]], lr=1.0)
    device = torch.device("cpu")
    parts = Parts(model=model, optimizer=optimizer, scaler=make_scaler(spec, device))
    model[0].grad, model[1].grad = torch.full((1,), 512.0), torch.full((1,), 1e6)
    updated = apply_update(spec, parts, list(model), step=0, device=device)
    assert updated.grad_norm == 0.5
    assert model[0].item() == -0.5


def test_an_overflow_is_known_even_where_the_scale_can_not_fall_further() -> None:
    spec = parse_spec(
        {
            "workload": "a:B",
            "batch_size": 1,
            "epochs": 1,
            "precision": "fp16",
            "scaler": {"init_scale": 1e-45},
        }
    )
    model = nn.ParameterList([torch.zeros(1)])
    device = torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = Parts(model=model, optimizer=optimizer, scaler=make_scaler(spec, device))
    for step in range(3):
        model[0].grad = torch.full((1,), float("nan"))
        assert apply_update(spec, parts, list(model), step=step, device=device).skipped
    assert model[0].item() == 0.0


class Point(NamedTuple):
    x: Tensor
    y: Any


class Marked(Point):
    """Its constructor takes something else than its values."""

    def __new__(cls, x: Tensor) -> Marked:
        made = super().__new__(cls, x, "y")
        made.tag = "t"
        return made


class Frozen(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_tuples_and_mappings_that_can_not_be_written_to_are_made_anew() -> None:
    x = torch.ones(2, 2)
    batch = {
        "shape": x.shape,
        "largest": torch.max(x, dim=1),
        "time": time.gmtime(0),
        "marked": Marked(x),
        "frozen": Frozen({"x": x}),
    }
    made = map_tensors(batch, lambda tensor: tensor + 1)
    assert {name: type(value) for name, value in made.items()} == {
        name: type(value) for name, value in batch.items()
    }
    assert made["shape"] is x.shape or made["shape"] == (2, 2)
    assert made["largest"].values.tolist() == [2.0, 2.0]
    assert made["time"] is batch["time"]
    assert (made["marked"].x.tolist(), made["marked"].y) == ([[2.0] * 2] * 2, "y")
    assert made["marked"].tag == "t"
    assert made["frozen"]["x"].tolist() == [[2.0] * 2] * 2


def test_a_type_that_can_not_be_made_anew_is_named() -> None:
    class Odd(Frozen):
        def __init__(self, a: int, b: int) -> None:
            super().__init__({"x": torch.ones(1)})

    with pytest.raises(WorkloadError, match=r"a batch holds a .*Odd, which can't be made anew"):
        map_tensors([Odd(1, 2)], lambda tensor: tensor + 1)


@pytest.mark.parametrize(
    ("values", "total"),
    [([math.inf, -math.inf, 1.0], math.nan), ([1e308, 1e308, -1e308], 1e308)],
)
def test_infinities_of_both_signs_in_a_metric_are_no_error(
    values: list[float], total: float
) -> None:
    sums = metric_sums({"m": torch.tensor(values, dtype=torch.float64)}, 3.0, "here")
    assert sums["m"] == pytest.approx((total, 3.0), nan_ok=True)


def test_sequences_and_mappings_of_any_constructor_keep_their_type() -> None:
    class Tagged(list[Any]):
        def __init__(self, tag: str, values: list[Any]) -> None:
            super().__init__(values)
            self.tag = tag

    batch = Tagged("t", [torch.ones(2), MappingProxyType({"a": torch.ones(1)})])
    made = map_tensors(batch, lambda tensor: tensor + 1)
    assert (type(made), made.tag) == (Tagged, "t")
    assert made[0].tolist() == [2.0, 2.0]
    assert type(made[1]) is MappingProxyType
    assert made[1]["a"].tolist() == [2.0]
    assert batch[0].tolist() == [1.0, 1.0]
