"""Who works next: the seats and the processes there are, put together to a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, Generic, Protocol, TypeVar

from samestep.cluster.crew import START_S, Crew, Hand, pick
from samestep.cluster.seats import Seat, best_size, lacking, sparing
from samestep.spec import JobSpec

H = TypeVar("H", bound=Hand)

COMING_S: Final = 10.0
"""How long a first group waits for the last processes once it could start without them."""
PLACING_S: Final = 1.0
"""How long a first group waits for seats that are pending."""
TELL_S: Final = 5.0
"""How long a group waits for room before it says what it waits for."""
TELL_STARTING_S: Final = 20.0
"""The same where there is room, and processes are only starting."""
CALM_S: Final = 3.0
"""How long training must run again before processes are started beside it: imports compete."""


class Places(Protocol):
    """Where the seats are looked up: `seats.Seats`, or a test's."""

    def look(self) -> list[Seat]:
        """All seats."""

    def avoid(self, hosts: Collection[str]) -> None:
        """From now on asks for room on other nodes than these."""


class Muster(Generic[H]):
    """Decides who works.

    Args:
        spec: the job.
        resources: of one worker, for messages.
        places: the seats.
        crew: the processes.
        clock: seconds.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        resources: dict[str, float],
        places: Places,
        crew: Crew[H],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._shards, self._faults = spec.workers, spec.shards, spec.faults
        self._resources = resources
        self._places = places
        self._crew = crew
        self._clock = clock
        self._seats: list[Seat] = []
        self._avoided: set[str] = set()
        self._waiting_since: float | None = None
        self._has_told = False
        self._possible_since: float | None = None
        self._has_run = False
        self._coming_since: float | None = None

    def assemble(self, before: Collection[H]) -> list[H] | None:
        """Those who start now, or None while there are too few.

        A group that ran before starts with whoever is ready; who comes later joins by parking.

        Args:
            before: who worked in the group before.

        Raises:
            TimeoutError: it took too long; tells what is missing.
        """
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        self._seats = self._look()
        self._crew.tend(self._seats, hire=not self._has_run, refill=False)
        if self._size() is None:
            self._crew.tend(self._seats, hire=True, refill=False)
        size = self._size()
        if size is None or not self._is_worth_starting(now):
            self._require_time(now, size)
            return None
        self._waiting_since = self._possible_since = None
        self._has_told = False
        self._has_run = True
        members = pick(self._crew.ready(self._seats), size, before)
        self._crew.let_go(self._seats, members)
        return members

    def waits_for(self) -> str:
        """Once in each wait that lasts: what it is for and how long, for the user; else empty."""
        if self._waiting_since is None or self._has_told or self._size() is not None:
            return ""
        soon_s = TELL_STARTING_S if self._has_room() else TELL_S
        if self._clock() - self._waiting_since < soon_s:
            return ""
        self._has_told = True
        num_ready = len(self._crew.ready(self._seats))
        fewest, most = self._workers.min, self._workers.max
        return (
            f"waiting for workers: {num_ready} of at least {fewest} (at most {most}) are ready, "
            f"{self._crew.num_coming(self._seats)} are starting; {self._lacking()}; gives up after "
            f"{self._limit_s():g} s (faults.replacement_timeout_s)"
        )

    def review(
        self, members: Collection[H], calm_s: float, *, over: bool = False
    ) -> tuple[str, list[H]] | None:
        """While training runs: who should work instead, and why; None: it is well as it is.

        Args:
            members: who works.
            calm_s: how long training has run undisturbed.
            over: all steps are taken: whoever starts now comes too late, and takes time from those
                who save.
        """
        self._seats = self._look()
        is_calm = calm_s >= CALM_S and not over
        self._crew.tend(self._seats, hire=is_calm, refill=is_calm)
        ready = self._crew.ready(self._seats)
        size = self._size()
        if size is None:
            return None  # too few without those who leave: train with them as long as they last
        if any(member not in ready.values() for member in members):
            return "drain", pick(ready, size, members)
        if size > len(members) and is_calm and self._all_here():
            return "grow", pick(ready, size, members)
        return None

    def avoid(self, host: str) -> bool:
        """Keeps away from a node, as long as the fewest workers find room elsewhere.

        Returns:
            Whether that is new.
        """
        if host in self._avoided:
            return False
        self._avoided.add(host)
        self._places.avoid(self._avoided)
        return True

    def avoided_among(self, members: Collection[H]) -> list[str]:
        """Nodes to be avoided that are needed all the same, since there is too little room."""
        hosts = {seat.node_id: seat.host for seat in self._seats}
        return sorted(self._avoided & {hosts.get(member.node_id, "") for member in members})

    def _look(self) -> list[Seat]:
        return sparing(self._places.look(), self._avoided, fewest=self._workers.min)

    def _size(self) -> int | None:
        return best_size(
            len(self._crew.ready(self._seats)),
            fewest=self._workers.min,
            most=self._workers.max,
            shards=self._shards,
        )

    def _is_worth_starting(self, now: float) -> bool:
        if self._has_run:
            return True
        if self._possible_since is None:
            self._possible_since = now
        assert self._waiting_since is not None
        placing = any(seat.node_id is None for seat in self._seats)
        if placing and now - self._waiting_since < PLACING_S:
            return False
        return not self._crew.num_coming(self._seats) or now - self._possible_since > COMING_S

    def _all_here(self) -> bool:
        """Whether nobody else is about to be ready: parking once for all is enough."""
        now = self._clock()
        if not self._crew.num_coming(self._seats):
            self._coming_since = None
            return True
        if self._coming_since is None:
            self._coming_since = now
        return now - self._coming_since > COMING_S

    def _require_time(self, now: float, size: int | None) -> None:
        assert self._waiting_since is not None
        limit_s = self._limit_s()
        if size is None and now - self._waiting_since > limit_s:
            raise TimeoutError(
                f"{self._lacking()} after {limit_s:g} s: free the cluster, add nodes, lower "
                "workers.min or resources, or raise faults.replacement_timeout_s; the run goes on "
                "where it stopped when it is started again"
            )

    def _limit_s(self) -> float:
        limit_s = self._faults.replacement_timeout_s
        # That processes start is no wait for room; each of them has a limit of its own.
        return max(limit_s, START_S) if self._has_room() else limit_s

    def _has_room(self) -> bool:
        return sum(seat.usable for seat in self._seats) >= self._workers.min

    def _lacking(self) -> str:
        text = lacking(self._seats, fewest=self._workers.min, resources=self._resources)
        if not self._has_room():
            return text
        text = f"{text}, but {len(self._crew.ready(self._seats))} of their processes are ready"
        why = self._crew.why_failed
        return f"{text}; the last one that could not start: {why}" if why else text


def survives(members: Sequence[H], successors: Collection[H]) -> bool:
    """Whether somebody of a group is in the next one, who can hand the state over."""
    return any(member in successors for member in members)
