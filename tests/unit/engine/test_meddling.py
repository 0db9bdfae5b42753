"""What a workload's code does to the process around it: refused, told, or put right."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import pytest
import torch
from attempts import Train, everywhere
from pool import spec_of
from torch import nn

from samestep import parse_spec
from samestep.checkpoint.state import Parts
from samestep.engine.batch import map_tensors
from samestep.engine.update import apply_update, make_scaler


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
