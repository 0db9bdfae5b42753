"""Several Ray nodes on this machine: one `ray start` each, with addresses of their own.

For drills and tests. Needs no container, and no root unless links are to be cut; each node is a
session of processes, ended by its id and by nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.cluster.environment import prepare_ray
from samestep.cluster.links import BEGIN, GO, Links
from samestep.cluster.processes import kill_session, session_of
from samestep.errors import InputError

HEAD: Final = 2
FIRST_NODE: Final = 11
MAX_NODES: Final = 200
START_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.1
OBJECT_STORE_BYTES: Final = 128 << 20

# Ray gives the ports between to its workers, and refuses to start on one of them.
WORKER_PORTS: Final = range(10002, 20000)

# The head asks its nodes twice a second, so that a raylet that is gone is noticed in seconds.
HEALTH_CHECKS: Final = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: what `ray start` started, in a session of its own.

    Attributes:
        number: of this machine's nodes.
        address: Ray's name for it.
        process: `ray start --block`; its pid is the id of the session.
    """

    number: int
    address: str
    process: subprocess.Popen[bytes]

    def owns(self, pid: int) -> bool:
        """Whether a process runs on this node."""
        return session_of(pid) == self.process.pid


class LocalNodes:
    """A head without slots, and nodes that come and go.

    Args:
        env: variables that all nodes get besides this process's.
        linked: each node has a network of its own, whose link can be cut; needs root.

    Raises:
        InputError: no links can be made.
    """

    def __init__(self, env: Mapping[str, str] | None = None, *, linked: bool = False) -> None:
        prepare_ray()
        self._links = Links() if linked else None
        # Short: Ray puts sockets below it, whose paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="samestep-"))
        self._env = {**os.environ, **(env or {})}
        self._ended: list[Node] = []
        self.nodes: list[Node] = []
        host = self._links.address if self._links else _address_of(HEAD)
        port = _free_port(host)
        self.address = f"{host}:{port}"
        self.head = self._start(
            HEAD,
            host,
            *("--head", "--port", str(port), "--num-cpus", "0"),
            *("--include-dashboard", "false"),
            env=HEALTH_CHECKS,
        )

    def add(
        self,
        num_cpus: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        begin: Sequence[str] = (),
    ) -> Node:
        """Starts a node; `wait_for` waits until Ray has it.

        Args:
            num_cpus: its slots.
            env: further variables of this node alone.
            begin: a command that takes the node's own command as its last arguments.

        Raises:
            InputError: there are too many.
        """
        if len(self.nodes) + len(self._ended) >= MAX_NODES:
            raise InputError(f"{MAX_NODES} nodes were started already; there are no more addresses")
        number = FIRST_NODE + len(self.nodes) + len(self._ended)
        host = self._links.address_of(number) if self._links else _address_of(number)
        slots = ("--num-cpus", str(num_cpus))
        node = self._start(number, host, "--address", self.address, *slots, env=env, begin=begin)
        self.nodes.append(node)
        return node

    def kill(self, node: Node) -> None:
        """SIGKILL to the node and all that runs on it, at once."""
        self.nodes.remove(node)
        self._ended.append(node)
        _end(node)

    def drain(self, node: Node) -> None:
        """SIGTERM: Ray takes the node out; what it still does is ended by `close`."""
        self.nodes.remove(node)
        self._ended.append(node)
        node.process.terminate()

    def cut(self, node: Node) -> None:
        """Cuts the node's link: it lives on, and nobody reaches it any more."""
        assert self._links is not None, "these nodes have no links"
        self.nodes.remove(node)
        self._ended.append(node)
        self._links.cut(node.number)

    def mend(self, node: Node) -> None:
        """Makes a node that was cut off reachable again; it stays one of those that are gone."""
        assert self._links is not None, "these nodes have no links"
        self._links.mend(node.number)

    def wait_for(self, num_nodes: int, alive: Callable[[], int]) -> None:
        """Waits until Ray has so many nodes besides the head, as `alive` counts them.

        Raises:
            TimeoutError: it has not within two minutes.
        """
        deadline, pause = time.monotonic() + START_TIMEOUT_S, threading.Event()
        while alive() != num_nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{alive()} nodes joined {self.address} within {START_TIMEOUT_S:g} s, not "
                    f"{num_nodes}; their logs lie in {self._folder}"
                )
            pause.wait(POLL_S)

    def close(self) -> None:
        """Ends all nodes, the head last, and removes their files."""
        for node in [*self._ended, *self.nodes, self.head]:
            _end(node)
        self.nodes, self._ended = [], []
        if self._links:
            self._links.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(
        self,
        number: int,
        address: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        begin: Sequence[str] = (),
    ) -> Node:
        folder = self._folder / str(number)
        folder.mkdir()
        links = self._links if number != HEAD else None  # the head has this process's own network
        command = [
            *(BEGIN if links else ()),
            *begin,
            *(str(Path(sys.executable).with_name("ray")), "start", "--block"),
            *("--node-ip-address", address, "--temp-dir", str(folder)),
            # Any: the usual one is another node's on this machine, for which Ray waits for seconds.
            *("--dashboard-agent-listen-port", "0"),
            # A process more on each node, for lines that are in the run's own logs as well.
            *("--include-log-monitor", "false"),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), *arguments),
        ]
        with (folder / "start.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**self._env, **(links.environment if links else {}), **(env or {})},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if links:
            links.tie(number, process.pid)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # one that has ended is missed later
            process.stdin.write(GO)
        return Node(number=number, address=address, process=process)


@contextmanager
def local_nodes(
    num_nodes: int,
    *,
    env: Mapping[str, str] | None = None,
    linked: bool = False,
    worker_env: Mapping[str, str] | None = None,
) -> Iterator[LocalNodes]:
    """A head and so many nodes of one slot; this process is connected to them meanwhile.

    Args:
        num_nodes: besides the head.
        env: variables that all nodes get besides this process's.
        linked: their links can be cut; needs root.
        worker_env: variables of what this process runs there.
    """
    nodes = LocalNodes(env, linked=linked)
    try:
        for _ in range(num_nodes):
            nodes.add()
        _connect(nodes, worker_env or {})
        nodes.wait_for(num_nodes, num_alive)
        yield nodes
    finally:
        _disconnect()
        nodes.close()


def num_alive() -> int:
    """Nodes that Ray has, without the head."""
    import ray

    return sum(1 for node in ray.nodes() if node["Alive"]) - 1


def _connect(nodes: LocalNodes, worker_env: Mapping[str, str]) -> None:
    import ray

    from samestep.cluster.ray_private import own_address

    deadline, pause = time.monotonic() + START_TIMEOUT_S, threading.Event()
    while not ray.is_initialized():
        try:
            options: dict[str, Any] = own_address(nodes.address)
            ray.init(
                address=nodes.address,
                runtime_env={"env_vars": dict(worker_env)},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            if time.monotonic() > deadline or nodes.head.process.poll() is not None:
                raise TimeoutError(
                    f"the head {nodes.address} did not come up: {error}; its log lies in "
                    f"{nodes._folder}"
                ) from error
            pause.wait(POLL_S)


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _end(node: Node) -> None:
    kill_session(node.process.pid, END_TIMEOUT_S)
    node.process.wait(END_TIMEOUT_S)


def _address_of(number: int) -> str:
    """A loopback address: the nodes of another process of this machine have others."""
    return f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}.{number}"


def _free_port(host: str) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in WORKER_PORTS:
            return port
