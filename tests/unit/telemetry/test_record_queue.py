"""Records that wait: in order, whole, and in memory only as far as that is meant to hold them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import RecorderError
from samestep.telemetry.record_queue import RecordQueue, decoded

MakeStep = Callable[..., Any]


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["append", "drop", "look", "clear"]), st.integers(0, 9))
    ),
    in_memory=st.integers(1, 5),
    chunk_bytes=st.integers(1, 80),
)
def test_it_holds_what_a_list_would_whatever_lies_in_files(
    calls: list[tuple[str, int]], in_memory: int, chunk_bytes: int
) -> None:
    queue, model = RecordQueue(in_memory=in_memory, chunk_bytes=chunk_bytes), []
    for call, size in calls:
        if call == "append":
            for number in range(size):
                record = {"number": number, "text": "a\n\u2028b"}
                queue.append(record)
                model.append(record)
        elif call == "drop":
            queue.drop(size)
            model = model[size:]
        elif call == "clear" and size == 0:
            queue.clear()
            model = []
        oldest = list(map(decoded, queue.oldest(size)))
        assert oldest == model[: len(oldest)]
        assert bool(oldest) == bool(model and size)
        assert len(queue) == len(model)
        assert list(queue) == model
        assert (queue.spooled_bytes > 0) <= (len(model) > 0)


def test_a_step_is_the_same_when_it_comes_back_from_a_file(make_step: MakeStep) -> None:
    record = make_step(3, loss=float.fromhex("0x1.5bf0a8b145769p+1"), grad_norm=5e-324).to_json()
    queue = RecordQueue(in_memory=1)
    queue.append(record)
    queue.append(record)
    assert queue.spooled_bytes > 0
    assert list(queue) == [record, record]


def test_a_record_that_finds_no_room_is_not_in_and_the_others_stay() -> None:
    queue = RecordQueue(in_memory=1, max_bytes=30)
    queue.append({"number": 0})
    queue.append({"number": 1})
    with pytest.raises(RecorderError, match="2 records wait for the recorder, 14 bytes of them in"):
        queue.append({"number": 2, "text": "more than there is room for"})
    queue.append({"number": 3})
    assert [record["number"] for record in queue] == [0, 1, 3]


def test_a_line_that_the_disk_took_half_of_is_taken_away_again() -> None:
    queue = RecordQueue(in_memory=1)
    queue.append({"number": 0})
    queue.append({"number": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (queue.spooled_bytes + 5, before[1]))
    try:
        with pytest.raises(RecorderError, match="records wait for the recorder"):
            queue.append({"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    queue.append({"number": 3})
    assert [record["number"] for record in queue] == [0, 1, 3]
