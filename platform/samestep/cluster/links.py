"""Network links for nodes on this machine, so that one can be cut. Needs root and Linux's `ip`.

Each node gets a network of its own that a pair of virtual cards ties to a bridge. `close` takes all
of it away.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from typing import Final

from samestep.errors import InputError
from samestep.names import Env

NETWORK: Final = "198.18"
"""Of the addresses that are set apart for tests of networks (RFC 2544)."""
CARD: Final = "eth0"
BEGIN: Final = (
    *("unshare", "--net", "--", "sh", "-c"),
    *('read -r _ && exec "$@" </dev/null', "sh"),
)
"""Before a command: it waits, in a network of its own, until `GO` is on its standard input."""
GO: Final = b"\n"
COMMAND_S: Final = 10.0
POLL_S: Final = 0.01


def why_impossible() -> str:
    """Why no link can be made here; empty where it can."""
    if os.geteuid() != 0:
        return "it takes root's rights"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    return f"{', '.join(missing)} is missing" if missing else ""


class Links:
    """A bridge, and the links from it to nodes.

    Raises:
        InputError: they can't be made here.
    """

    environment: Final = {str(Env.GLOO_SOCKET_IFNAME): CARD}
    """What processes behind a link need."""

    def __init__(self) -> None:
        why = why_impossible()
        if why:
            raise InputError(f"no network link can be made and cut here: {why}")
        self._number = os.getpid()
        self._tied: list[int] = []
        self._bridge = f"ss{self._number}"
        self._host = f"{NETWORK}.{self._number % 256}"
        self.address = f"{self._host}.1"
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except InputError:
            self.close()
            raise

    def address_of(self, number: int) -> str:
        """The address of a node; its number is 2 to 254."""
        return f"{self._host}.{number}"

    def tie(self, number: int, pid: int) -> None:
        """Links the network of a process, started by `BEGIN`, to the bridge."""
        place = f"/proc/{pid}/ns/net"
        deadline, pause = time.monotonic() + COMMAND_S, threading.Event()
        while os.readlink(place) == os.readlink("/proc/self/ns/net"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} had no network within {COMMAND_S:g} s")
            pause.wait(POLL_S)
        end = self._end_of(number)
        _ip("link", "add", end, "type", "veth", "peer", "name", CARD, "netns", str(pid))
        self._tied.append(number)
        _ip("link", "set", end, "master", self._bridge, "up")
        inside = ("nsenter", f"--net={place}", "ip")
        _run(*inside, "address", "add", f"{self.address_of(number)}/24", "dev", CARD)
        _run(*inside, "link", "set", CARD, "up")
        _run(*inside, "link", "set", "lo", "up")

    def cut(self, number: int) -> None:
        """Nothing passes any more; nobody is told."""
        _ip("link", "set", self._end_of(number), "down")

    def mend(self, number: int) -> None:
        """All passes again, with what was on its way."""
        _ip("link", "set", self._end_of(number), "up")

    def close(self) -> None:
        """Takes it all away; the kernel is late with the links of ended processes."""
        for number in self._tied:
            with suppress(InputError):  # the kernel was there first
                _ip("link", "delete", self._end_of(number))
        self._tied.clear()
        _ip("link", "delete", self._bridge)

    def _end_of(self, number: int) -> str:
        return f"{self._bridge}-{number}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise InputError(f"{' '.join(command)} failed: {done.stderr.strip()}")
