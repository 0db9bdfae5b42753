"""The pool of plain processes that compute in the engine's tests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
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
ANSWER_S = 60.0
START_S = 60.0

Task = tuple[str, dict[str, Any]]
Answer = tuple[str, Any]


class Pool:
    """Plain processes that compute as workers do; kept over all tests, for imports cost seconds.

    `run` gives a task to each of the first processes at once and waits for all answers. When one
    does not answer in time all are ended, and started again for the next task.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._numbers = itertools.count()

    def run(self, tasks: Sequence[Task]) -> list[Answer]:
        if not self._processes:
            self._start()
        for connection, task in zip(self._connections, tasks, strict=False):
            connection.send(task)
        answers = []
        for number in range(len(tasks)):
            if not self._connections[number].poll(ANSWER_S):
                self.close()
                pytest.fail(f"process {number} of the pool did not answer: {tasks[number][0]}")
            try:
                answers.append(self._connections[number].recv())
            except EOFError:
                self.close()
                pytest.fail(f"process {number} of the pool died: {tasks[number][0]}")
        return answers

    def fresh_path(self) -> str:
        """A path that nothing lies at yet."""
        return str(self._folder / f"{next(self._numbers)}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        spec = parse_spec({"workload": "m:C", "batch_size": 1, "max_steps": 1})
        variables = {
            **os.environ,
            **environment(spec),
            "PYTHONPATH": str(PLATFORM),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        address = self.fresh_path()
        with Listener(address, family="AF_UNIX", backlog=NUM_PROCESSES) as listener:
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            for _ in range(NUM_PROCESSES):
                command = [sys.executable, str(FOLDER / "worker.py"), address]
                self._processes.append(subprocess.Popen(command, env=variables))
            self._connections = [listener.accept() for _ in range(NUM_PROCESSES)]
        for connection in self._connections:
            assert connection.poll(START_S), "a process of the pool did not start"
            assert connection.recv() == "ready"


def spec_of(workload: str, **fields: Any) -> dict[str, Any]:
    """A spec as plain data for a workload of cases.py; `args` and the rest by name."""
    defaults = {"batch_size": 10, "shards": 4, "max_steps": 100, "seed": 3}
    return {"workload": f"cases:{workload}", **defaults, **fields}


def gathered(pool: Pool, name: str, world_size: int, **arguments: Any) -> list[Answer]:
    where = pool.fresh_path()
    return pool.run(
        [
            (name, {**arguments, "where": where, "world_rank": r, "world_size": world_size})
            for r in range(world_size)
        ]
    )
