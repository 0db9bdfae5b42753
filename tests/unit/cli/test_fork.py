"""`samestep fork`, and the command that it prints."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from samestep.checkpoint.storage import Storage
from samestep.cli.main import app
from samestep.replay.summary import summarize
from samestep.telemetry.ledger import steps

WORKLOADS = Path(__file__).resolve().parents[3] / "workloads"
LOCAL = (
    *("--mode", "local", "--set", "tracking.enabled=false", "--set", "metrics.enabled=false"),
    *("--set", "checkpoint.every_steps=4"),
)
GOES_BACK = ("--set", "incidents={non_finite: rollback, rollback_steps: 1}")
Command = Callable[..., Result]


@pytest.fixture
def samestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a folder that has the faulty workload in it."""
    shutil.copytree(WORKLOADS / "faulty", tmp_path / "faulty")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.mark.parametrize("has_job", [True, False])
def test_the_printed_command_trains_the_fork_on(
    samestep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_job: bool
) -> None:
    job = ("faulty/job.yaml", "--set", "args.nan_at=5", "--set", "max_steps=8")
    trained = samestep("train", *job, "--set", "epochs=null", "--name", "old", *LOCAL, *GOES_BACK)
    assert "went back to before step 4: the batches of steps 4 to 5 are left out" in trained.output
    assert "rollbacks   went back to before step 4" in samestep("show", "old").output
    if not has_job:
        (tmp_path / "faulty" / "job.yaml").unlink()
    made = samestep("fork", "old", "--at", "7", "--name", "new", "--skip-steps", "7:8")
    assert "new: forked from" in made.output
    assert "3 steps were taken again, as the ledger has them" in made.output
    shown = samestep("show", "new").output
    assert re.search(r"forked from \S+/old after 7 steps", shown)
    assert "status      forked: nobody has trained it yet" in shown
    command = made.output.splitlines()[-1].strip()
    assert command.startswith("cd ") != has_job
    words = shlex.split(command.rpartition(" && ")[2])
    if not has_job:
        assert command.startswith(f"cd {tmp_path / 'faulty'} && ")
        monkeypatch.chdir(tmp_path / "faulty")
    samestep(*words[1:], *LOCAL)
    new = Storage.at(str(tmp_path / "runs" / "new"))
    found = summarize(new)
    assert (found.status, found.num_steps) == ("done", 8)
    assert found.attempts[0].start_step == 7
    left_out = [step for step, record in steps(new).items() if record.skipped]
    assert left_out == [4, 5, 7]


@pytest.mark.parametrize("text", ["7", "7:", "a:b", "7-8"])
def test_a_malformed_range_is_told(samestep: Command, text: str) -> None:
    arguments = ["fork", "nowhere", "--at", "7", "--name", "new", "--skip-steps", text]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
