"""Connections between workers that end when nobody is there any more.

A machine that falls off the network, or a link that is cut, tells nobody: whoever waits for a
message of a worker there would wait as long as a step may take. So the kernel asks, once a second,
whether the other side still acknowledges; one that does not is lost within seconds. A process that
is stopped, or computes, is not: its kernel answers.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Final

ASK_S: Final = 1
"""A connection that has been silent for so long is asked after, and then each so many seconds."""
SILENT_S: Final = 3
"""One that acknowledges nothing for so long is lost."""

_FILES: Final = "/proc/self/fd"
_SOCKET: Final = "socket:"


def open_sockets() -> frozenset[str]:
    """The names that the kernel has for this process's sockets; none elsewhere than on Linux."""
    return frozenset(_sockets())


def limit_silence(but: frozenset[str]) -> int:
    """Makes connections end that are silent; gives how many.

    Args:
        but: names of sockets that are left as they are.
    """
    num_limited = 0
    for name, descriptor in _sockets().items():
        if name in but:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as it:
            if it.family in (socket.AF_INET, socket.AF_INET6) and it.type == socket.SOCK_STREAM:
                it.getpeername()  # fails for one that listens
                it.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
                it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
                it.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // ASK_S - 1)
                it.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
                num_limited += 1
    return num_limited


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
