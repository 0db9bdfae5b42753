"""Who sits where, with processes that tests move by hand."""

from __future__ import annotations

import itertools

import pytest
from hands import Cluster, FakeHand
from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster.crew import AGAIN_S, MAX_AGAIN_S, START_S, SUSPECT_S, pick


def staffed(*nodes: str | None, num_spares: int = 1) -> tuple[Cluster, dict[int, FakeHand]]:
    """A cluster whose usable seats are taken and whose spares are ready."""
    cluster = Cluster(*nodes, num_spares=num_spares)
    for _ in range(num_spares + 1):
        cluster.crew.tend(cluster.look(), hire=True, refill=True)
    return cluster, cluster.crew.ready(cluster.look())


def test_each_usable_seat_gets_a_process_and_each_node_its_spares() -> None:
    cluster, ready = staffed("a", "a", "b", None, num_spares=2)
    assert {number: hand.node_id for number, hand in ready.items()} == {0: "a", 1: "a", 2: "b"}
    spares = [hand.node_id for hand in cluster.hired if hand.seat is None]
    assert sorted(spares) == ["a", "a", "b", "b"]


def test_a_dead_workers_seat_goes_to_the_spare_of_its_node_at_once() -> None:
    cluster, ready = staffed("a", "b")
    ready[0].dead = True
    num_hired = len(cluster.hired)
    cluster.crew.tend(cluster.look(), hire=False, refill=False)
    now = cluster.crew.ready(cluster.look())
    assert now[1] is ready[1]
    assert (now[0].node_id, now[0].seat, now[0].dead) == ("a", None, False)
    assert len(cluster.hired) == num_hired


def test_without_a_spare_nobody_is_hired_unless_asked() -> None:
    cluster, ready = staffed("a", "a", num_spares=0)
    ready[0].dead = True
    cluster.crew.tend(cluster.look(), hire=False, refill=True)
    assert list(cluster.crew.ready(cluster.look())) == [1]
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert list(cluster.crew.ready(cluster.look())) == [0, 1]


def test_one_who_is_not_ready_is_coming() -> None:
    cluster = Cluster("a", ready=False)
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert cluster.crew.ready(cluster.look()) == {}
    assert cluster.crew.num_coming(cluster.look()) == 1


def test_spares_wait_for_those_who_come_to_a_seat() -> None:
    cluster = Cluster("a", ready=False)
    for _ in range(2):
        cluster.crew.tend(cluster.look(), hire=True, refill=True)
    assert [hand.seat for hand in cluster.hired] == [0]
    cluster.hired[0].ready = True
    cluster.crew.tend(cluster.look(), hire=True, refill=True)
    assert [hand.seat for hand in cluster.hired] == [0, None]


def test_a_process_whose_seat_is_gone_is_ended() -> None:
    cluster, ready = staffed("a", "b")
    del cluster.nodes[1]
    cluster.crew.tend(cluster.look(), hire=False, refill=False)
    assert ready[1].ended
    assert not ready[0].ended


def test_one_that_hangs_in_its_imports_makes_room_for_another() -> None:
    cluster = Cluster("a", ready=False)
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    cluster.now += START_S - 1
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert len(cluster.hired) == 1
    cluster.now += 2
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert [hand.ended for hand in cluster.hired] == [True, False]


def test_where_processes_die_while_they_start_the_next_comes_later_each_time() -> None:
    cluster = Cluster("a", ready=False)
    times = []
    for _ in range(4000):
        num_before = len(cluster.hired)
        cluster.crew.tend(cluster.look(), hire=True, refill=False)
        if len(cluster.hired) > num_before:
            times.append(cluster.now)
        cluster.hired[-1].dead = True
        cluster.now += 0.1
    pauses = [later - one for one, later in itertools.pairwise(times)]
    assert pauses[0] == pytest.approx(0.1)  # once may be chance
    assert pauses[1:4] == pytest.approx([2 * AGAIN_S, 3 * AGAIN_S, 4 * AGAIN_S], abs=0.3)
    assert max(pauses) == pytest.approx(MAX_AGAIN_S, abs=0.3)


def test_a_worker_on_a_drained_node_works_on_until_it_is_let_go() -> None:
    cluster, ready = staffed("a", "b")
    cluster.unusable = {0}
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert not ready[0].ended
    assert list(cluster.crew.ready(cluster.look())) == [1]
    cluster.crew.let_go(cluster.look(), [ready[1]])
    assert ready[0].ended
    assert not ready[1].ended


def test_a_seat_that_was_placed_anew_gets_a_process_there() -> None:
    cluster, ready = staffed("a", "b")
    cluster.nodes[0] = "b"
    cluster.crew.tend(cluster.look(), hire=True, refill=False)
    assert ready[0].ended
    assert cluster.crew.ready(cluster.look())[0].node_id == "b"


def test_a_suspect_node_is_kept_away_from_for_a_while() -> None:
    cluster, _ = staffed("a", "b")
    cluster.crew.suspect("a")
    assert list(cluster.crew.ready(cluster.look())) == [1]
    cluster.now += SUSPECT_S + 1
    assert list(cluster.crew.ready(cluster.look())) == [0, 1]


def test_members_of_the_group_before_come_first_and_stay_in_the_order_of_seats() -> None:
    _, ready = staffed("a", "a", "a")
    assert pick(ready, 2, [ready[2]]) == [ready[0], ready[2]]
    assert pick(ready, 3, []) == [ready[0], ready[1], ready[2]]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["kill", "move", "drain", "tend", "refill"]), st.integers(0, 3)),
    max_size=30,
)


@given(actions=ACTIONS)
def test_whatever_happens_no_seat_has_a_dead_process_and_nobody_is_forgotten(
    actions: list[tuple[str, int]],
) -> None:
    cluster, _ = staffed("a", "a", "b", "c")
    for action, number in actions:
        alive = [hand for hand in cluster.hired if not hand.dead]
        if action == "kill" and alive:
            alive[number % len(alive)].dead = True
        elif action == "move":
            cluster.nodes[number] = {"a": "b", "b": None, None: "c"}.get(cluster.nodes[number], "a")
        elif action == "drain":
            cluster.unusable ^= {number}
        cluster.crew.tend(cluster.look(), hire=True, refill=action == "refill")
        seats = cluster.look()
        ready = cluster.crew.ready(seats)
        assert all(not hand.dead for hand in ready.values())
        assert {n for n, _ in ready.items()} == {seat.number for seat in seats if seat.usable}
        assert all(seats[n].node_id == hand.node_id for n, hand in ready.items())
        # Every process that lives is one that the crew can end.
        assert {id(h) for h in cluster.hired if not h.dead} <= {
            id(h) for h in cluster.crew.everyone
        }
    cluster.crew.close()
    assert all(hand.dead for hand in cluster.hired)
