"""A drill on a cluster that is given: it strikes the run's own processes, and nothing else."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samestep.cluster.ground import Member
from samestep.cluster.processes import command_of
from samestep.cluster.session import connect
from samestep.cluster.strikes import Fault
from samestep.errors import InputError

START_S: Final = 60.0
"""How long a node may take to start the process that strikes there."""
RAY_TITLE: Final = "ray::"


class Striker:
    """On a node: looks for processes of a run, and signals them."""

    def living(self, pids: Sequence[int]) -> list[int]:
        """Those that are there, and are Ray's: ids are used again."""
        return [pid for pid in pids if command_of(pid).startswith(RAY_TITLE)]

    def signal(self, pids: Sequence[int], number: int) -> list[int]:
        """Sends it to those that are there."""
        struck = self.living(pids)
        for pid in struck:
            os.kill(pid, number)
        return struck


class GivenCluster:
    """A cluster that others own; this process is connected to it.

    Args:
        address: as the user gave it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._strikers: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """As the user gave it."""
        return self._address

    def living(self, members: Sequence[Member]) -> list[Member]:
        """Asks on each of their machines."""
        found = self._ask(members, lambda striker, pids: striker.living.remote(pids))
        return [member for member in members if member in found]

    def signal(self, members: Collection[Member], number: signal.Signals) -> list[Member]:
        """Sends it on each of their machines."""
        struck = self._ask(members, lambda striker, pids: striker.signal.remote(pids, int(number)))
        return [member for member in members if member not in struck]

    def strike(self, fault: Fault, number: int) -> str:
        """Never: the nodes are not the drill's."""
        raise AssertionError(f"{fault} is refused before a drill begins")

    def restore(self) -> None:
        """The nodes are as they were."""

    def _ask(
        self, members: Collection[Member], ask: Callable[[Any, list[int]], Any]
    ) -> set[Member]:
        """Those that a question, put on all of their machines at once, is answered for."""
        asked = {
            host: ask(self._striker(host), [one.pid for one in members if one.host == host])
            for host in {member.host for member in members}
        }
        found = set()
        for host, answer in asked.items():
            try:
                pids = ray.get(answer, timeout=START_S)
            except RayError as error:
                self._strikers.pop(host)
                raise InputError(f"nothing can be struck on {host}: {error}") from error
            found |= {Member(host=host, pid=pid) for pid in pids}
        return found

    def _striker(self, host: str) -> Any:
        if host not in self._strikers:
            nodes = [node for node in ray.nodes() if node["NodeManagerHostname"] == host]
            alive = [node["NodeID"] for node in nodes if node["Alive"]]
            if not alive:
                raise InputError(f"no node of {self._address} is alive on {host}")
            here = NodeAffinitySchedulingStrategy(alive[0], soft=False)
            made = ray.remote(Striker).options(num_cpus=0, scheduling_strategy=here)
            self._strikers[host] = made.remote()
        return self._strikers[host]


@contextmanager
def given_cluster(address: str) -> Iterator[GivenCluster]:
    """Connects to a cluster for the time of a drill.

    Raises:
        InputError: there is none.
    """
    advice = "give the HOST:PORT that `ray start` told, or auto on a machine of the cluster"
    connect(address, advice=advice, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield GivenCluster(address)
    finally:
        ray.shutdown()
