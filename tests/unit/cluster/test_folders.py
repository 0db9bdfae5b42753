"""Relative paths mean the same files in the command and in its workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from samestep import InputError, parse_spec
from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.folders import Folders, at_desk
from samestep.cluster.session import variables_for_workers
from samestep.exact import numerics

ROOT = Path(__file__).resolve().parents[3]


def test_a_worker_of_the_same_machine_stands_where_the_command_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    folders = Folders.of_command([tmp_path / "job", tmp_path], is_copied=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert folders.enter() == [tmp_path / "job", tmp_path]
    assert Path.cwd() == tmp_path


def test_a_worker_of_a_machine_without_that_folder_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = Folders(working="/nowhere/at/all", search=(("/nowhere/at/all/job", "job"),))
    assert folders.enter() == [Path("/nowhere/at/all/job")]
    assert Path.cwd() == tmp_path


def test_a_worker_of_a_submitted_job_looks_in_its_own_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("driver/job", "worker/job", "outside"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "driver")
    search = [tmp_path / "driver/job", tmp_path / "driver", tmp_path / "outside"]
    folders = Folders.of_command(search, is_copied=True)
    monkeypatch.chdir(tmp_path / "worker")
    assert folders.enter() == [tmp_path / "worker/job", tmp_path / "worker", tmp_path / "outside"]
    assert Path.cwd() == tmp_path / "worker"


class Returning:
    """A recorder whose actor is being started again."""

    def __init__(self, num_refusals: int) -> None:
        self.left = num_refusals

    def call(self, method: str, *args: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise ConnectionError("the recorder is away: the actor is restarting")
        return {"attempt": 4}


def test_a_worker_waits_for_a_recorder_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "folders": Folders.of_command([tmp_path], is_copied=False),
        "run_uri": str(tmp_path / "run"),
        "target": Returning(2),
    }
    with at_desk(config, world_rank=1, world_size=2) as desk:
        assert desk.search == [tmp_path]
    assert config["target"].left == -1  # type: ignore[attr-defined]


STRAY = """
import os, sys
from samestep.cluster.stray_writes import warn_of_stray_writes

warn_of_stray_writes(world_rank=1, world_size=int(sys.argv[1]), is_copied=sys.argv[2] == "copied")
for _ in range(2):
    open("out.txt", "w").close()
open("out.txt").close()
open(os.path.abspath("other.txt"), "w").close()
if os.fork() == 0:
    open("loader.txt", "a").close()
    os._exit(0)
os.wait()
"""


def warned(tmp_path: Path, world_size: int, copied: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STRAY), str(world_size), copied],
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stderr.splitlines()


def test_a_write_by_a_relative_path_that_others_share_is_told_once_for_each_file(
    tmp_path: Path,
) -> None:
    lines = warned(tmp_path, 2, "")
    assert [line.partition(" by ")[0] for line in lines] == [
        "world_rank=1 writes 'out.txt'",
        "world_rank=1 writes 'loader.txt'",
    ]
    assert "where every worker writes to the same file: write to self.output_folder" in lines[0]


def test_a_single_worker_is_warned_only_where_the_folder_is_thrown_away(tmp_path: Path) -> None:
    assert warned(tmp_path, 1, "") == []
    assert "of a submitted job is thrown away" in warned(tmp_path, 1, "copied")[0]


def submitted_with(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    config = {"runtime_env": {"working_dir": "gcs://some.zip", "env_vars": variables}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))


def test_variables_that_the_submitted_job_gives_already_are_not_given_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = parse_spec({"workload": "a:B", "batch_size": 4, "epochs": 1})
    every = {**numerics.environment(spec), **TRAIN_ENVIRONMENT}
    assert variables_for_workers(spec) == every
    given = {"OMP_NUM_THREADS": "1", "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "9", "MINE": "x"}
    submitted_with(monkeypatch, given)
    assert variables_for_workers(spec) == {
        name: value for name, value in every.items() if name not in given
    }


def test_a_job_whose_variables_contradict_the_numerics_is_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted_with(monkeypatch, {"OMP_NUM_THREADS": "4"})
    spec = parse_spec({"workload": "a:B", "batch_size": 4, "epochs": 1})
    with pytest.raises(InputError, match="OMP_NUM_THREADS='4' against '1'"):
        variables_for_workers(spec)
