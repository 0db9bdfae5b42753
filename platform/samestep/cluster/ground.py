"""Where a drill runs its job: on nodes that it starts itself, or on a cluster that is given."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from samestep.cluster.nodes import LocalNodes, local_nodes, num_alive
from samestep.cluster.strikes import Fault


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run.

    Attributes:
        host: name of its machine.
        pid: its id there.
    """

    host: str
    pid: int


class Ground(Protocol):
    """What a drill needs of the nodes it runs on."""

    @property
    def address(self) -> str:
        """Of the head, for a driver."""

    def living(self, members: Sequence[Member]) -> list[Member]:
        """Those of a run's processes that are there, in the same order."""

    def signal(self, members: Collection[Member], number: signal.Signals) -> list[Member]:
        """Sends it to all; those that were gone already."""

    def strike(self, fault: Fault, number: int) -> str:
        """Strikes a node, whose number is taken modulo how many there are; tells which.

        Empty: none, since it is the last one.
        """

    def restore(self) -> None:
        """Makes ready for another run: as many nodes as in the beginning."""


class OwnNodes:
    """Ray nodes of one slot each on this machine.

    Args:
        nodes: they.
    """

    def __init__(self, nodes: LocalNodes) -> None:
        self._nodes = nodes
        self._num_nodes = len(nodes.nodes)
        self._host = socket.gethostname()

    @property
    def address(self) -> str:
        """Of the head."""
        return self._nodes.address

    def living(self, members: Sequence[Member]) -> list[Member]:
        """Those on nodes that are still reached."""
        nodes = [*self._nodes.nodes, self._nodes.head]
        return [one for one in members if any(node.owns(one.pid) for node in nodes)]

    def signal(self, members: Collection[Member], number: signal.Signals) -> list[Member]:
        """Sends it at once."""
        gone = []
        for member in members:
            try:
                os.kill(member.pid, number)
            except ProcessLookupError:
                gone.append(member)
        return gone

    def strike(self, fault: Fault, number: int) -> str:
        """Strikes one of the nodes, unless it is the last one; or starts another."""
        nodes = self._nodes
        if fault is Fault.ADD_NODE:
            return nodes.add().address
        if len(nodes.nodes) < 2:
            return ""
        node = nodes.nodes[number % len(nodes.nodes)]
        match fault:
            case Fault.KILL_NODE:
                nodes.kill(node)
            case Fault.DRAIN_NODE:
                nodes.drain(node)
            case Fault.CUT_NODE:
                nodes.cut(node)
            case _:
                raise AssertionError(f"{fault} does not strike a node")
        return node.address

    def restore(self) -> None:
        """Starts and ends nodes."""
        nodes = self._nodes
        while len(nodes.nodes) > self._num_nodes:
            nodes.kill(nodes.nodes[-1])
        while len(nodes.nodes) < self._num_nodes:
            nodes.add()
        nodes.wait_for(self._num_nodes, num_alive)


@contextmanager
def own_nodes(num_nodes: int, *, linked: bool) -> Iterator[OwnNodes]:
    """Nodes that live as long as the drill.

    Args:
        num_nodes: besides the head.
        linked: their links can be cut.
    """
    with local_nodes(num_nodes, linked=linked) as nodes:
        yield OwnNodes(nodes)
