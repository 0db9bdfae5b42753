"""Attempts of runs in the pool's processes, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.names import Event
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.records import EventRecord, StepRecord

Train = Callable[..., "Run"]
PLACES = [{"world_size": 1}, {"world_size": 2}, {"world_size": 3}, {"num_devices": 2}]
FOLDER = Path(__file__).resolve().parent
TRAIN = """
import json, sys
from pathlib import Path
from samestep import parse_spec, train
print(train(parse_spec(json.loads(sys.argv[1])), name="run", search=[Path(sys.argv[2])]).digest)
"""
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


def started(spec: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """A process that trains the run `run` in mode local, and prints its digest."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRAIN, json.dumps({**spec, **NO_SINKS}), str(FOLDER)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
