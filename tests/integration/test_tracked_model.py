"""The final model as MLflow keeps it: packed in the run, loaded as its users load it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep import load_weights, parse_spec, train
from samestep.checkpoint.storage import Storage
from samestep.names import MODEL_DIR
from samestep.telemetry.finished import Finished
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.mlflow_model import example_of, model_keeper, pack_model
from samestep.workload import load_workload

CASES = Path(__file__).resolve().parents[1] / "unit" / "engine"

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


LOADED_BESIDE = """
import json
import sys
from pathlib import Path

import mlflow.pytorch
import torch
from mlflow.models import Model

first, second = map(torch.tensor, json.loads(Path(sys.argv[2]).read_text()))
model = mlflow.pytorch.load_model(sys.argv[1])
example = Model.load(sys.argv[1]).load_input_example(sys.argv[1])
print(json.dumps({"sum": model(first, second=second)["sum"].tolist(), "example": sorted(example)}))
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


def pack(
    run: Storage, model: nn.Module, use: Callable[[], object], code: Sequence[Path] = ()
) -> None:
    pack_model(run, MODEL_DIR, model, example_of(model, use), code=code)


def load(run: Storage) -> Any:
    load_mlflow()
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(f"{run.uri}/model")


def test_a_model_of_one_tensor_is_a_graph_that_needs_no_code_and_takes_any_batch(
    run: Storage,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    pack(run, model, lambda: model(torch.randn(5, 3)))
    loaded = load(run)
    assert [spec.shape for spec in loaded.metadata.signature.inputs.inputs] == [(-1, 3)]
    assert [spec.shape for spec in loaded.metadata.signature.outputs.inputs] == [(-1, 2)]
    inputs = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    expected = model.eval()(torch.from_numpy(inputs)).detach().numpy()
    np.testing.assert_allclose(loaded.predict(inputs), expected, rtol=1e-5)
    assert [name for name in run.walk("model") if name.endswith(".pth")] == []
    assert len(loaded.input_example) == 2


def test_a_model_of_named_arguments_is_pickled_with_its_file_beside(
    run: Storage, named: tuple[nn.Module, Path]
) -> None:
    model, path = named
    first, second = torch.randn(2, 3), torch.randn(2, 2)
    pack(run, model, lambda: model(first, second=second), code=[path])
    load_mlflow()
    from mlflow.models import Model

    signature = Model.load(f"{run.uri}/model/MLmodel").signature
    assert {spec.name for spec in signature.inputs.inputs} == {"first", "second"}
    assert {spec.name for spec in signature.outputs.inputs} == {"sum"}
    assert "model/code/named_model.py" in run.walk("model")
    path.unlink()  # in another process the file beside is all there is
    (path.parent / "inputs.json").write_text(json.dumps([first.tolist(), second.tolist()]))
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            LOADED_BESIDE,
            f"{run.root}/model",
            str(path.parent / "inputs.json"),
        ],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    torch.testing.assert_close(torch.tensor(found["sum"]), model(first, second=second)["sum"])
    assert found["example"] == ["first", "second"]


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
    pack(run, nn.Linear(3, 2), lambda: None)
    assert load(run).metadata.signature is None


def test_a_model_that_cannot_be_packed_is_told_and_fails_nothing(run: Storage) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream = (number for number in range(3))

        def forward(self, value: Tensor) -> Tensor:
            return value

    said: list[str] = []
    end = Finished(model=Local(), use=lambda: None, code=None, best_weights=lambda: None)
    model_keeper(run.uri, said.append)(end)
    (line,) = said
    assert line.startswith("the final model does not go to MLflow (TypeError: ")
    assert run.walk("model") == []


def test_a_best_model_that_is_the_last_one_takes_an_earlier_one_away(run: Storage) -> None:
    model = nn.Linear(3, 2)
    best = {key: value + 1 for key, value in model.state_dict().items()}
    said: list[str] = []
    for weights in (best, None):
        model_keeper(run.uri, said.append)(
            Finished(
                model=model,
                use=lambda: model(torch.ones(2, 3)),
                code=None,
                best_weights=lambda weights=weights: weights,
            )
        )
        assert bool(run.walk("best_model")) is (weights is not None)
        assert run.walk("model")
    assert said == []


LOADED = """
import sys

import mlflow
import torch

mlflow.set_tracking_uri(sys.argv[1])
for uri in sys.argv[2:]:
    model = mlflow.pytorch.load_model(uri)
    with torch.no_grad():
        print(model(torch.ones(2, 6)).flatten().tolist())
"""


def test_the_best_and_the_final_model_of_a_run_are_loaded_elsewhere(tmp_path: Path) -> None:
    spec = parse_spec(
        {
            "workload": "feature_cases:Scored",
            "args": {"scores": [0.1, 0.9, 0.2, 0.3]},
            "batch_size": 12,
            "shards": 4,
            "max_steps": 4,
            "mode": "local",
            "storage": str(tmp_path / "runs"),
            "evaluate": {"every_steps": 1},
            "checkpoint": {"best": {"metric": "score"}},
            "ema": {"decay": 0.5},
            "metrics": {"enabled": False},
            "tracking": {"registered_model": "scored"},
        }
    )
    told: list[str] = []

    def observe(status: dict[str, Any]) -> None:
        told.extend(item["text"] for item in status["messages"])

    outcome = train(spec, name="r", search=[CASES], observer=observe)
    assert outcome.status == "done"
    assert outcome.best is not None
    assert outcome.best["step"] == 2
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("samestep")
    (tracked,) = client.search_runs([experiment.experiment_id])
    models = {
        model.name: model for model in client.search_logged_models([experiment.experiment_id])
    }
    assert set(models) == {"model", "best_model"}
    version = client.get_model_version_by_alias("scored", "candidate")
    assert version.run_id == tracked.info.run_id
    assert version.source == models["best_model"].artifact_location
    inputs = {item.tags[0].value: item.dataset for item in tracked.inputs.dataset_inputs}
    assert set(inputs) == {"training", "evaluation"}
    assert json.loads(inputs["evaluation"].profile)["num_rows"] == 7
    uris = ["models:/scored@candidate", f"models:/{models['model'].model_id}"]
    loaded = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED, uri, *uris],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    found = [json.loads(line) for line in loaded.stdout.splitlines()[-2:]]
    expected = [output_of(outcome.run, step) for step in (2, 4)]
    assert [pytest.approx(values, rel=1e-5) for values in expected] == found
    assert found[0] != found[1]


def output_of(run: str, step: int) -> list[float]:
    """What the averages of a checkpoint give, by plain torch."""
    model = load_workload("feature_cases:Scored", {}, [CASES]).model()
    model.load_state_dict(load_weights(run, checkpoint=step))
    with torch.no_grad():
        output: Tensor = model.eval()(torch.ones(2, 6))
    return [float(value) for value in output.flatten()]
