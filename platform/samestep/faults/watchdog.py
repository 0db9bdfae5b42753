"""Notices that a worker makes no progress, says where it stands, and ends what will not end.

A worker that waits for others is left alone: its wait has a timeout of its own. One that stands
still in code of its own (user code, loader, kernels) can't be interrupted from another thread, so
its process ends, after its stacks are safe; the group then goes on without it.

Code that holds the interpreter lock stops this thread too. Behind it stands a timer in C
(`faulthandler`), which this thread pushes back once a second: it fires only when the thread can't.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from samestep.faults.progress import WAITS_FOR_PEERS, Position, Progress
from samestep.names import THREAD_WATCHDOG

MAX_POLL_S: Final = 1.0
LOCKED_GRACE_S: Final = 10.0
REPORT_TIMEOUT_S: Final = 10.0
NATIVE_TIMEOUT_S: Final = 5.0
STDERR: Final = 2
EXIT_STATUS: Final = 86
"""What a process ends with when its watchdog ends it."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A worker that made no progress.

    Attributes:
        position: where it stands.
        still_s: seconds for which it has stood there.
        stacks: of all its threads, as text.
        ends: its process is about to end.
    """

    position: Position
    still_s: float
    stacks: str
    ends: bool

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "order": list(self.position.order),
            "place": str(self.position),
            "still_s": self.still_s,
            "stacks": self.stacks,
            "ends": self.ends,
        }


class Watchdog:
    """A thread that looks at a worker's progress.

    Args:
        progress: of the training thread.
        timeout_s: how long it may stand still.
        report: told of a stall, once for each position; bounded, since the process may have to
            end whether or not anybody listens.
        paused: whether standing still is fine at present (a debugger is open).
        may_exit: the process is a worker's own, and ends when it stands still in its own code.
        stack_file: where the timer in C writes the stacks; None: to the standard error.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        timeout_s: float,
        report: Callable[[Stall], None],
        paused: Callable[[], bool] = lambda: False,
        may_exit: bool = False,
        stack_file: Path | None = None,
    ) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._report = report
        self._paused = paused
        self._may_exit = may_exit
        self._file: TextIO | None = None
        if may_exit and stack_file is not None:
            self._file = stack_file.open("a", encoding="utf-8")
        # By number: sys.stderr may be no file at all.
        self._descriptor = self._file.fileno() if self._file is not None else STDERR
        self._told: Position | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_WATCHDOG, daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; may be repeated."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * MAX_POLL_S + REPORT_TIMEOUT_S)
        if self._may_exit:
            faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self) -> None:
        pause_s = min(MAX_POLL_S, self._timeout_s / 10)
        while not self._stopping.wait(pause_s):
            if self._may_exit:
                self._push_back()
            still_s, position = self._progress.still_s, self._progress.position
            if still_s <= self._timeout_s or self._paused():
                continue
            ends = self._may_exit and position.phase not in WAITS_FOR_PEERS
            if position != self._told:
                self._told = position
                self._tell(Stall(position=position, still_s=still_s, stacks=stacks(), ends=ends))
            # Looked at again: what was slow may have come through while the stacks were written.
            if ends and self._progress.position == position and not self._paused():
                os._exit(EXIT_STATUS)

    def _push_back(self) -> None:
        after_s = self._timeout_s + LOCKED_GRACE_S
        faulthandler.dump_traceback_later(after_s, exit=True, file=self._descriptor)

    def _tell(self, stall: Stall) -> None:
        thread = threading.Thread(
            target=self._tell_quietly, args=(stall,), name=f"{THREAD_WATCHDOG}-report", daemon=True
        )
        thread.start()
        thread.join(REPORT_TIMEOUT_S)

    def _tell_quietly(self, stall: Stall) -> None:
        try:
            self._report(stall)
        except Exception as error:
            sys.stderr.write(f"samestep: could not tell of a stall at {stall.position}: {error}\n")


def stacks() -> str:
    """Stacks of all threads of this process, by name; native ones too where py-spy is there."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    native = _native_stacks()
    return "\n".join([*parts, *([native] if native else [])])


def _native_stacks() -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--nonblocking", "--pid", str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=NATIVE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"py-spy:\n{done.stdout}" if done.returncode == 0 else ""
