"""Attempts of runs in the pool's processes, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import pytest

from samestep import parse_spec, train
from samestep.checkpoint.storage import Storage
from samestep.exact.numerics import environment
from samestep.names import Event
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.records import EventRecord, StepRecord

Train = Callable[..., "Run"]
PLACES = [{"world_size": 1}, {"world_size": 2}, {"world_size": 3}, {"num_devices": 2}]
FOLDER = Path(__file__).resolve().parent
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    ["samestep.cluster.launch", "samestep.engine.attempt", "torch._dynamo"]
)
END_S = 120.0
NO_SINKS = {"tracking": {"enabled": False}, "metrics": {"enabled": False}}

FRESH = Path(__file__).resolve().parents[1] / "replay" / "fresh.py"


class Run:
    """What a run left behind."""

    def __init__(self, folder: Path, answers: list[dict[str, Any]]) -> None:
        self.folder, self.storage = folder, Storage.at(str(folder))
        self.result, self.verdict = answers[0]["result"], answers[0]["verdict"]
        # By their text, for NaN is not equal to itself.
        assert all(repr(answer["result"]) == repr(self.result) for answer in answers)
        assert all(answer["verdict"] == self.verdict for answer in answers)

    @property
    def digest(self) -> str:
        assert self.result is not None, self.verdict
        assert self.result["status"] == "done", self.verdict
        return str(self.result["digest"])

    def steps(self) -> list[StepRecord]:
        lines = read_ledger(self.storage)
        return [StepRecord.from_json(data) for data in lines if data["type"] == "step"]

    def evaluations(self) -> list[Any]:
        lines = read_ledger(self.storage)
        events = [EventRecord.from_json(data) for data in lines if data["type"] == "event"]
        return [event.fields for event in events if event.event is Event.EVALUATION]


def everywhere(train: Train, spec: dict[str, Any]) -> list[Run]:
    """The run in each place; all must end with the same digest."""
    runs = [train(spec, f"run-{number}", **place) for number, place in enumerate(PLACES)]
    assert len({run.digest for run in runs}) == 1
    return runs


def replayed(folder: Path, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What a fresh process in a folder gives for each command."""
    (folder / "commands").write_text(json.dumps([{"args": command} for command in commands]))
    done = subprocess.run(
        [sys.executable, "-P", str(FRESH), "commands", "results"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((folder / "results").read_text())
    return found


class Started(ForkServerProcess):
    """A process that trains the run `run` of a spec in mode local.

    It is forked from one that has imported what trains, for imports cost seconds.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._answer, theirs = FORKS.Pipe(duplex=False)
        super().__init__(target=_train, args=({**spec, **NO_SINKS}, theirs), daemon=True)
        with pytest.MonkeyPatch.context() as there:  # where the first of them starts the server
            for name, value in environment(parse_spec({**spec, **NO_SINKS})).items():
                there.setenv(name, value)
            self.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        self.join()
        self._answer.close()

    def digest(self) -> str:
        """Waits for its end; of the final weights."""
        assert self._answer.poll(END_S), "it did not end"
        digest = str(self._answer.recv())
        self.join()
        assert self.exitcode == 0
        return digest


def _train(spec: dict[str, Any], answer: Connection) -> None:
    os.setpgid(0, 0)
    answer.send(train(parse_spec(spec), name="run", search=[FOLDER]).digest)
