"""The recorder of a run lives with worker 0; the other workers reach it over a socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from samestep.telemetry.link import InProcess, Target
from samestep.telemetry.recorder import Recorder

JOIN_S = 10.0


class Remote:
    """The recorder as another worker sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any) -> Any:
        with self._lock:  # a worker's threads take turns
            self._connection.send((method, args))
            raised, value = self._connection.recv()
        if raised:
            raise value
        return value


@contextlib.contextmanager
def target_of(
    run_uri: str, spec_yaml: str, address: str, world_rank: int, world_size: int
) -> Iterator[Target]:
    """The one recorder of the run, from each of its workers."""
    if world_rank > 0:
        with _connected(address) as connection:
            yield Remote(connection)
        return
    with Listener(address, family="AF_UNIX", backlog=world_size) as listener:
        recorder = Recorder(run_uri, run="test", spec_yaml=spec_yaml)
        target = InProcess(recorder)
        threads = [
            threading.Thread(target=_answer, args=(listener, target)) for _ in range(1, world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            yield target
        finally:
            for thread in threads:
                thread.join(JOIN_S)
            recorder.close()


def _connected(address: str) -> Connection:
    while True:  # bounded by the pool's own limit
        try:
            return Client(address, family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            threading.Event().wait(0.01)


def _answer(listener: Listener, target: Target) -> None:
    with listener.accept() as connection:
        while True:
            try:
                method, args = connection.recv()
            except EOFError:
                return
            try:
                answer = (False, target.call(method, *args))
            except Exception as error:
                answer = (True, error)
            connection.send(answer)
