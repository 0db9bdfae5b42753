"""torch.compile: the same bits, static shapes only, no prefixes, never eager unnoticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compiled_cases
import pytest
import torch
from attempts import NO_SINKS
from torch import nn

import samestep
from samestep import ExitStatus, NotExactError, parse_spec
from samestep.cluster.launch import Outcome
from samestep.engine import compiled

FOLDER = Path(__file__).resolve().parent
PLAIN_KEYS = list(compiled_cases.Net("not", {}).state_dict())

RunTask = Callable[..., Any]

# Torch's own, when it traces a module whose input has a history.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    compiled_cases.GRAPHS.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Outcome]:
    """train("a", max_steps, how=...) trains in this process under tmp_path/a."""

    def train(name: str, max_steps: int, **args: Any) -> Outcome:
        return samestep.train(
            parse_spec(spec_of(max_steps=max_steps, storage=str(tmp_path), **args)),
            name=name,
            search=[FOLDER],
        )

    return train


def spec_of(max_steps: int = 6, storage: str = "./runs", **args: Any) -> dict[str, Any]:
    return {
        "workload": "compiled_cases:Compiled",
        "args": args,
        "mode": "local",
        "batch_size": 12 if args.get("lengths", 1) == 1 else 4,
        "shards": 4 if args.get("lengths", 1) == 1 else 2,
        "max_steps": max_steps,
        "storage": storage,
        **NO_SINKS,
    }


@pytest.mark.parametrize("how", ["method", "part"])
def test_a_compiled_model_resumes_with_the_bits_of_a_straight_run(
    how: str, train: Callable[..., Outcome]
) -> None:
    straight = train("straight", 6, how=how)
    assert straight.status == "done", straight.message
    assert train("resumed", 3, how=how).status == "done"
    torch._dynamo.reset()  # as in a new process
    resumed = train("resumed", 6, how=how)
    assert resumed.digest == straight.digest != ""


@pytest.mark.parametrize("how", ["method", "wrapper", "part"])
def test_no_key_of_a_checkpoint_names_the_wrapper(how: str, train: Callable[..., Outcome]) -> None:
    outcome = train("run", 1, how=how)
    weights = samestep.load_weights(outcome.run)
    assert sorted(weights) == sorted(PLAIN_KEYS)
    compiled_cases.Net("not", {}).load_state_dict(weights, strict=True)


@pytest.mark.parametrize("how", ["method", "wrapper"])
def test_the_number_of_workers_and_devices_does_not_change_a_compiled_models_bits(
    how: str, results: RunTask
) -> None:
    spec = {**spec_of(how=how), "workers": 3}
    expected = results("engine", spec=spec, num_steps=4)[0]["steps"]
    for found in results("engine", 3, spec=spec, num_steps=4):
        assert found["steps"] == expected
    assert results("engine", spec=spec, num_steps=4, num_devices=3)[0]["steps"] == expected


@pytest.mark.parametrize(
    ("how", "dynamic"), [("method", False), ("method", None), ("wrapper", None), ("part", None)]
)
def test_every_shape_is_compiled_statically(
    how: str, dynamic: bool | None, train: Callable[..., Outcome]
) -> None:
    outcome = train("run", 6, how=how, dynamic=dynamic, backend="noting", lengths=3)
    assert outcome.status == "done", outcome.message
    # A part sees the mean over the length, so one shape; the whole model sees three.
    assert len(compiled_cases.GRAPHS) == (1 if how == "part" else 3)
    assert not any(symbol for graph in compiled_cases.GRAPHS for symbol in graph)


@pytest.mark.parametrize("how", ["method", "wrapper", "part"])
def test_a_model_compiled_for_dynamic_shapes_is_refused(
    how: str, train: Callable[..., Outcome]
) -> None:
    outcome = train("run", 6, how=how, dynamic=True)
    assert (outcome.status, outcome.exit_status) == ("failed", ExitStatus.BAD_INPUT)
    assert "compiled for dynamic shapes" in outcome.message
    assert "model.compile(dynamic=False)" in outcome.message


def test_too_many_shapes_fail_and_do_not_go_on_in_eager_mode(
    train: Callable[..., Outcome],
) -> None:
    outcome = train("run", 12, lengths=12)
    assert (outcome.status, outcome.exit_status) == ("failed", ExitStatus.BAD_INPUT)
    assert "met more shapes than torch.compile compiles a function for" in outcome.message
    assert "recompile_limit=N" in outcome.message


def test_training_puts_the_settings_of_the_compiler_back(train: Callable[..., Outcome]) -> None:
    import torch._dynamo.config as compiler

    names = ("automatic_dynamic_shapes", "fail_on_recompile_limit_hit", "suppress_errors")
    before = [getattr(compiler, name) for name in names]
    assert train("run", 1).status == "done"
    assert [getattr(compiler, name) for name in names] == before == [True, False, False]


def test_unwrapping_keeps_ties_and_what_was_compiled() -> None:
    shared = torch.compile(nn.Linear(2, 2), backend="eager")
    model = torch.compile(nn.ModuleList([shared, nn.ReLU(), shared]), backend="eager")
    bare = compiled.unwrap(model)
    assert list(bare.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert isinstance(bare, nn.ModuleList)
    assert bare[0] is bare[2]
    assert [module._compiled_call_impl is not None for module in bare] == [True, False, True]
    assert compiled.is_compiled(bare)


def test_a_model_that_was_never_compiled_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert compiled.unwrap(model) is model
    compiled.refuse_dynamic(model)
    assert not compiled.is_compiled(model)


def test_the_module_that_is_dynamic_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager", dynamic=True)
    with pytest.raises(NotExactError, match="module 1 is compiled for dynamic shapes"):
        compiled.refuse_dynamic(model)


def test_a_copy_of_a_compiled_model_is_compiled_and_has_its_own_weights() -> None:
    model = compiled_cases.Body()
    model.compile(backend=compiled_cases.noting, dynamic=False)
    twin = copy.deepcopy(model)
    compiled.compile_alike(twin, model, num_copies=2)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.fill_(1.0)
    x = torch.ones(3, 8)
    assert torch.equal(twin(x), torch.full((3, 8), 2.0))
    assert len(compiled_cases.GRAPHS) == 1
    assert not torch.equal(model(x), twin(x))
