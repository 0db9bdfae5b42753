"""Reading the logs that workers left with a run, at once or as they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.names import ATTEMPT_PREFIX, LOG_SUFFIX, LOGS_DIR, WORKER_PREFIX
from samestep.telemetry import lease as leases
from samestep.telemetry.logs import log_name

POLL_S: Final = 0.3
CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, order=True)
class WorkerLog:
    """The log of one worker in one attempt."""

    attempt: int
    world_rank: int

    @property
    def name(self) -> str:
        """Inside the run directory."""
        return log_name(self.attempt, self.world_rank)


def list_logs(run: Storage) -> list[WorkerLog]:
    """All logs of a run, by attempt and worker."""
    found = []
    for folder in run.list(LOGS_DIR):
        attempt = folder.removeprefix(ATTEMPT_PREFIX)
        if not folder.startswith(ATTEMPT_PREFIX) or not attempt.isdigit():
            continue
        for name in run.list(f"{LOGS_DIR}/{folder}"):
            rank = name.removeprefix(WORKER_PREFIX).removesuffix(LOG_SUFFIX)
            if name.startswith(WORKER_PREFIX) and name.endswith(LOG_SUFFIX) and rank.isdigit():
                found.append(WorkerLog(attempt=int(attempt), world_rank=int(rank)))
    return sorted(found)


def choose_logs(
    run: Storage, *, attempt: int | None = None, world_rank: int | None = None
) -> list[WorkerLog]:
    """The logs of an attempt (None: the last one that has any) and a worker (None: all).

    Raises:
        InputError: there are none; says which there are.
    """
    every = list_logs(run)
    if not every:
        when = "" if run.is_local else "; where storage is an object store they come at its end"
        raise InputError(f"{run.uri} has no logs: no attempt of it began to train{when}")
    number = every[-1].attempt if attempt is None else attempt
    chosen = [log for log in every if log.attempt == number]
    if not chosen:
        attempts = sorted({log.attempt for log in every})
        raise InputError(
            f"{run.uri} has no logs of attempt {number}; it has those of "
            f"{', '.join(map(str, attempts))}"
        )
    if world_rank is None:
        return chosen
    found = [log for log in chosen if log.world_rank == world_rank]
    if not found:
        ranks = ", ".join(str(log.world_rank) for log in chosen)
        raise InputError(f"attempt {number} has no log of worker {world_rank}; it has {ranks}")
    return found


def lines_of(run: Storage, log: WorkerLog) -> Iterator[str]:
    """The lines of a log, without their ends."""
    path = run.local_path
    if path is None:
        yield from run.read(log.name).decode("utf-8", "replace").splitlines()
        return
    with open(path / log.name, encoding="utf-8", errors="replace") as file:
        for line in file:
            yield line.rstrip("\n")


def follow(
    run: Storage,
    *,
    attempt: int | None = None,
    world_rank: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[WorkerLog, str]]:
    """The lines of a run's logs as they come, until nobody trains it any more.

    Starts with the attempt that `choose_logs` would choose, and goes on to later ones unless one
    was asked for.

    Args:
        run: the run directory; on local storage.
        attempt: only this one.
        world_rank: only this worker.
        sleep: waits that many seconds.

    Raises:
        InputError: storage is an object store, whose logs come when an attempt ends.
    """
    if not run.is_local:
        raise InputError(
            f"the logs in {run.uri} can't be followed: an object store gets them when an attempt "
            "ends; look at the output of the train command, or at Ray's own logs"
        )
    tails: dict[WorkerLog, _Tail] = {}
    first = attempt
    while True:
        present = leases.holder(run)
        alive = present is not None and present.alive
        logs = list_logs(run)
        if first is None and logs:
            first = logs[-1].attempt
        for log in logs:
            wanted = log.attempt == attempt if attempt is not None else log.attempt >= (first or 0)
            if wanted and world_rank in (None, log.world_rank):
                tail = tails.setdefault(log, _Tail(f"{run.root}/{log.name}"))
                for line in tail.lines():
                    yield log, line
        if not alive:  # looked at before the logs were read, so that nothing is missed
            for log, tail in tails.items():
                if tail.rest:
                    yield log, tail.rest
            return
        sleep(POLL_S)


class _Tail:
    """What was added to a file since one last looked."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    @property
    def rest(self) -> str:
        """The last line, where it has no end yet."""
        return self._partial.decode("utf-8", "replace")

    def lines(self) -> Iterator[str]:
        while True:
            with open(self._path, "rb") as file:
                file.seek(self._offset, os.SEEK_SET)
                data = file.read(CHUNK_BYTES)
            if not data:
                return
            self._offset += len(data)
            *whole, self._partial = (self._partial + data).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
