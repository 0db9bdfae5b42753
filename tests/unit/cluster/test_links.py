"""A link that is cut tells nobody; whoever waits at its end learns of it from the kernel."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from samestep.cluster.links import BEGIN, GO, Links, why_impossible
from samestep.cluster.sockets import SILENT_S, limit_silence, open_sockets

NODE = 11
CALL = 'exec 3<>"/dev/tcp/$0/$1" && echo here >&3 && exec sleep 60'

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def test_a_connection_over_a_link_that_is_cut_ends_within_seconds(links: Links) -> None:
    others = open_sockets()
    with socket.create_server((links.address, 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [*BEGIN, "bash", "-c", CALL, links.address, port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as behind:
            try:
                links.tie(NODE, behind.pid)
                assert behind.stdin is not None
                behind.stdin.write(GO)
                behind.stdin.close()
                listener.settimeout(10)
                connection, (host, _) = listener.accept()
                with connection:
                    assert host == links.address_of(NODE)
                    assert connection.recv(10) == b"here\n"
                    assert limit_silence(others) == 1
                    connection.settimeout(5 * SILENT_S)
                    links.cut(NODE)
                    cut_at = time.monotonic()
                    with pytest.raises(TimeoutError) as caught:
                        connection.recv(10)
                    assert caught.value.errno == errno.ETIMEDOUT
                    assert time.monotonic() - cut_at < SILENT_S + 3
            finally:
                os.killpg(behind.pid, signal.SIGKILL)
