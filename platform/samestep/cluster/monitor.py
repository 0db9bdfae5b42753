"""Watches a run from the driver: shows its status, and turns signals into a planned stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from samestep.cluster.budget import BudgetWatch
from samestep.errors import RecorderError, StorageError
from samestep.telemetry.link import Target

POLL_S = 0.5


class Monitor:
    """Polls the recorder for an observer; a stop asked for by a signal is passed on with it.

    The signal handler only sets a flag: the recorder may be in the middle of something.

    Args:
        target: the recorder.
        observer: shown its status.
        budget: of the run; a stop is planned when it is used up.
    """

    def __init__(
        self, target: Target, observer: Callable[[dict[str, Any]], None], budget: BudgetWatch
    ) -> None:
        self._budget = budget
        self._target = target
        self._observer = observer
        self._stop_reason: str | None = None
        self._has_been_asked = False
        self._seen = 0
        self._ended = threading.Event()

    def ask_to_stop(self, reason: str) -> None:
        """Plans a stop at the next step boundary."""
        self._stop_reason = self._stop_reason or reason

    def poll(self) -> None:
        """Passes a stop on and shows the status; a recorder that is away is left alone.

        So is one whose storage is full or away: it is asked again.
        """
        if self._stop_reason is None:
            self._stop_reason = self._budget.exhausted()
        try:
            if self._stop_reason is not None:
                # Again and again: an attempt that begins forgets what was asked before it.
                self._target.call("request_stop", self._stop_reason)
            status = self._target.call("status", self._seen)
        except (RecorderError, StorageError, OSError, TimeoutError):
            return
        self._seen = max([self._seen, *(item["number"] for item in status["messages"])])
        self._observer(status)

    def pause(self) -> None:
        """Tells the observer to leave the terminal alone for now."""
        self._observer({"paused": True, "messages": []})

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Polls from a thread of its own, where this thread is the one that trains."""
        thread = threading.Thread(target=self._run, name="samestep-monitor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            self.poll()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM plan a stop; a second SIGINT interrupts at once.

        Handlers can be set in the main thread only; elsewhere signals stay as they are.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT and self._has_been_asked:
                raise KeyboardInterrupt
            self._has_been_asked = True
            self.ask_to_stop("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

        before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            self.poll()
