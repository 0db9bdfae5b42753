"""Runs of mode local with something planted in them, and commands in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.exact.order import Order
from samestep.incidents.record import Incident, list_incidents
from samestep.names import IncidentKind

HERE = Path(__file__).resolve().parent
SHARDS, BATCH_SIZE, STEP = 2, 8, 6
"""The step at which something goes wrong."""
JOB = {
    "workload": "wobbly:Wobbly",
    "batch_size": BATCH_SIZE,
    "shards": SHARDS,
    "max_steps": 9,
    "mode": "local",
    "tracking": {"enabled": False},
    "metrics": {"enabled": False},
    "checkpoint": {"every_steps": 4},
    "digest_every": 3,
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command gave."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """Its output, where that is JSON."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def fresh(folder: Path, *commands: Sequence[str]) -> list[Result]:
    """Runs commands one after another in one fresh process, in a folder."""
    asked, answer = folder / "commands.json", folder / "results.json"
    asked.write_text(json.dumps([{"args": list(command)} for command in commands]))
    done = subprocess.run(
        # -P: the workload beside fresh.py is not to be found by itself.
        [sys.executable, "-P", str(HERE / "fresh.py"), str(asked), str(answer)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Result(**result) for result in json.loads(answer.read_text())]


def sample_at(step: int, shard: int) -> int:
    """The first sample of a shard."""
    order = Order(dataset_size=80, batch_size=BATCH_SIZE, shards=SHARDS, drop_last=False, seed=0)
    return order.shards_of(step)[shard].ids[0]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one fresh process, by name."""

    folder: Path

    def at(self, name: str) -> Storage:
        """Its directory."""
        return Storage.at(str(self.folder / "runs" / name))

    def incident(self, name: str) -> Incident:
        """Its incident; that of the loss where the gradient has one too."""
        found = list_incidents(self.at(name))
        (chosen,) = [each for each in found if each.kind is not IncidentKind.GRAD_SPIKE]
        return chosen


BAD = sample_at(STEP, 1)
"""The sample that brings it."""
ENDED = ["poisoned", "large", "raises", "explodes", "loud"]
"""Runs that one incident ended."""
PAGE = "page.html"
"""The report of the first of them, in the folder of the runs."""
TOKEN = """hush&"hush'<1>"""
"""A secret that is another text in HTML, JSON and Python."""
