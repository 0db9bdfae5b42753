"""How many workers there should be, given the room."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster.seats import Seat, best_size, lacking, sparing
from samestep.exact.tree import traffic_factor

NUMBERS = st.integers(0, 40)


@given(available=NUMBERS, fewest=st.integers(1, 20), more=NUMBERS, shards=st.integers(1, 200))
def test_the_size_is_allowed_has_room_and_is_as_fast_as_any(
    available: int, fewest: int, more: int, shards: int
) -> None:
    most = fewest + more
    size = best_size(available, fewest=fewest, most=most, shards=shards)
    allowed = range(fewest, min(available, most) + 1)
    if not allowed:
        assert size is None
        return
    assert size in allowed
    rounds = math.ceil(shards / size)
    assert rounds == min(math.ceil(shards / n) for n in allowed)
    equal = [n for n in allowed if math.ceil(shards / n) == rounds]
    assert traffic_factor(shards, size) == min(traffic_factor(shards, n) for n in equal)


def test_three_workers_are_not_taken_where_two_are_as_fast_and_send_less() -> None:
    assert best_size(3, fewest=1, most=4, shards=4) == 2
    assert best_size(3, fewest=3, most=4, shards=4) == 3
    assert best_size(3, fewest=1, most=4, shards=3) == 3
    assert best_size(7, fewest=1, most=8, shards=8) == 4


def test_what_is_missing_is_told_with_the_seats_on_nodes_that_leave() -> None:
    seats = [
        Seat(number=0, node_id="a", usable=True),
        Seat(number=1, node_id="b", usable=False),
        Seat(number=2, node_id=None, usable=False),
    ]
    assert lacking(seats, fewest=2, resources={"CPU": 1.0}) == (
        "1 of at least 2 workers of {'CPU': 1.0} have room, 1 more on nodes that leave"
    )


@given(
    hosts=st.lists(st.sampled_from(["a", "b", "c"]), max_size=8),
    unusable=st.sets(st.integers(0, 7)),
    avoided=st.sets(st.sampled_from(["a", "b"])),
    fewest=st.integers(1, 4),
)
def test_nodes_are_avoided_only_where_the_fewest_workers_find_room_elsewhere(
    hosts: list[str], unusable: set[int], avoided: set[str], fewest: int
) -> None:
    seats = [
        Seat(number=number, node_id=host, usable=number not in unusable, host=host)
        for number, host in enumerate(hosts)
    ]
    spared = sparing(seats, avoided, fewest=fewest)
    elsewhere = [seat for seat in seats if seat.usable and seat.host not in avoided]
    if len(elsewhere) >= fewest:
        assert [seat for seat in spared if seat.usable] == elsewhere
    else:
        assert spared == seats
