"""The head of a cluster dies, and its driver with it: the same command goes on, on another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestep import Outcome
from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import prepare_ray
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


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """What is set for Ray stays set."""
    prepare_ray()


@contextmanager
def two_nodes(wait_until: WaitUntil) -> Iterator[LocalNodes]:
    """This process is not connected to them: it would end with the head."""
    nodes = LocalNodes(SOON)
    ask = [str(Path(sys.executable).with_name("ray")), "status", "--address", nodes.address]

    def num_nodes() -> int:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        return told.stdout.count(" node_")

    try:
        for _ in range(2):
            nodes.add()
        wait_until(lambda: num_nodes() == 3, 120, "the head and two nodes")
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

    with two_nodes(wait_until) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        first = start_command(*command, cwd=tmp_path)
        wait_until(lambda: num_steps() > EVERY, 180, "a step behind the first checkpoint")
        kill_session(nodes.head.process.pid, 30)
        output, _ = first.communicate(timeout=180)
        assert first.returncode != 0, output
        reached = num_steps()
    whole = [info.step for info in summarize(run).checkpoints if info.whole]
    assert whole
    newest = max(whole)
    assert reached - EVERY <= newest <= reached
    (gate / "fast").touch()
    monkeypatch.delenv("RAY_ADDRESS")  # the command's own
    again = start_command(*command, cwd=tmp_path)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert f"attempt 2 starts at step {newest}" in output
    assert straight.digest in output
    found = summarize(run)
    assert found.num_redone == reached - newest
    assert os.listdir(gate)


def test_a_cluster_that_does_not_answer_is_told_at_once(
    start_command: StartCommand,
    write_job: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    process = start_command("train", write_job(), "--workers", "1", cwd=tmp_path)
    output, _ = process.communicate(timeout=100)  # Ray itself would try for longer
    assert process.returncode == 2
    told = " ".join(output.split())
    assert f"error: no Ray cluster answers at {address}: " in told
    assert "correct RAY_ADDRESS, or unset it for a cluster on this machine alone" in told
