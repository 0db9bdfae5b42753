"""The final model as MLflow keeps it: packed in the run, loaded as its users load it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.checkpoint.storage import Storage
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.mlflow_model import example_of, model_keeper, pack_model

pytestmark = [
    pytest.mark.timeout(300),
    # torch.export and MLflow's loaders use what torch has marked as old.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CODE = """
from torch import nn


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, first, *, second):
        return {"sum": self.layer(first) + second, "note": "text"}
"""


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


@pytest.fixture
def named(tmp_path: Path) -> Iterator[tuple[nn.Module, Path]]:
    """A model of a module that lies beside a job, as a workload's does."""
    path = tmp_path / "named_model.py"
    path.write_text(CODE)
    sys.path.insert(0, str(tmp_path))
    try:
        import named_model

        yield named_model.Named(), path
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("named_model", None)


def load(run: Storage) -> Any:
    load_mlflow()
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(f"{run.uri}/model")


def test_a_model_of_one_tensor_is_a_graph_that_needs_no_code_and_takes_any_batch(
    run: Storage,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    pack_model(run, model, lambda: model(torch.randn(5, 3)))
    loaded = load(run)
    assert [spec.shape for spec in loaded.metadata.signature.inputs.inputs] == [(-1, 3)]
    assert [spec.shape for spec in loaded.metadata.signature.outputs.inputs] == [(-1, 2)]
    inputs = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    expected = model.eval()(torch.from_numpy(inputs)).detach().numpy()
    np.testing.assert_allclose(loaded.predict(inputs), expected, rtol=1e-5)
    assert [name for name in run.walk("model") if name.endswith(".pth")] == []


def test_a_model_of_named_arguments_is_pickled_with_its_file_beside(
    run: Storage, named: tuple[nn.Module, Path]
) -> None:
    model, path = named
    first, second = torch.randn(2, 3), torch.randn(2, 2)
    pack_model(run, model, lambda: model(first, second=second), code=[path])
    load_mlflow()
    from mlflow.models import Model

    signature = Model.load(f"{run.uri}/model/MLmodel").signature
    assert {spec.name for spec in signature.inputs.inputs} == {"first", "second"}
    assert {spec.name for spec in signature.outputs.inputs} == {"sum"}
    assert "model/code/named_model.py" in run.walk("model")


def test_looking_at_a_model_changes_nothing_of_it_or_of_any_generator() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()

    def use() -> None:
        random.random()
        model(torch.randn(2, 3))
        model(torch.randn(6, 3))

    example = example_of(model, use)
    assert example is not None
    assert example.args[0].shape == (2, 3)
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert len(model._forward_hooks) == 0


def test_a_model_that_was_not_called_has_no_signature(run: Storage) -> None:
    pack_model(run, nn.Linear(3, 2), lambda: None)
    assert load(run).metadata.signature is None


def test_a_model_that_cannot_be_packed_is_told_and_fails_nothing(run: Storage) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream = (number for number in range(3))

        def forward(self, value: Tensor) -> Tensor:
            return value

    said: list[str] = []
    model_keeper(run.uri, said.append)(Local(), lambda: None, None)
    (line,) = said
    assert line.startswith("the final model does not go to MLflow (TypeError: ")
    assert run.walk("model") == []
