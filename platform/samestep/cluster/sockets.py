"""Connections between workers that end when nobody is there any more.

A machine that falls off the network, or a link that is cut, tells nobody: whoever waits for a
message of a worker there would wait as long as a step may take. So each connection that is silent
is asked after once a second, and one on which nothing is acknowledged for some seconds ends. A
process that is stopped, or computes, is not lost by that: its kernel acknowledges.

The kernel's own limits are not enough. What it asks (keep-alive) it asks only while nothing is on
its way, and its limit for what is on its way (TCP_USER_TIMEOUT) would end a connection to a worker
that is alive and does not read for a while. So a thread looks at what is on its way.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from samestep.names import THREAD_CONNECTIONS

SILENT_S: Final = 3
"""A connection on which nothing is acknowledged for so long is lost."""
ASK_S: Final = 1
LOOK_S: Final = 0.5
JOIN_S: Final = 5.0

_FILES: Final = "/proc/self/fd"
_SOCKET: Final = "socket:"
_TCP_INFO: Final = struct.Struct("8B13I")
_RETRANSMITS, _UNACKED, _LAST_ACK_MS = 2, 12, 20  # places in what the kernel tells


def open_sockets() -> frozenset[str]:
    """The names that the kernel has for this process's sockets; none elsewhere than on Linux."""
    return frozenset(_sockets())


@contextmanager
def silence_ends(*, but: frozenset[str]) -> Iterator[int]:
    """Ends connections that are silent, as long as the block lasts; gives how many it watches.

    Args:
        but: sockets that are left as they are: those there were before.
    """
    new = {name: number for name, number in _sockets().items() if name not in but}
    watched = {name for name, number in new.items() if _ask_after(name, number)}
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(watched, stop), name=THREAD_CONNECTIONS, daemon=True
    )
    if watched:
        thread.start()
    try:
        yield len(watched)
    finally:
        stop.set()
        if watched:
            thread.join(JOIN_S)


def _watch(watched: set[str], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        for name, number in _sockets().items():
            if name not in watched:
                continue
            with suppress(OSError), _held(name, number) as connection:
                if _is_lost(connection):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it


def _ask_after(name: str, number: int) -> bool:
    """Has the kernel ask after a connection; False for any other socket."""
    with suppress(OSError), _held(name, number) as it:
        if it.family in (socket.AF_INET, socket.AF_INET6) and it.type == socket.SOCK_STREAM:
            it.getpeername()  # fails for one that listens
            it.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
            it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
            it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // ASK_S - 1)
            return True
    return False


def _is_lost(connection: socket.socket) -> bool:
    """Whether what is on its way is sent again and again, and nothing has come back."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    fields = _TCP_INFO.unpack(told)
    is_sent_again = bool(fields[_UNACKED] and fields[_RETRANSMITS])
    return is_sent_again and int(fields[_LAST_ACK_MS]) > SILENT_S * 1000


def _held(name: str, number: int) -> socket.socket:
    """A socket of this process, by a descriptor of its own: nobody can close it meanwhile.

    Raises:
        OSError: it is closed, and the number may be another file's.
    """
    descriptor = os.dup(number)
    if os.readlink(f"{_FILES}/{descriptor}") != name:
        os.close(descriptor)
        raise OSError(f"{name} is closed")
    return socket.socket(fileno=descriptor)


def _sockets() -> dict[str, int]:
    """This process's sockets: their descriptors by name."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    for number in os.listdir(_FILES):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{_FILES}/{number}")
            if name.startswith(_SOCKET):
                found[name] = int(number)
    return found
