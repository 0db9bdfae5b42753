"""Workers that meet, and what becomes of those whose peer does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from samestep import parse_spec
from samestep.cluster import process
from samestep.cluster.ddp import PEER_MARGIN_S, _control_group
from samestep.cluster.rendezvous import FORM_S, Meeting, formed_group
from samestep.errors import PeerLostError


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting("127.0.0.1")
    process.set_meeting(made.place)
    yield made
    made.close()


def test_a_worker_alone_forms_a_group_and_lets_go_of_it(meeting: Meeting) -> None:
    with formed_group("gloo", world_rank=0, world_size=1, timeout_s=5.0) as group:
        assert group.size() == 1
    assert not dist.is_initialized()


def test_who_waits_for_a_worker_that_died_is_freed_when_the_meeting_ends(meeting: Meeting) -> None:
    told: list[str] = []

    def wait() -> None:
        try:
            with formed_group("gloo", world_rank=0, world_size=2, timeout_s=5.0):
                told.append("formed")
        except PeerLostError as error:
            told.append(str(error))

    store = dist.TCPStore("127.0.0.1", meeting.place["port"], wait_for_workers=False)
    num_before = store.num_keys()
    thread = threading.Thread(target=wait)
    started, pause = time.monotonic(), threading.Event()
    thread.start()
    while store.num_keys() == num_before:
        assert time.monotonic() - started < FORM_S, "nobody came to the meeting"
        pause.wait(0.01)
    del store
    meeting.close()
    thread.join(FORM_S)
    assert time.monotonic() - started < FORM_S / 2
    assert told[0].startswith("the group of 2 did not form: ")
    assert not dist.is_initialized()
    # The next one is named as in a process that has just started.
    again = Meeting("127.0.0.1")
    process.set_meeting(again.place)
    with formed_group("gloo", world_rank=0, world_size=1, timeout_s=5.0) as group:
        assert group.group_name == "0"
    again.close()


def timeout_s_of(group: Any) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_every_group_waits_as_long_as_the_job_says_and_not_for_half_an_hour(
    meeting: Meeting, reduction: str
) -> None:
    fields = {"workload": "m:C", "batch_size": 1, "max_steps": 1, "reduction": reduction}
    spec = parse_spec({**fields, "faults": {"hang_timeout_s": 77.0}})
    limit_s = 77.0 + PEER_MARGIN_S
    with formed_group("gloo", world_rank=0, world_size=1, timeout_s=limit_s) as group:
        control = _control_group(spec, group)
        assert timeout_s_of(group) == limit_s
        assert timeout_s_of(control) == limit_s
        assert (control is group) == (reduction == "exact")
        del group, control
