"""Several raylets on loopback addresses: each is a node to Ray, as on a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from samestep import JobSpec, Outcome, PlacementError, parse_spec, train
from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import TRAIN_ENVIRONMENT, prepare_ray
from samestep.exact import numerics
from samestep.replay.summary import summarize
from samestep.telemetry.past import read_past

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]
HEAD = "127.0.0.2"
NODES = ("127.0.0.11", "127.0.0.12")
MORE_NODES = ("127.0.0.13", "127.0.0.14")

pytestmark = pytest.mark.timeout(400)


def _free_port(host: str) -> int:
    """A free port outside of the range that Ray gives to workers."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if not 10002 <= port <= 19999:
            return port


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "ray"), "start", "--block", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Nodes:
    """A head without slots, and nodes of one slot each; this process is a driver on the head."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._port = _free_port(HEAD)
        self._started: list[subprocess.Popen[bytes]] = []
        self._join(
            *("--head", "--node-ip-address", HEAD, "--port", str(self._port), "--num-cpus", "0"),
            *("--include-dashboard", "false"),
        )

    @property
    def address(self) -> str:
        return f"{HEAD}:{self._port}"

    def add(self, address: str) -> subprocess.Popen[bytes]:
        return self._join(
            *("--address", self.address, "--node-ip-address", address),
            *("--num-cpus", "1"),
        )

    def connect(self, num_nodes: int) -> None:
        _connect(self.address, num_nodes)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._started.remove(process)

    def close(self) -> None:
        ray.shutdown()
        for process in reversed(self._started):
            self.end(process)

    def _join(self, *arguments: str) -> subprocess.Popen[bytes]:
        # Short: Ray puts sockets below it, whose paths may have 107 characters.
        folder = self._base / f"r{self._port}{len(self._started)}"
        process = _start(*arguments, "--temp-dir", str(folder))
        self._started.append(process)
        return process


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    prepare_ray()
    made = Nodes(tmp_path_factory.getbasetemp().parent)
    try:
        for address in NODES:
            made.add(address)
        made.connect(3)
        yield made
    finally:
        made.close()


def _connect(address: str, num_nodes: int) -> None:
    spec = parse_spec({"workload": "tiny:Tiny", "batch_size": 16, "epochs": 1})
    variables = {**numerics.environment(spec), **TRAIN_ENVIRONMENT}
    deadline, pause = time.monotonic() + 120, threading.Event()
    while True:
        try:
            if not ray.is_initialized():
                ray.init(
                    address=address,
                    _node_ip_address=HEAD,
                    runtime_env={"env_vars": variables},
                    logging_level="ERROR",
                )
            if sum(node["Alive"] for node in ray.nodes()) == num_nodes:
                return
        except (ConnectionError, ValueError, RuntimeError):
            pass
        assert time.monotonic() < deadline, "the nodes did not come up"
        pause.wait(0.2)


@pytest.mark.usefixtures("nodes")
def test_two_nodes_give_the_weights_of_one_process(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    outcome = train(make_spec(mode="auto", workers=2), name="spread", search=[folder])
    assert (outcome.status, outcome.digest) == ("done", straight.digest)


@pytest.mark.usefixtures("nodes")
def test_a_job_for_many_machines_never_ends_up_on_one_unnoticed(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(mode="auto", workers=4, faults={"placement_timeout_s": 1})
    said: list[Any] = []
    with pytest.raises(PlacementError, match=r"no room for 4 workers .* 2 slots on 2 node\(s\)"):
        train(spec, name="wide", search=[folder], observer=said.append)


def test_nodes_come_and_go_and_no_step_is_taken_twice(
    nodes: Nodes, make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    fields = {"epochs": None, "max_steps": 600, "evaluate": {"every_epochs": 20}}
    straight = train(make_spec(mode="local", **fields), name="straight", search=[folder])
    spec = make_spec(
        mode="ddp",
        workers={"min": 1, "max": 4},
        args={"pause_s": 0.2, "gate": str(gate)},
        checkpoint={"every_steps": 1000},
        **fields,
    )
    added: list[subprocess.Popen[bytes]] = []
    sizes: list[int] = []

    def settled(num_workers: int) -> bool:
        run = Storage.at(f"{spec.storage}/moved")
        if not run.exists("spec.yaml"):
            return False
        attempts = read_past(run).attempts
        return bool(attempts) and attempts[-1].fields["world_size"] == num_workers

    def stir() -> None:
        with suppress(AssertionError):  # told by what is missing in `sizes`
            wait_until(lambda: settled(2), 120, "two workers")
            sizes.append(2)
            added.extend(nodes.add(address) for address in MORE_NODES)
            wait_until(lambda: settled(4), 120, "four workers")
            sizes.append(4)
            _drain(nodes.address, ip=MORE_NODES[0])
            wait_until(lambda: settled(2), 60, "two workers again")
            sizes.append(2)
            nodes.end(added.pop())
        (gate / "fast").touch()

    thread = threading.Thread(target=stir)
    thread.start()
    outcome = train(spec, name="moved", search=[folder])
    thread.join()
    for node in added:
        nodes.end(node)
    assert sizes == [2, 4, 2]
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    found = summarize(Storage.at(outcome.run))
    assert found.num_redone == 0
    assert [r["cause"] for r in found.recoveries][:2] == ["grow", "drain"]
    assert all(r["planned"] for r in found.recoveries[:2])


def _drain(address: str, *, ip: str) -> None:
    """Tells Ray that a node will be taken away, as a preemption notice does."""
    [node] = [node for node in ray.nodes() if node["NodeManagerAddress"] == ip]
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address),
            *("--node-id", node["NodeID"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "the test takes it away", "--deadline-remaining-seconds", "300"),
        ],
        check=True,
        timeout=60,
        capture_output=True,
    )
