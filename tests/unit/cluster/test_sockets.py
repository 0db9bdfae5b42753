from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from samestep.cluster.sockets import SILENT_S, limit_silence, open_sockets

OPTION = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_only_connections_that_are_new_are_limited(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as old:
        others = open_sockets()
        with socket.create_connection(listener.getsockname()) as new:
            assert limit_silence(others) >= 1
            assert new.getsockopt(*OPTION) == SILENT_S * 1000
            assert new.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert old.getsockopt(*OPTION) == 0
            assert listener.getsockopt(*OPTION) == 0
            new.sendall(b"as before")
            first, _ = listener.accept()
            second, _ = listener.accept()
            with first, second:
                assert second.recv(20) == b"as before"
