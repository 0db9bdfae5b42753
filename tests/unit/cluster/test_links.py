"""A link that is cut tells nobody; whoever waits at its end learns of it all the same."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from samestep.cluster.links import BEGIN, GO, Links, why_impossible
from samestep.cluster.sockets import SILENT_S, open_sockets, silence_ends

NODE = 11
CALL = 'exec 3<>"/dev/tcp/$0/$1" && echo here >&3 && exec sleep 60'
PATIENCE_S = 5.0 * SILENT_S
MORE_THAN_FITS = bytes(64 << 20)

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


@contextmanager
def called(links: Links) -> Iterator[socket.socket]:
    """A connection from a process behind a link, which says one thing and never reads."""
    with socket.create_server((links.address, 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [*BEGIN, "bash", "-c", CALL, links.address, port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as behind:
            try:
                links.tie(NODE, behind.pid)
                assert behind.stdin is not None
                behind.stdin.write(GO)
                behind.stdin.close()
                listener.settimeout(PATIENCE_S)
                connection, (host, _) = listener.accept()
                with connection:
                    assert host == links.address_of(NODE)
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


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_connection_over_a_link_that_is_cut_ends_within_seconds(
    links: Links, is_sending: bool
) -> None:
    others = open_sockets()
    with called(links) as connection, silence_ends(but=others):
        links.cut(NODE)
        cut_at = time.monotonic()
        if is_sending:
            connection.sendall(b"on its way")
        assert what_ends(connection) == (b"" if is_sending else errno.ETIMEDOUT)
        assert time.monotonic() - cut_at < SILENT_S + 3


def test_a_connection_to_a_process_that_does_not_read_stays(links: Links) -> None:
    others = open_sockets()
    with called(links) as connection, silence_ends(but=others):
        connection.settimeout(SILENT_S + 3.0)
        with pytest.raises(TimeoutError, match=r"^timed out$"):  # of the test's own patience
            connection.sendall(MORE_THAN_FITS)
