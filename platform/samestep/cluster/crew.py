"""Who sits where: processes kept over attempts, and spares that take over from dead ones.

Starting a process and its imports takes seconds, a restart with processes that exist a fraction of
one. So survivors stay in their seats; a dead worker's seat goes to the spare of its node, and the
spare is replaced once training runs again, since imports compete with it. Nobody waits for a cold
process while the group can run without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from samestep.cluster.seats import Seat

SUSPECT_S: Final = 30.0
"""How long a node is kept away from on which a worker could neither answer nor be ended."""
START_S: Final = 300.0
"""How long a process may take to start: one that hangs in its imports makes room for another."""
AGAIN_S: Final = 2.0
"""Times how many in a row have failed to start on a node: so long until the next is."""
MAX_AGAIN_S: Final = 30.0


class Hand(Protocol):
    """A worker process."""

    @property
    def node_id(self) -> str:
        """Where it runs."""

    def is_ready(self) -> bool:
        """Whether its imports are done."""

    def is_dead(self) -> bool:
        """Whether it is known to be dead."""

    @property
    def why(self) -> str:
        """What it died of while it started; empty where that is not known."""

    def end(self) -> None:
        """Ends it, without waiting."""


H = TypeVar("H", bound=Hand)


class Crew(Generic[H]):
    """The processes of a run.

    Args:
        hire: starts a process on a node; for a seat, or as a spare (None).
        num_spares: per node.
        clock: seconds.

    Attributes:
        why_failed: why a process could not start, of the last one that could not; empty: none.
    """

    def __init__(
        self,
        hire: Callable[[str, int | None], H],
        *,
        num_spares: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hire = hire
        self._num_spares = num_spares
        self._clock = clock
        self._seated: dict[int, H] = {}
        self._spares: dict[str, list[H]] = {}
        self._suspects: dict[str, float] = {}
        self._starting: dict[H, float] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        self.why_failed = ""

    def tend(self, seats: Sequence[Seat], *, hire: bool, refill: bool) -> None:
        """Lets go of the dead and seats who is there.

        Args:
            seats: as they are now.
            hire: start processes for seats that no spare can take.
            refill: start spares, once nobody is coming to a seat: they would compete.
        """
        self._follow_starts()
        places = {seat.number: seat.node_id for seat in seats}
        for number, hand in list(self._seated.items()):
            has_moved = number not in places or places[number] not in (hand.node_id, None)
            if hand.is_dead() or has_moved:
                self.drop(hand)
        nodes = {seat.node_id for seat in self._usable(seats) if seat.node_id is not None}
        for node_id, spares in list(self._spares.items()):
            for hand in list(spares):
                if hand.is_dead() or node_id not in nodes:
                    self.drop(hand)
        for seat in self._usable(seats):
            if seat.number in self._seated or seat.node_id is None:
                continue
            spare = self._take_spare(seat.node_id)
            if spare is not None:
                self._seated[seat.number] = spare
            elif hire and self._may_hire(seat.node_id):
                self._seated[seat.number] = self._started(seat.node_id, seat.number)
        if refill and not self.num_coming(seats):
            for node_id in nodes:
                spares = self._spares.setdefault(node_id, [])
                # One after another: each takes a core for seconds.
                is_due = len(spares) < self._num_spares and all(hand.is_ready() for hand in spares)
                if is_due and self._may_hire(node_id):
                    spares.append(self._started(node_id, None))

    def _follow_starts(self) -> None:
        """Notes who is ready, and who has failed to start or takes too long."""
        now = self._clock()
        for hand, since in list(self._starting.items()):
            if hand.is_ready():
                del self._starting[hand]
                self._failures.pop(hand.node_id, None)
            elif hand.is_dead() or now - since > START_S:
                self.why_failed = hand.why or f"not ready {now - since:.0f} s after its start"
                num_before, _ = self._failures.get(hand.node_id, (0, now))
                self._failures[hand.node_id] = num_before + 1, now
                self.drop(hand)

    def _may_hire(self, node_id: str) -> bool:
        """Not at once where several in a row have failed to start."""
        num_failed, at = self._failures.get(node_id, (0, 0.0))
        return num_failed < 2 or self._clock() - at >= min(AGAIN_S * num_failed, MAX_AGAIN_S)

    def _started(self, node_id: str, seat: int | None) -> H:
        hand = self._hire(node_id, seat)
        self._starting[hand] = self._clock()
        return hand

    def ready(self, seats: Sequence[Seat]) -> dict[int, H]:
        """Those who could work now, by seat."""
        return {
            seat.number: self._seated[seat.number]
            for seat in self._usable(seats)
            if seat.number in self._seated and self._seated[seat.number].is_ready()
        }

    def num_coming(self, seats: Sequence[Seat]) -> int:
        """How many usable seats have a process that is not ready yet."""
        seated = [self._seated.get(seat.number) for seat in self._usable(seats)]
        return sum(hand is not None and not hand.is_ready() for hand in seated)

    def drop(self, hand: H) -> None:
        """Ends a process; its seat is free."""
        hand.end()
        self._starting.pop(hand, None)
        self._seated = {n: other for n, other in self._seated.items() if other is not hand}
        for spares in self._spares.values():
            if hand in spares:
                spares.remove(hand)

    def let_go(self, seats: Sequence[Seat], keep: Collection[H]) -> None:
        """Ends those in seats that can't be used any more, but for those in `keep`."""
        usable = {seat.number for seat in self._usable(seats)}
        for number, hand in list(self._seated.items()):
            if number not in usable and hand not in keep:
                self.drop(hand)

    def suspect(self, node_id: str) -> None:
        """Keeps away from a node for a while, unless Ray finds it dead before."""
        self._suspects[node_id] = self._clock() + SUSPECT_S

    @property
    def everyone(self) -> list[H]:
        """All processes, spares too."""
        return [*self._seated.values(), *(hand for many in self._spares.values() for hand in many)]

    def close(self) -> None:
        """Ends all."""
        for hand in self.everyone:
            self.drop(hand)

    def _usable(self, seats: Collection[Seat]) -> list[Seat]:
        now = self._clock()
        self._suspects = {node: until for node, until in self._suspects.items() if until > now}
        return [seat for seat in seats if seat.usable and seat.node_id not in self._suspects]

    def _take_spare(self, node_id: str) -> H | None:
        spares = self._spares.get(node_id, [])
        if not spares:
            return None
        spare = next((hand for hand in spares if hand.is_ready()), spares[0])
        spares.remove(spare)
        return spare


def pick(ready: Mapping[int, H], size: int, first: Collection[H]) -> list[H]:
    """Who of those that are ready works: members of the group before come first, by seat."""
    order = sorted(ready, key=lambda number: (ready[number] not in first, number))
    return [ready[number] for number in sorted(order[:size])]
