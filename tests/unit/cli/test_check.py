"""`samestep check` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from samestep.cli.check import check
from samestep.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[3]

JOB = """
workload: checked:Checked
args: {broken: false}
batch_size: 8
shards: 8
epochs: 1
workers: 3
"""
WORKLOAD = """
import torch
from torch.utils.data import TensorDataset

import samestep

class Checked(samestep.Workload):
    def __init__(self, broken):
        self.broken = broken

    def model(self):
        print("the workload prints")
        return torch.nn.Linear(2, 1)

    def data(self):
        return TensorDataset(torch.ones(20, 2))

    def loss(self, model, batch):
        loss = model(batch[0]).mean()
        return loss.detach() if self.broken else loss

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""

Check = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "checked.py").write_text(WORKLOAD)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.fixture
def run(job: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """run("--json") checks the job in this process, where torch is loaded already."""
    monkeypatch.delitem(sys.modules, "checked", raising=False)
    alone = typer.Typer()
    alone.command()(check)
    return lambda *arguments: CliRunner().invoke(alone, list(arguments))


def test_a_fine_job_is_told_and_succeeds(run: Check, job: Path) -> None:
    result = run(str(job))
    assert result.exit_code == 0, result.output
    for text in (
        "checked:Checked, 8 shards",
        "1 (shards 0 to 7)",
        "1 (shards 0 to 3), 0 (shards 4 to 7)",
        "3 in 2 tensors: weight, bias",
        "1.5x",
        "warning: with 8 shards",
        "fine: the dry step found no obstacle",
    ):
        assert text in result.output


def test_shapes_dtypes_devices_memory_and_numerics_are_told(run: Check, job: Path) -> None:
    result = run(str(job))
    rows = [" ".join(line.split()) for line in result.output.splitlines()]
    for row in (
        "name shape dtype device bytes",
        "0 1 x 2 float32 cpu 8",
        "samples 20",
        "steps 3 in all, 3 in an epoch",
        "frozen 0 in 0 tensors",
        "tied none",
        "not used by shard 0 none",
        "model 12 B",
        "buffers 0 B",
        "gradients 192 B",  # 64 bytes aligned, and padded
        "optimizer 0 B",
        "device cpu",
        f"torch {torch.__version__}",
        "threads 1",
    ):
        assert row in rows, result.output
    assert [row for row in rows if row.endswith(", scalar of float32 on cpu")], result.output


def test_a_job_that_would_be_refused_is_bad_input(run: Check, job: Path) -> None:
    result = run(str(job), "--set", "args.broken=true")
    assert result.exit_code == 2
    assert "refused: Checked.loss returned a scalar that is not attached" in result.output
    assert "fine" not in result.output


def test_json_holds_everything_and_the_exit_status(run: Check, job: Path) -> None:
    result = run(str(job), "--json", "--set", "args.broken=true")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert "the workload prints" in result.stderr
    assert found["exit_status"] == 2
    assert found["schedule"]["last_shard_sizes"] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert found["parameters"]["trainable"][0]["shape"] == [1, 2]
    assert found["forecasts"][2]["is_costly"] is True
    assert len(found["refused"]) == 1


def test_the_schema_says_what_affects_bits(run: Check) -> None:
    result = run("--schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert schema["properties"]["seed"]["affects_bits"] is True
    assert schema["properties"]["storage"]["affects_bits"] is False
    assert schema["$defs"]["Evaluate"]["properties"]["batch_size"]["affects_bits"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a job file"),
        (["missing.yaml"], "can't read the job file missing.yaml"),
        (["job.yaml", "--set", "shard=3"], "did you mean shards?"),
    ],
)
def test_a_malformed_call_is_bad_input(
    arguments: list[str],
    message: str,
    run: Check,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(job.parent)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_command_sets_the_numerics_before_torch_is_loaded(job: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "samestep", "check", str(job), "--json", "--set", "threads=2"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        cwd=job.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    binding = found["numerics"]["binding"]
    assert (binding["MKL_CBWR"], binding["OMP_NUM_THREADS"]) == ("AUTO", "2")
    assert binding["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    assert not any("is not set in this process" in warning for warning in found["warnings"])
    assert sorted(path.name for path in job.parent.iterdir() if path.name != "__pycache__") == [
        "checked.py",
        "job.yaml",
    ]


def test_the_command_line_itself_loads_neither_torch_nor_ray() -> None:
    code = "import sys, samestep.cli.main; print({'torch', 'ray'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "set()"


def test_every_command_is_offered_and_has_help() -> None:
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    for name in COMMANDS:
        assert name in listed.output
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["chek"]).exit_code == 2
