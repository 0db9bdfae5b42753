"""The commands that look at runs: show, compare, digest, samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from samestep.checkpoint.storage import Storage
from samestep.cli.compare import compare
from samestep.cli.digest import digest
from samestep.cli.samples import samples
from samestep.cli.show import show

MakeRun = Callable[..., Storage]
Command = Callable[..., Result]


@pytest.fixture
def samestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a folder where `make_run` puts its runs under `runs/`."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    for command in (show, compare, digest, samples):
        app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_compare_of_equal_runs_says_identical_and_succeeds(
    samestep: Command, make_run: MakeRun
) -> None:
    for name in ("a", "b"):
        make_run(name, checkpoints={6: 1.0})
    result = samestep("compare", "a", "b")
    assert result.exit_code == 0
    assert result.stdout.startswith("identical through step 5 (weights ")
    assert "…; 6 steps, 0 evaluations)" in result.stdout


def test_compare_of_different_runs_names_step_quantity_and_both_values(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a")
    make_run("b", loss_at={2: 0.5})
    result = samestep("compare", "a", "b")
    assert result.exit_code == 11
    assert result.stdout.splitlines() == [
        "different at step 2: shard_losses[0]: 0x1.999999999999ap-3 (0.2) against "
        "0x1.0000000000000p-1 (0.5)",
        "identical through step 1",
        "the numerics do not differ: the same bits were to be expected",
    ]


def test_compare_under_other_numerics_says_how_they_differ(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a")
    make_run("b", shift=1e-5, torch_version="2.14")
    result = samestep("compare", "a", "b")
    assert result.exit_code == 10
    assert result.stdout.startswith("equal within 0.001 through step 5 (6 steps")
    assert "torch: '2.13' against '2.14'" in result.stdout


def test_compare_with_a_run_that_went_further_is_not_identical(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a", num_steps=4)
    make_run("b", num_steps=6)
    result = samestep("compare", "a", "b")
    assert result.exit_code == 11
    assert "but run b has 2 steps that the other has not (--through STEP)" in result.stdout
    assert samestep("compare", "a", "b", "--through", "3").exit_code == 0


def test_a_run_that_is_not_there_is_bad_input_and_those_there_are_are_named(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a")
    result = samestep("compare", "a", "zebra")
    assert result.exit_code == 2
    assert "no run directory 'zebra'" in result.stderr
    assert "Runs in ./runs: a" in result.stderr


def test_a_run_may_be_given_by_its_path(
    samestep: Command, make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("a")
    assert samestep("show", run.uri).exit_code == 0
    assert samestep("show", f"file://{run.uri}").exit_code == 0
    assert samestep("show", "./runs/a").exit_code == 0


def test_digest_prints_the_same_for_run_and_checkpoint(
    samestep: Command, make_run: MakeRun
) -> None:
    run = make_run("a", checkpoints={3: 1.0, 6: 2.0})
    by_run = samestep("digest", "a")
    by_folder = samestep("digest", f"{run.uri}/checkpoints/step-00000006")
    other = samestep("digest", f"{run.uri}/checkpoints/step-00000003")
    assert by_run.exit_code == by_folder.exit_code == other.exit_code == 0
    assert len(by_run.stdout.split()[0]) == 64
    assert by_run.stdout.split()[0] == by_folder.stdout.split()[0] != other.stdout.split()[0]


def test_digest_of_a_damaged_checkpoint_is_refused(samestep: Command, make_run: MakeRun) -> None:
    run = make_run("a", checkpoints={6: 2.0})
    run.write("checkpoints/step-00000006/state-00000.safetensors", b"")
    result = samestep("digest", "a")
    assert result.exit_code == 2
    assert "zero bytes" in result.stderr


def test_digest_of_a_run_without_checkpoints_is_refused(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a")
    assert samestep("digest", "a").exit_code == 2


def test_samples_lists_ids_by_shard(samestep: Command, make_run: MakeRun) -> None:
    make_run("a")
    result = samestep("samples", "a", "--step", "2")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "step 2, epoch 0: 4 samples, as the ledger has it"
    assert [line.partition(":")[0] for line in lines[1:]] == ["shard 0", "shard 1"]
    data = json.loads(samestep("samples", "a", "--step", "2", "--json").stdout)
    assert lines[1] == f"shard 0: {' '.join(map(str, data['shards'][0]))}"


def test_samples_of_a_step_that_was_not_taken_is_bad_input(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a")
    result = samestep("samples", "a", "--step", "99")
    assert result.exit_code == 2
    assert "has no step 99; it holds steps 0 to 5" in result.stderr


def test_show_tells_a_run_in_short(samestep: Command, make_run: MakeRun) -> None:
    make_run(
        "a",
        evaluation={6: 0.8},
        checkpoints={3: 1.0, 6: 2.0},
        result={"status": "done", "step": 6, "digest": "3f2a", "message": ""},
    )
    result = samestep("show", "a")
    assert result.exit_code == 0
    lines = {line[:12].strip(): line[12:].strip() for line in result.stdout.splitlines()}
    assert lines["status"] == "done"
    assert lines["steps"] == "6 of 100, epoch 1"
    assert lines["evaluation"] == "accuracy 0.8 (after 6 steps)"
    assert lines["digest"] == "3f2a"
    assert lines["checkpoints"].startswith("after 3, 6 steps (")
    assert lines["incidents"] == "0"
    assert result.stdout.splitlines()[-1].split()[:6] == ["1", "ddp", "2", "0", "to", "5"]


def test_show_says_how_to_go_on_with_a_run_that_died(samestep: Command, make_run: MakeRun) -> None:
    make_run("a")
    text = samestep("show", "a").stdout
    assert "the same train command resumes it" in text
    assert text.splitlines()[-1].split()[-1] == "died"


def test_show_as_json_is_one_object_for_scripts(samestep: Command, make_run: MakeRun) -> None:
    make_run("a", checkpoints={6: 1.0})
    data = json.loads(samestep("show", "a", "--json").stdout)
    assert (data["status"], data["steps"], data["loss"]) == ("died", 6, 1 / 8)
    assert data["attempts"][0]["workers"] == 2
    assert [info["step"] for info in data["checkpoints"]] == [6]


@pytest.mark.parametrize("command", ["show", "compare", "digest", "samples"])
def test_help_tells_what_a_command_does(samestep: Command, command: str) -> None:
    result = samestep(command, "--help")
    assert result.exit_code == 0
    assert "RUN" in result.stdout or "PATH" in result.stdout
