"""Processes of this machine, as the kernel tells of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02
ENDED: Final = "Z"


def everyone() -> list[int]:
    """The ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def session_of(pid: int) -> int:
    """The id of a process's session; -1 where it is gone."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def command_of(pid: int) -> str:
    """A process's title, or its command line; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """A letter as `ps` shows it; `ENDED` for one that is gone too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ENDED


def members_of(session: int) -> list[int]:
    """The living processes of a session, those in process groups of their own too."""
    return [pid for pid in everyone() if session_of(pid) == session and state_of(pid) != ENDED]


def kill_session(session: int, timeout_s: float) -> None:
    """SIGKILL to all processes of a session, until none is left or the time is over."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while (alive := members_of(session)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pause.wait(POLL_S)
