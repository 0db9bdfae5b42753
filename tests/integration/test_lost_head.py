"""The head of a cluster dies, and its driver with it: the same command goes on, on another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestep import Outcome
from samestep.checkpoint.storage import Storage
from samestep.cluster.nodes import LocalNodes
from samestep.cluster.processes import kill_session
from samestep.replay.summary import summarize
from samestep.telemetry.past import read_past

StartCommand = Callable[..., subprocess.Popen[str]]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

pytestmark = pytest.mark.timeout(590)

EVERY = 4
"""Steps between two checkpoints of the job."""
# By itself whoever is connected to a head looks for it for a minute, and then ends.
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}


@contextmanager
def two_nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(SOON)
    try:
        for _ in range(2):
            nodes.add()
        yield nodes
    finally:
        nodes.close()


def test_a_head_that_is_killed_costs_the_steps_since_the_last_checkpoint(
    start_command: StartCommand,
    write_job: Callable[..., Path],
    straight: Outcome,
    tmp_path: Path,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    gate = tmp_path / "gate"
    gate.mkdir()
    args = {"pause_s": 0.5, "gate": str(gate)}
    job = write_job(args=args, workers=2, checkpoint={"every_steps": EVERY, "snapshot_every": 0})
    run = Storage.at(str(tmp_path / "runs" / "lost"))
    command = ("train", job, "--name", "lost")

    def num_steps() -> int:
        return read_past(run).num_steps if run.exists("spec.yaml") else 0

    with two_nodes() as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        first = start_command(*command, cwd=tmp_path)
        wait_until(lambda: num_steps() > EVERY, 180, "a step behind the first checkpoint")
        kill_session(nodes.head.process.pid, 30)
        output, _ = first.communicate(timeout=180)
        assert first.returncode != 0, output
        reached = num_steps()
    whole = summarize(run).checkpoints
    assert whole
    newest = max(info.step for info in whole)
    assert reached - EVERY <= newest <= reached
    (gate / "fast").touch()
    with two_nodes() as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        again = start_command(*command, cwd=tmp_path)
        output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert f"attempt 2 starts at step {newest}" in output
    assert straight.digest in output
    found = summarize(run)
    assert found.num_redone == reached - newest
    assert os.listdir(gate)
