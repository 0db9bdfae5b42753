"""The pool of plain processes that compute in the engine's tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from samestep import parse_spec
from samestep.exact.numerics import environment

FOLDER = Path(__file__).resolve().parent
PLATFORM = FOLDER.parents[2] / "platform"
NUM_PROCESSES = 4
START_S = 100.0
ANSWER_S = 60.0

Task = tuple[str, dict[str, Any]]
Answer = tuple[str, Any]


class Pool:
    """Plain processes that compute as workers do; kept over all tests, for imports cost seconds.

    `run` gives a task to each of the first processes at once and waits for all answers. When one
    dies or does not answer in time all are ended, and later tests say so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parent: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._numbers = itertools.count()

    def start(self) -> None:
        spec = parse_spec({"workload": "m:C", "batch_size": 1, "max_steps": 1})
        variables = {
            **os.environ,
            **environment(spec),
            "PYTHONPATH": str(PLATFORM),
            "GLOO_SOCKET_IFNAME": "lo",
            # Two threads each of four processes would spin on few cores.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        address = self.fresh_path()
        command = [sys.executable, str(FOLDER / "worker.py"), address, str(NUM_PROCESSES)]
        with Listener(address, family="AF_UNIX", backlog=NUM_PROCESSES) as listener:
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            self._parent = subprocess.Popen(command, env=variables, start_new_session=True)
            deadline = time.monotonic() + START_S
            while len(self._connections) < NUM_PROCESSES:
                try:
                    self._connections.append(listener.accept())
                except TimeoutError:
                    ended = self._parent.poll() is not None
                    if ended or time.monotonic() > deadline:
                        self.close()
                        pytest.fail("the processes of the pool did not start", pytrace=False)

    def run(self, tasks: Sequence[Task]) -> list[Answer]:
        if self._parent is None:
            pytest.fail("the pool was ended by an earlier test: see there", pytrace=False)
        for connection, task in zip(self._connections, tasks, strict=False):
            connection.send(task)
        answers = []
        for connection, (name, _) in zip(self._connections, tasks, strict=False):
            try:
                if not connection.poll(ANSWER_S):
                    raise TimeoutError(f"no answer in {ANSWER_S} s")
                answers.append(connection.recv())
            except (TimeoutError, EOFError) as error:
                self.close()
                pytest.fail(f"task {name} of process {len(answers)}: {error!r}", pytrace=False)
        return answers

    def fresh_path(self) -> str:
        """A path that nothing lies at yet."""
        return str(self._folder / f"{next(self._numbers)}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._parent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._parent.pid, signal.SIGKILL)  # a session of its own
            self._parent.wait()
        self._parent, self._connections = None, []


def spec_of(workload: str, **fields: Any) -> dict[str, Any]:
    """A spec as plain data for a workload of cases.py (or module:Class); fields by name."""
    defaults = {"batch_size": 10, "shards": 4, "max_steps": 100, "seed": 3}
    workload = workload if ":" in workload else f"cases:{workload}"
    return {"workload": workload, **defaults, **fields}


def gathered(pool: Pool, name: str, world_size: int, **arguments: Any) -> list[Answer]:
    """The answers of `world_size` workers of one group."""
    where = pool.fresh_path()
    return pool.run(
        [
            (name, {**arguments, "where": where, "world_rank": r, "world_size": world_size})
            for r in range(world_size)
        ]
    )
