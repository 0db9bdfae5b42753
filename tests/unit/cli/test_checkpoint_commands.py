"""The commands about checkpoints: what there is, whether it is whole, and weights taken out."""

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
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD
from typer.testing import CliRunner, Result

from samestep.checkpoint.committed import commit
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.state import Parts, collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.cli.checkpoints import checkpoints
from samestep.cli.export import export

MakeRun = Callable[..., Storage]
Command = Callable[..., Result]


@pytest.fixture
def samestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a folder where `make_run` puts its runs under `runs/`."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    for command in (checkpoints, export):
        app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a state of its own that is no tensor."""

    def __init__(self, *, with_extra: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        if with_extra:
            self.kept = Kept()


class Kept(nn.Module):
    def get_extra_state(self) -> str:
        return "kept"

    def set_extra_state(self, state: str) -> None:
        assert state == "kept"


def save(run: Storage, model: nn.Module, *, step: int = 6, ema: float | None = None) -> None:
    averages = {n: torch.full_like(p, ema) for n, p in model.named_parameters()} if ema else None
    parts = Parts(model=model, optimizer=SGD(model.parameters(), lr=0.1), ema=averages)
    meta = CheckpointMeta(
        numerics={},
        spec={},
        created_s=0.0,
        evaluation={"accuracy": 1.0 - step / 100},
        ranking=Ranking(metric="accuracy", order="max"),
    )
    commit(run, write_files(run, collect(parts, step=step, extras={}), meta))


def rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()[1:]]


def test_a_listing_tells_step_size_age_status_latest_and_best(
    samestep: Command, make_run: MakeRun
) -> None:
    run = make_run("a")
    for step in (2, 4):
        save(run, Tied(), step=step)
    run.write("checkpoints/step-00000001/state-00000.safetensors", b"left by a killed writer")
    run.write("checkpoints/damaged/step-00000003-1/manifest.json", b"evidence")
    result = samestep("checkpoints", "a")
    assert result.exit_code == 0
    assert [(row[0], row[-2:]) for row in rows(result)] == [
        ("1", ["-", "unfinished"]),
        ("2", ["whole", "best"]),
        ("4", ["whole", "latest"]),
        ("3", ["set", "aside"]),
    ]
    found = json.loads(samestep("checkpoints", "a", "--json").stdout)
    assert [line["status"] for line in found] == ["unfinished", "whole", "whole", "set aside"]
    assert [line["is_best"] for line in found] == [False, True, False, False]
    assert found[1]["num_bytes"] > 0


def test_verify_finds_a_flipped_bit_that_a_listing_does_not(
    samestep: Command, make_run: MakeRun
) -> None:
    run = make_run("a")
    for step in (2, 4):
        save(run, Tied(), step=step)
    path = Path(run.root, "checkpoints/step-00000004/state-00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert samestep("checkpoints", "a").exit_code == 0
    result = samestep("checkpoints", "a", "--verify")
    assert result.exit_code == 1
    assert [row[-2:] for row in rows(result)[:2]] == [["latest,", "best"], ["d", "damaged"]]
    assert "step 4: " in result.stdout
    assert "SHA-256 is" in result.stdout


def test_a_run_without_checkpoints_says_so(samestep: Command, make_run: MakeRun) -> None:
    make_run("a")
    assert samestep("checkpoints", "a").stdout.startswith("no checkpoints in ")
    assert samestep("checkpoints", "b").exit_code == 2


PLAIN = """
import sys, torch
from safetensors.torch import load_file
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
model = Tied()
print(model.load_state_dict(load_file(sys.argv[1]), strict=True))
assert model.head.weight is model.embed.weight
print(model.embed.weight.flatten().tolist())
assert not any(name.startswith("samestep") for name in sys.modules)
"""


def test_what_is_exported_loads_in_a_process_that_knows_no_samestep(
    samestep: Command, make_run: MakeRun, tmp_path: Path
) -> None:
    model = Tied()
    save(make_run("a"), model)
    result = samestep("export", "a", "--out", "weights.safetensors")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("weights.safetensors: weights after 6 steps, 7 tensors, ")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path / "weights.safetensors")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    matched, weights = done.stdout.splitlines()
    assert matched == "<All keys matched successfully>"
    assert json.loads(weights) == model.embed.weight.flatten().tolist()


def test_averages_are_exported_where_the_job_keeps_them(
    samestep: Command, make_run: MakeRun
) -> None:
    save(make_run("a"), Tied(), ema=0.5)
    result = samestep("export", "a", "--out", "weights.safetensors")
    assert "averages of weights after 6 steps" in result.stdout
    found = load_file("weights.safetensors")
    assert found["head.weight"].eq(0.5).all()
    assert found["embed.weight"].eq(0.5).all()


def test_the_best_a_step_and_a_folder_can_be_exported(samestep: Command, make_run: MakeRun) -> None:
    run = make_run("a")
    models = {step: Tied() for step in (2, 4)}
    for step, model in models.items():
        save(run, model, step=step)
    folder = f"{run.uri}/checkpoints/step-00000004"
    for step, arguments in (
        (2, ["a", "--checkpoint", "best"]),
        (4, ["a", "--checkpoint", "4"]),
        (4, [folder]),
    ):
        result = samestep("export", *arguments, "--out", "w.safetensors", "--force")
        assert result.exit_code == 0, result.output
        assert torch.equal(load_file("w.safetensors")["head.weight"], models[step].head.weight)


def test_a_file_that_is_there_is_replaced_by_force_alone(
    samestep: Command, make_run: MakeRun
) -> None:
    save(make_run("a"), Tied())
    Path("w.safetensors").write_text("mine")
    result = samestep("export", "a", "--out", "w.safetensors")
    assert result.exit_code == 2
    assert "w.safetensors exists already; give --force" in result.stderr
    assert Path("w.safetensors").read_text() == "mine"
    assert samestep("export", "a", "--out", "nowhere/w.safetensors").exit_code == 2
    assert samestep("export", "a", "--out", "w.safetensors", "--checkpoint", "9").exit_code == 2


def test_state_that_is_no_tensor_is_left_out_and_named(
    samestep: Command, make_run: MakeRun
) -> None:
    save(make_run("a"), Tied(with_extra=True))
    result = samestep("export", "a", "--out", "w.safetensors")
    assert result.exit_code == 0
    assert "left out, being no tensors: kept._extra_state" in result.stdout


def test_a_damaged_checkpoint_is_not_exported(samestep: Command, make_run: MakeRun) -> None:
    run = make_run("a")
    save(run, Tied())
    run.write("checkpoints/step-00000006/state-00000.safetensors", b"")
    result = samestep("export", "a", "--out", "w.safetensors")
    assert result.exit_code == 2
    assert "zero bytes" in result.stderr
    assert not Path("w.safetensors").exists()
