from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from samestep.cluster.sockets import open_sockets, silence_ends
from samestep.names import THREAD_CONNECTIONS

KEEP_ALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_only_connections_that_are_new_are_watched(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as old:
        others = open_sockets()
        new = socket.create_connection(listener.getsockname())
        first, _ = listener.accept()
        second, _ = listener.accept()
        with new, first, second, silence_ends(but=others) as num_watched:
            assert num_watched == 3  # both ends of the new one, and the other end of the old one
            assert new.getsockopt(*KEEP_ALIVE) == 1
            assert (old.getsockopt(*KEEP_ALIVE), listener.getsockopt(*KEEP_ALIVE)) == (0, 0)
            assert THREAD_CONNECTIONS in [thread.name for thread in threading.enumerate()]
            new.sendall(b"as before")
            assert second.recv(20) == b"as before"


def test_where_nothing_is_new_nothing_is_watched() -> None:
    with silence_ends(but=open_sockets()) as num_watched:
        assert num_watched == 0
        assert THREAD_CONNECTIONS not in [thread.name for thread in threading.enumerate()]
