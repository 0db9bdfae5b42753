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
from pathlib import Path
from typing import Any

import pytest
import ray

from samestep import JobSpec, PlacementError, parse_spec, train
from samestep.cluster.environment import TRAIN_ENVIRONMENT, prepare_ray
from samestep.exact import numerics

MakeSpec = Callable[..., JobSpec]
HEAD = "127.0.0.2"
NODES = ("127.0.0.11", "127.0.0.12")

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


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A head without slots and two nodes of one slot each; this process is a driver on the head."""
    prepare_ray()
    port = _free_port(HEAD)
    # Short: Ray puts sockets below it, whose paths may have 107 characters.
    base = tmp_path_factory.getbasetemp().parent
    folders = [base / f"r{port}{letter}" for letter in "hab"]
    started = [
        _start(
            *("--head", "--node-ip-address", HEAD, "--port", str(port), "--num-cpus", "0"),
            *("--include-dashboard", "false", "--temp-dir", str(folders[0])),
        )
    ]
    for address, folder in zip(NODES, folders[1:], strict=True):
        started.append(
            _start(
                *("--address", f"{HEAD}:{port}", "--node-ip-address", address),
                *("--num-cpus", "1", "--temp-dir", str(folder)),
            )
        )
    try:
        _connect(f"{HEAD}:{port}")
        yield
    finally:
        ray.shutdown()
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _connect(address: str) -> None:
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
            if sum(node["Alive"] for node in ray.nodes()) == 3:
                return
        except (ConnectionError, ValueError, RuntimeError):
            pass
        assert time.monotonic() < deadline, "the nodes did not come up"
        pause.wait(0.2)


@pytest.mark.usefixtures("nodes")
def test_two_nodes_give_the_weights_of_one_process(make_spec: MakeSpec, folder: Path) -> None:
    straight = train(make_spec(mode="local"), name="straight", search=[folder])
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
