"""From `samestep init` to a trained, evaluated, listed and removed run, in mode local."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from samestep.checkpoint.storage import Storage
from samestep.cli import scaffold
from samestep.cli.evaluate import evaluate
from samestep.cli.init import init
from samestep.cli.logs import logs
from samestep.cli.rm import rm
from samestep.cli.runs import runs
from samestep.cli.train import train
from samestep.telemetry import lease as leases
from samestep.workload import load_workload

ROOT = Path(__file__).resolve().parents[3]
MakeRun = Callable[..., Storage]
Command = Callable[..., Result]
UNTRACKED = ("--set", "tracking.enabled=false")


@pytest.fixture
def samestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a folder where `make_run` puts its runs under `runs/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("flowers", "my_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    app = typer.Typer()
    for command in (init, train, evaluate, runs, logs, rm):
        app.command()(command)
    return lambda *arguments, **given: CliRunner().invoke(app, list(arguments), **given)


def test_a_start_that_telemetry_refuses_takes_no_step_and_leaves_the_run_free(
    samestep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert samestep("init", "flowers").exit_code == 0
    monkeypatch.chdir("flowers")
    command = ("train", "job.yaml", "--name", "r", "--mode", "local", "--set", "max_steps=2")
    command += ("--set", "epochs=null")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = samestep(*command, *UNTRACKED, "--set", f"metrics.port={port}")
    assert refused.exit_code == 2, refused.output
    assert f"port {port} on 127.0.0.1 is taken" in refused.stderr
    server = ("--set", f"tracking.uri=http://127.0.0.1:{port}")  # nobody is there any more
    refused = samestep(*command, *server, "--set", "tracking.required=true")
    assert refused.exit_code == 2, refused.output
    assert "tracking.required is true" in refused.stderr
    assert "Traceback" not in refused.output
    assert "step 1" not in refused.output
    trained = samestep(*command, *UNTRACKED)
    assert trained.exit_code == 0, trained.output
    assert re.search(r"^metrics for Prometheus: http://127\.0\.0\.1:\d+/", trained.output, re.M)
    assert re.search(r"^steps +2$", trained.stdout, re.M)


def test_what_init_writes_trains_and_evaluates_to_what_the_ledger_says(
    samestep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = samestep("init", "flowers")
    assert made.exit_code == 0, made.output
    assert "569 real patients" in made.stdout
    commands = [line.strip() for line in made.stdout.splitlines() if line.startswith("  ")]
    assert commands[0] == "cd flowers"
    assert [words.split("#")[0].split()[-2:] for words in commands[1:]] == [
        ["check", "job.yaml"],
        ["train", "job.yaml"],
        ["evaluate", "flowers"],
    ]
    assert sorted(os.listdir("flowers")) == [
        *("README.md", "data.csv", "flowers.py", "job.yaml", "test_flowers.py")
    ]
    monkeypatch.chdir("flowers")
    trained = samestep("train", "job.yaml", "--mode", "local", "--set", "epochs=2")
    assert trained.exit_code == 0, trained.output
    assert "test accuracy  9" in trained.stdout

    found = samestep("evaluate", "flowers", "--json")
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert (data["agreement"], data["step"], data["num_samples"]) == ("equal", 30, 114)
    assert data["metrics"]["accuracy"] > 0.9
    told = samestep("evaluate", "flowers")
    assert "equal bit for bit to the evaluation in the ledger" in told.stdout
    assert samestep("evaluate", "flowers", "--checkpoint", "30").exit_code == 0
    log = samestep("logs", "flowers", "--worker", "0")
    assert "attempt 1 begins at step 0: worker 0 of 1, mode local" in log.stdout
    assert "step 30/30" not in log.stdout


def test_the_best_checkpoint_is_evaluated_to_its_score(
    samestep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    samestep("init", "flowers")
    monkeypatch.chdir("flowers")
    more = [
        *("max_steps=12", "epochs=null", "evaluate.every_epochs=0", "evaluate.every_steps=3"),
        *("checkpoint.every_steps=3", "checkpoint.keep=1", "checkpoint.best.metric=loss"),
        *("checkpoint.best.order=max", "ema.decay=0.5"),
    ]
    settings = [word for text in more for word in ("--set", text)]
    trained = samestep("train", "job.yaml", "--mode", "local", *UNTRACKED, *settings)
    assert trained.exit_code == 0, trained.output
    best = json.loads(samestep("evaluate", "flowers", "--checkpoint", "best", "--json").stdout)
    latest = json.loads(samestep("evaluate", "flowers", "--json").stdout)
    assert (best["step"], latest["step"]) == (3, 12)
    assert best["agreement"] == latest["agreement"] == "equal"
    assert best["metrics"]["loss"] > latest["metrics"]["loss"]


def test_an_evaluation_that_differs_from_the_ledgers_says_both_values(
    samestep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    samestep("init", "flowers")
    monkeypatch.chdir("flowers")
    job = ("--mode", "local", "--set", "max_steps=2", "--set", "epochs=null", *UNTRACKED)
    assert samestep("train", "job.yaml", *job).exit_code == 0
    code = Path("flowers.py").read_text()
    Path("other").mkdir()
    Path("other/flowers.py").write_text(code.replace("% 5 == 0", "% 5 == 1"))
    Path("other/data.csv").write_text(Path("data.csv").read_text())
    monkeypatch.delitem(sys.modules, "flowers")
    found = samestep("evaluate", "flowers", "--code", "other")
    assert found.exit_code == 11, found.output
    assert "different from the evaluation in the ledger" in found.stdout
    assert "  metrics.loss: 0x" in found.stdout


def test_the_test_that_init_writes_passes(samestep: Command, tmp_path: Path) -> None:
    samestep("init", "my-model")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my-model",
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_without_scikit_learn_the_data_is_made_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samestep: Command
) -> None:
    table = scaffold.made_table()
    assert table == scaffold.made_table()
    assert "made by a formula" in table.about
    samestep("init", "flowers")
    scaffold.write_table(tmp_path / "flowers/data.csv", table)
    workload = load_workload("flowers:Flowers", {}, [tmp_path / "flowers"])
    assert len(workload.data()) == 480
    assert isinstance(workload.model()(torch.zeros(3, 2)), torch.Tensor)


@pytest.mark.parametrize(
    ("name", "module"),
    [("json", "json_job"), ("torch", "torch_job"), ("my-Net.2", "my_net_2"), ("3d", "job_3d")],
)
def test_the_module_shadows_no_other(name: str, module: str) -> None:
    assert scaffold.module_name(name) == module


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mine", "Mine"),
        ("none", "NoneJob"),
        ("loss", "LossJob"),
        ("tensor_dataset", "TensorDatasetJob"),
    ],
)
def test_the_class_of_a_scaffold_has_a_name_that_is_free(module: str, name: str) -> None:
    assert scaffold.class_name(module) == name


def test_init_refuses_a_folder_that_holds_something_and_a_name_that_no_run_can_have(
    samestep: Command,
) -> None:
    Path("full").mkdir()
    Path("full/notes").touch()
    Path("empty").mkdir()
    for name, message in (("full", "is not empty"), ("a b", "becomes the name of a run")):
        refused = samestep("init", name)
        assert refused.exit_code == 2
        assert message in refused.stderr
    assert os.listdir("full") == ["notes"]
    assert samestep("init", "empty").exit_code == 0


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("7", "no checkpoint after 7 steps; it has whole ones after 3, 6 steps"),
        ("best", "ranks its checkpoints by nothing, so none is the best"),
        ("newest", "a checkpoint is latest, best or a number of steps; got 'newest'"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_bad_input(
    samestep: Command, make_run: MakeRun, which: str, message: str
) -> None:
    make_run("a", checkpoints={3: 1.0, 6: 2.0})
    result = samestep("evaluate", "a", "--checkpoint", which)
    assert result.exit_code == 2
    assert message in result.stderr


def test_runs_lists_what_there_is_and_how_it_stands(samestep: Command, make_run: MakeRun) -> None:
    done = {"status": "done", "step": 6, "digest": "3f2a", "message": ""}
    make_run("a", evaluation={6: 0.75}, result=done)
    make_run("b", num_steps=4)
    alive = make_run("c", num_steps=2)
    make_run("d").write("spec.yaml", b"workload: 3\n")
    Path("runs/mlflow.db").touch()
    lease = leases.acquire(alive)
    try:
        result = samestep("runs")
        listed = json.loads(samestep("runs", "runs", "--json").stdout)
    finally:
        lease.release()
    rows = {row.split()[0]: row.split() for row in result.stdout.splitlines()}
    assert list(rows) == ["name", "a", "b", "c", "d"]
    assert rows["a"][1:6] == ["done", "6/100", "0.125", "accuracy", "0.75"]
    assert [rows[name][1] for name in "bcd"] == ["died", "running", "unreadable"]
    assert [line["alive"] for line in listed] == [False, False, True, False]
    assert listed[1]["steps"] == 4
    assert "spec.yaml" in listed[3]["message"]
    assert all(line["num_bytes"] > 0 for line in listed)


def test_runs_names_the_best_checkpoint_and_cuts_nothing_where_the_terminal_is_narrow(
    samestep: Command, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    name = "a-run-of-a-rather-long-name"
    best = {"best": {"metric": "accuracy"}}
    make_run(name, checkpoints={3: 1.0, 6: 2.0}, evaluation={3: 0.75, 6: 0.5}, checkpoint=best)
    row = samestep("runs").stdout.splitlines()[1]
    assert row.split()[:2] == [name, "died"]
    assert "accuracy 0.75 at 3" in row
    (listed,) = json.loads(samestep("runs", "runs", "--json").stdout)
    assert (listed["best"]["step"], listed["best"]["score"]) == (3, 0.75)


def test_runs_of_a_folder_without_any_says_so_and_one_that_is_not_there_is_bad_input(
    samestep: Command, make_run: MakeRun
) -> None:
    assert samestep("runs").stdout.startswith("no runs in ")
    assert samestep("runs", "elsewhere").exit_code == 2
    make_run("a")
    refused = samestep("runs", "runs/a")
    assert refused.exit_code == 2
    assert "is a run itself" in refused.stderr


def test_rm_asks_and_removes_the_run_alone(samestep: Command, make_run: MakeRun) -> None:
    make_run("a", checkpoints={6: 1.0})
    make_run("b")
    kept = samestep("rm", "a", input="n\n")
    assert (kept.exit_code, "died, 6 steps, 1 checkpoints" in kept.stdout) == (1, True)
    nobody = samestep("rm", "a", input="")
    assert nobody.exit_code == 2
    assert "give --yes" in nobody.stderr
    assert sorted(os.listdir("runs")) == ["a", "b"]
    assert samestep("rm", "a", input="y\n").exit_code == 0
    assert samestep("rm", "runs/b", "--yes").exit_code == 0
    assert os.listdir("runs") == []


def test_rm_refuses_a_run_that_is_alive(samestep: Command, make_run: MakeRun) -> None:
    run = make_run("a")
    lease = leases.acquire(run)
    try:
        refused = samestep("rm", "a", "--yes")
    finally:
        lease.release()
    assert refused.exit_code == 5
    assert f"is alive (process {os.getpid()} on" in refused.stderr
    assert run.exists("ledger")
    assert samestep("rm", "a", "--yes").exit_code == 0


def test_rm_leaves_alone_what_is_no_run(samestep: Command, make_run: MakeRun) -> None:
    make_run("a")
    Path("project").mkdir()
    Path("project/spec.yaml").write_bytes(Path("runs/a/spec.yaml").read_bytes())
    for name in ("project", "nothing"):
        refused = samestep("rm", name, "--yes")
        assert refused.exit_code == 2
    assert os.listdir("project") == ["spec.yaml"]


def test_logs_shows_workers_by_name_and_one_alone_plainly(
    samestep: Command, make_run: MakeRun
) -> None:
    run = make_run("a")
    assert "has no logs" in samestep("logs", "a").stderr
    for attempt in (1, 2):
        for rank in (0, 1):
            run.append(f"logs/attempt-0000{attempt}/worker-{rank}.log", b"x%d\n" % (attempt + rank))
    assert samestep("logs", "a").stdout == "worker 0 | x2\nworker 1 | x3\n"
    assert samestep("logs", "a", "--attempt", "1", "--worker", "1").stdout == "x2\n"
    assert samestep("logs", "a", "--follow").stdout == "worker 0 | x2\nworker 1 | x3\n"
    for asked, message in (
        (("--attempt", "7"), "no logs of attempt 7; it has those of 1, 2"),
        (("--worker", "3"), "attempt 2 has no log of worker 3; it has 0, 1"),
    ):
        refused = samestep("logs", "a", *asked)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_help_of_train_tells_every_exit_status_it_ends_with(samestep: Command) -> None:
    text = " ".join(samestep("train", "--help").stdout.split())
    for told in ("0 done", "1 failed", "2 bad input", "3 stopped", "4 budget used up", "5 in use"):
        assert told in text


@pytest.mark.parametrize("command", ["init", "evaluate", "runs", "logs", "rm"])
def test_help_tells_what_a_command_does(samestep: Command, command: str) -> None:
    assert samestep(command, "--help").exit_code == 0
