"""Seats: room for one worker each, kept over all attempts of a run.

A seat is a placement group of a single bundle. Those that Ray has placed on usable nodes are the
size that the worker group can have: nothing is probed, and placing costs a restart no time.
Pending seats are the demand that Ray's autoscaler sees. The seat of a node that died is asked for
anew: Ray would place the old one again, but until there is room it tries so without a pause, which
takes a core of the head (Ray 2.60; https://github.com/ray-project/ray/pull/65007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from samestep.exact.tree import traffic_factor

PLACED: Final = "CREATED"
LOST: Final = "RESCHEDULING"
NODE_ID_LABEL: Final = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A seat as it is now.

    Attributes:
        number: counted from 0; it stays the same.
        node_id: where it is placed; None while it is pending.
        usable: a worker may sit there: placed, on a node that is alive and not being drained.
        host: name of that node; empty while it is pending.
    """

    number: int
    node_id: str | None
    usable: bool
    host: str = ""


class Seats:
    """The seats of a run.

    Args:
        num_seats: most workers.
        resources: of one worker, in Ray's names.
        draining: ids of the nodes that are being drained.
    """

    def __init__(
        self,
        num_seats: int,
        resources: Mapping[str, float],
        draining: Callable[[], Collection[str]],
    ) -> None:
        self._draining = draining
        self._resources = dict(resources)
        self._groups: dict[int, PlacementGroup] = {}
        self._renewed: set[int] = set()
        self._num_made = 0
        self._avoided: frozenset[str] = frozenset()
        for _ in range(num_seats):
            self._add()

    def look(self) -> list[Seat]:
        """All seats, by number.

        A seat on a node that is being drained, or is to be avoided, stays where it is until the
        node is gone. So another one, which can be placed elsewhere, is asked for at once.
        """
        table: dict[str, Any] = placement_group_table()
        hosts = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"]}
        avoided = [node_id for node_id, host in hosts.items() if host in self._avoided]
        draining = set(self._draining())
        seats = []
        for number, group in list(self._groups.items()):
            entry = table.get(group.id.hex(), {})
            if entry.get("state") == LOST:
                remove_placement_group(self._groups.pop(number))
                if number not in self._renewed:
                    self._add()
                continue
            placed = entry.get("state") == PLACED
            node_id = str(entry["bundles_to_node_id"][0]) if placed else None
            if number in self._renewed and node_id not in hosts:
                remove_placement_group(self._groups.pop(number))
                continue
            if node_id in [*draining, *avoided] and number not in self._renewed:
                self._renewed.add(number)
                self._add(besides=avoided)
            usable = node_id in hosts and node_id not in draining
            host = hosts.get(node_id or "", "")
            seats.append(Seat(number=number, node_id=node_id, usable=usable, host=host))
        return seats

    def avoid(self, hosts: Collection[str]) -> None:
        """From now on asks for room on other nodes than these."""
        self._avoided = frozenset(hosts)

    def group(self, number: int) -> PlacementGroup:
        """The placement group of a seat."""
        return self._groups[number]

    def close(self) -> None:
        """Gives all seats back."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}

    def _add(self, *, besides: Sequence[str] = ()) -> None:
        elsewhere: dict[str, Any] = {}
        if besides:
            selector = {NODE_ID_LABEL: f"!in({', '.join(besides)})"}
            elsewhere = {"bundle_label_selector": [selector]}
        self._groups[self._num_made] = placement_group(
            [self._resources], strategy="PACK", **elsewhere
        )
        self._num_made += 1


def sparing(seats: Sequence[Seat], avoided: Collection[str], *, fewest: int) -> list[Seat]:
    """The seats, those on nodes to be avoided not usable; as they are where too few would be left.

    Args:
        seats: as they are now.
        avoided: names of nodes.
        fewest: workers that must find room elsewhere.
    """
    spared = [replace(s, usable=s.usable and s.host not in avoided) for s in seats]
    return spared if sum(seat.usable for seat in spared) >= fewest else list(seats)


def best_size(num_available: int, *, fewest: int, most: int, shards: int) -> int | None:
    """How many workers to train with; None: there are too few.

    The least time per step counts first: it is set by the worker with the most shards. Of the
    numbers that are equally fast there the one with the cheapest traffic is taken, then the
    smallest: 3 workers compute 4 shards no faster than 2 do, and send more.
    """
    candidates = range(fewest, min(num_available, most) + 1)
    return min(
        candidates,
        key=lambda n: (math.ceil(shards / n), traffic_factor(shards, n), n),
        default=None,
    )


def lacking(seats: Collection[Seat], *, fewest: int, resources: Mapping[str, float]) -> str:
    """What a run waits for that can't be placed, for a message."""
    num_usable = sum(seat.usable for seat in seats)
    drained = sum(seat.node_id is not None and not seat.usable for seat in seats)
    text = f"{num_usable} of at least {fewest} workers of {dict(resources)} have room"
    return f"{text}, {drained} more on nodes that leave" if drained else text
