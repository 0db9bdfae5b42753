"""Logs are followed until nobody trains the run any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyarrow import fs

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.replay.logs import follow
from samestep.telemetry import lease as leases
from samestep.telemetry.logs import log_name

MakeRun = Callable[..., Storage]


def test_lines_come_as_they_are_written_and_of_later_attempts_too(make_run: MakeRun) -> None:
    run = make_run("a")
    lease = leases.acquire(run)
    run.append(log_name(1, 0), b"old\n")
    run.append(log_name(2, 0), b"one\nha")
    script: list[Callable[[], object]] = [
        lambda: run.append(log_name(2, 0), b"lf\n"),
        lambda: run.append(log_name(3, 1), b"two\nno end"),
        lease.release,
    ]
    lines = list(follow(run, sleep=lambda _: script.pop(0)()))
    assert [(log.attempt, log.world_rank, line) for log, line in lines] == [
        (2, 0, "one"),
        (2, 0, "half"),
        (3, 1, "two"),
        (3, 1, "no end"),
    ]
    assert [line for _, line in follow(run, attempt=1)] == ["old"]
    assert [line for _, line in follow(run, attempt=3, world_rank=0)] == []


def test_logs_in_an_object_store_cannot_be_followed() -> None:
    memory, _ = fs.FileSystem.from_uri("mock://")
    run = Storage(root="bucket/run", filesystem=memory, scheme="s3")
    with pytest.raises(InputError, match="can't be followed"):
        next(follow(run))
