"""Worker processes and seats that tests move by hand."""

from __future__ import annotations

from collections.abc import Collection

from samestep.cluster.crew import Crew
from samestep.cluster.seats import Seat


class FakeHand:
    """A process that is what a test says it is."""

    def __init__(self, node_id: str, seat: int | None, *, ready: bool) -> None:
        self.node_id = node_id
        self.seat = seat
        self.ready, self.dead, self.ended = ready, False, False
        self.why = ""

    def is_ready(self) -> bool:
        return self.ready and not self.dead

    def is_dead(self) -> bool:
        return self.dead

    def end(self) -> None:
        self.ended = self.dead = True


class Cluster:
    """Nodes with seats, and a clock."""

    def __init__(self, *nodes: str | None, num_spares: int = 1, ready: bool = True) -> None:
        self.nodes = list(nodes)
        self.unusable: set[int] = set()
        self.avoided: set[str] = set()
        self.ready = ready
        self.now = 100.0
        self.hired: list[FakeHand] = []
        self.crew: Crew[FakeHand] = Crew(self._hire, num_spares=num_spares, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def look(self) -> list[Seat]:
        return [
            Seat(
                number=number,
                node_id=node,
                usable=node is not None and number not in self.unusable,
                host=f"host-{node}" if node is not None else "",
            )
            for number, node in enumerate(self.nodes)
        ]

    def avoid(self, hosts: Collection[str]) -> None:
        self.avoided = set(hosts)

    def _hire(self, node_id: str, seat: int | None) -> FakeHand:
        hand = FakeHand(node_id, seat, ready=self.ready)
        self.hired.append(hand)
        return hand
