"""A link that is cut tells nobody; whoever waits at its end learns of it all the same."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from samestep.cluster.links import BEGIN, GO, Links
from samestep.cluster.sockets import SILENT_S, open_sockets, silence_ends

CALL = 'exec 3<>"/dev/tcp/$0/$1" && echo here >&3 && exec sleep 60'
PATIENCE_S = 5.0 * SILENT_S

pytestmark = pytest.mark.root


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


@contextmanager
def called(links: Links, number: int) -> Iterator[socket.socket]:
    """A connection from a process behind a link, which says one thing and never reads."""
    with socket.create_server((links.address, 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [*BEGIN, "bash", "-c", CALL, links.address, port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as behind:
            try:
                links.tie(number, behind.pid)
                assert behind.stdin is not None
                behind.stdin.write(GO)
                behind.stdin.close()
                listener.settimeout(PATIENCE_S)
                connection, (host, _) = listener.accept()
                with connection:
                    assert host == links.address_of(number)
                    assert connection.recv(10) == b"here\n"
                    connection.settimeout(PATIENCE_S)
                    yield connection
            finally:
                os.killpg(behind.pid, signal.SIGKILL)


def what_ends(connection: socket.socket) -> bytes | int | None:
    """What waiting for a message brings."""
    try:
        return connection.recv(10)
    except OSError as error:
        return error.errno


def fill(connection: socket.socket) -> None:
    """Sends until there is no room; fails on a connection that has ended."""
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(1 << 20))


def test_connections_over_a_link_that_is_cut_end_and_one_to_a_slow_reader_does_not(
    links: Links,
) -> None:
    others = open_sockets()
    with (
        called(links, 11) as waits,
        called(links, 12) as sends,
        called(links, 13) as full,
        silence_ends(but=others),
    ):
        full.setblocking(False)
        fill(full)
        links.cut(11)
        links.cut(12)
        cut_at, pause = time.monotonic(), threading.Event()
        sends.sendall(b"on its way")
        assert what_ends(waits) == errno.ETIMEDOUT
        assert what_ends(sends) == b""
        assert time.monotonic() - cut_at < SILENT_S + 3
        while time.monotonic() - cut_at < SILENT_S + 1:
            pause.wait(0.1)
        fill(full)
