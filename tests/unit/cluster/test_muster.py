"""When a group starts, with whom, and when it should be another."""

from __future__ import annotations

from typing import Any

import pytest
from hands import Cluster, FakeHand

from samestep import parse_spec
from samestep.cluster.crew import START_S
from samestep.cluster.muster import (
    CALM_S,
    COMING_S,
    TELL_S,
    TELL_STARTING_S,
    Muster,
    survives,
)


def mustered(
    cluster: Cluster, *, replacement_timeout_s: float = 600.0, **workers: int
) -> Muster[FakeHand]:
    spec: dict[str, Any] = {"workload": "m:C", "batch_size": 8, "shards": 4, "max_steps": 1}
    spec["faults"] = {"replacement_timeout_s": replacement_timeout_s}
    return Muster(
        parse_spec({**spec, "workers": workers}),
        resources={"CPU": 1.0},
        places=cluster,
        crew=cluster.crew,
        clock=cluster.clock,
    )


def test_a_first_group_waits_for_all_who_are_coming_but_not_for_ever() -> None:
    cluster = Cluster("a", "b", ready=False)
    muster = mustered(cluster, min=1, max=2)
    assert muster.assemble([]) is None
    cluster.hired[0].ready = True
    assert muster.assemble([]) is None
    cluster.now += COMING_S + 0.1
    assert muster.assemble([]) == [cluster.hired[0]]


def test_a_restart_takes_who_is_ready_and_hires_nobody() -> None:
    cluster = Cluster("a", "a", num_spares=0)
    muster = mustered(cluster, min=1, max=2)
    first = muster.assemble([])
    assert first is not None
    assert len(first) == 2
    first[0].dead, cluster.ready = True, False
    assert muster.assemble(first) == [first[1]]
    assert len(cluster.hired) == 2


def test_a_restart_that_lacks_workers_hires_and_waits_and_tells_what_is_missing() -> None:
    cluster = Cluster("a", None, num_spares=0)
    muster = mustered(cluster, min=2, max=2)
    assert muster.assemble([]) is None
    cluster.now += 601
    with pytest.raises(TimeoutError, match=r"1 of at least 2 workers of .* after 600 s: .*min"):
        muster.assemble([])


def test_a_wait_for_room_is_told_once_and_soon_and_a_later_one_again() -> None:
    cluster = Cluster("a", None, None, num_spares=0)
    muster = mustered(cluster, min=2, max=3)
    assert muster.waits_for() == ""
    assert muster.assemble([]) is None
    assert muster.waits_for() == ""  # it may be over in a moment
    cluster.now += TELL_S
    assert muster.waits_for() == (
        "waiting for workers: 1 of at least 2 (at most 3) are ready, 0 are starting; 1 of at least "
        "2 workers of {'CPU': 1.0} have room; gives up after 600 s (faults.replacement_timeout_s)"
    )
    assert muster.waits_for() == ""
    cluster.nodes[1], cluster.ready = "b", True
    members = muster.assemble([])
    assert members is not None
    assert len(members) == 2
    cluster.nodes[1] = None
    assert muster.assemble(members) is None
    cluster.now += TELL_S
    assert muster.waits_for().startswith("waiting for workers: 1 of at least 2")


def test_processes_that_only_start_are_given_longer_before_the_wait_is_told() -> None:
    cluster = Cluster("a", "b", ready=False, num_spares=0)
    muster = mustered(cluster, min=2, max=2)
    assert muster.assemble([]) is None
    cluster.now += TELL_S
    assert muster.waits_for() == ""
    cluster.now += TELL_STARTING_S - TELL_S
    assert "0 of at least 2 (at most 2) are ready, 2 are starting" in muster.waits_for()
    cluster.hired[-1].dead, cluster.hired[-1].why = True, "no module named data"
    cluster.now += 601
    told = r"2 of at least 2 .* have room, but 0 of their .*could not start: no module named data"
    with pytest.raises(TimeoutError, match=told):
        muster.assemble([])


def test_a_short_limit_for_room_does_not_count_while_processes_only_start() -> None:
    cluster = Cluster("a", "b", ready=False, num_spares=0)
    muster = mustered(cluster, min=2, max=2, replacement_timeout_s=10)
    assert muster.assemble([]) is None
    cluster.now += START_S - 1
    assert muster.assemble([]) is None
    cluster.nodes[1] = None
    with pytest.raises(TimeoutError, match=r"^1 of at least 2 workers of .* after 10 s: "):
        muster.assemble([])
    cluster.nodes[1] = "b"
    cluster.now += 2
    with pytest.raises(TimeoutError, match=r"0 of their processes are ready.* after 300 s: "):
        muster.assemble([])


def test_a_group_grows_once_training_is_calm_and_all_are_there() -> None:
    cluster = Cluster("a", "b", None, None, num_spares=0)
    muster = mustered(cluster, min=1, max=4)
    assert muster.assemble([]) is None  # two seats are pending
    cluster.now += 2
    members = muster.assemble([])
    assert members is not None
    assert len(members) == 2
    cluster.nodes, cluster.ready = ["a", "b", "c", "d"], False
    assert muster.review(members, calm_s=0.0) is None
    num_hired = len(cluster.hired)
    assert muster.review(members, calm_s=CALM_S, over=True) is None
    assert len(cluster.hired) == num_hired  # nobody could come in time
    assert muster.review(members, calm_s=CALM_S) is None
    assert [hand.node_id for hand in cluster.hired[num_hired:]] == ["c", "d"]
    for hand in cluster.hired:
        hand.ready = True
    assert muster.review(members, calm_s=CALM_S, over=True) is None
    found = muster.review(members, calm_s=CALM_S)
    assert found is not None
    why, successors = found
    assert (why, len(successors)) == ("grow", 4)
    assert survives(members, successors)


def test_a_drained_node_shrinks_the_group_unless_too_few_are_left() -> None:
    cluster = Cluster("a", "b")
    members = mustered(cluster, min=1, max=2).assemble([])
    assert members is not None
    cluster.unusable = {1}
    assert mustered(cluster, min=1, max=2).review(members, calm_s=9) == ("drain", [members[0]])
    assert mustered(cluster, min=2, max=2).review(members, calm_s=9) is None
    cluster.nodes.append("c")
    found = mustered(cluster, min=2, max=2).review(members, calm_s=9)
    assert found is not None
    assert [hand.node_id for hand in found[1]] == ["a", "c"]


def test_a_node_that_computed_wrongly_is_left_as_soon_as_there_is_room_elsewhere() -> None:
    cluster = Cluster("a", "b")
    muster = mustered(cluster, min=2, max=2)
    members = muster.assemble([])
    assert members is not None
    assert muster.avoid("host-a")
    assert not muster.avoid("host-a")  # known already
    assert cluster.avoided == {"host-a"}
    assert muster.assemble(members) == members  # too little room without it
    assert muster.avoided_among(members) == ["host-a"]
    assert muster.review(members, calm_s=CALM_S) is None
    cluster.nodes.append("c")
    found = muster.review(members, calm_s=CALM_S)
    assert found is not None
    why, successors = found
    assert why == "drain"
    assert [hand.node_id for hand in successors] == ["b", "c"]
    assert muster.avoided_among(successors) == []
    cluster.nodes[1] = None  # another node goes: better a doubtful one than none
    assert muster.review(successors, calm_s=CALM_S) is not None
