"""Runs one sink in a thread of its own, off the ledger, so that it fails alone.

The recorder only says that there is something new, which takes no time whatever the sink is doing.
What the sink could not take stays in the ledger and is tried again, with pauses that grow to half
a minute, for as long as the run lives: a try costs little, and an outage of a night must not need
anybody in the morning. It is told at once and then ever more rarely.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from samestep.names import THREAD_SINK_PREFIX
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.sink import RunInfo, Sink, StartOver
from samestep.telemetry.spool import START, Spool
from samestep.telemetry.tenure import Tenure

MAX_LINES: Final = 500
MAX_NOTES: Final = 100
MAX_REPORTS: Final = 10_000
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
REMINDER_S: Final = 600.0
"""A failure is told of again when it has lasted for so long, and each time that has doubled."""
IDLE_S: Final = 60.0
DRAIN_S: Final = 40.0
FAILING_DRAIN_S: Final = 5.0
CLOSE_S: Final = 5.0
NICE: Final = 10
MAX_NICE: Final = 19
MAX_SHARE: Final = 0.005
"""Of a processor, for deliveries while a run goes on: after a costly one the pause is longer."""
MAX_PAUSE_S: Final = 10.0

logger = logging.getLogger(__name__)


class Outlet:
    """Delivers a run's ledger to a sink, from where the sink's last delivery ended.

    Args:
        sink: what to feed; `started` is called here and now.
        info: the run; `say` is replaced by one that is safe in any thread, see `notes`.
        tenure: of the recorder: once another has the run, the sink leaves it alone; None: no other
            can take it.
        num_lines: lines of the ledger.
        monotonic: clock in seconds.
        first_backoff_s: pause after a first failure.

    Raises:
        InputError: the sink refuses the start.
    """

    def __init__(
        self,
        sink: Sink,
        info: RunInfo,
        tenure: Tenure | None = None,
        *,
        num_lines: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self.sink = sink
        self._run = info.name
        self._tenure = tenure or Tenure(info.run, take=False)
        self._monotonic = monotonic
        self._first_backoff_s = first_backoff_s
        self._changed = threading.Condition()
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._latest: StepRecord | None = None
        self._reports: deque[WorkerReport] = deque()
        self._num_dropped = 0
        self._num_lines = num_lines
        self._num_announced = 1  # what the ledger holds already
        self._has_grown = True
        self._num_delivered = self._num_failures = 0
        self._hurry = self._closing = False
        self._failing_since: float | None = None
        self._reminder_s = REMINDER_S
        self._spool = Spool(info.run, sink.started(replace(info, say=self._notes.append)))
        self._thread = threading.Thread(
            target=self._work, name=f"{THREAD_SINK_PREFIX}{sink.name}", daemon=True
        )
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether the last delivery failed."""
        return self._failing_since is not None

    @property
    def num_waiting(self) -> int:
        """Lines of the ledger that the sink has not taken yet."""
        return max(0, self._num_lines - self._spool.position.num_lines)

    def announce(self, latest: StepRecord | None, num_lines: int) -> None:
        """Says that the ledger has grown, or that a step was taken again; never waits long."""
        with self._changed:
            self._has_grown, self._num_lines = True, num_lines
            self._latest = latest or self._latest
            self._count()

    def report(self, report: WorkerReport) -> None:
        """Hands a worker's report on with the next delivery; the oldest makes room for it."""
        if not self.sink.wants(report):
            return
        with self._changed:
            if len(self._reports) == MAX_REPORTS:
                self._reports.popleft()
                self._num_dropped += 1
            self._reports.append(report)
            self._count()

    def _count(self) -> None:
        """Counts what there is to deliver; thousands of workers must not wake a thread each."""
        was_idle = self._num_delivered == self._num_announced
        self._num_announced += 1
        if was_idle:
            self._changed.notify_all()

    def notes(self) -> list[str]:
        """What the sink has said since the last time."""
        found = []
        while self._notes:
            found.append(self._notes.popleft())
        return found

    def status(self) -> dict[str, Any]:
        """The sink's part of the run's status."""
        return self.sink.status()

    def drain(self, timeout_s: float, *, failing_timeout_s: float) -> bool:
        """Waits until all of the ledger is delivered, or a try at it fails.

        Args:
            timeout_s: how long to wait while deliveries work.
            failing_timeout_s: how long, at most, where the last one failed; one that is due
                later is made now.

        Returns:
            Whether everything arrived.
        """
        started = self._monotonic()
        with self._changed:
            wanted, failures = self._num_announced, self._num_failures
            self._hurry = True
            self._changed.notify_all()
            while self._num_delivered < wanted and not self._closing:
                if self._num_failures > failures:
                    break
                limit_s = failing_timeout_s if self.failing else timeout_s
                left_s = started + limit_s - self._monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._hurry = False
            return self._num_delivered >= wanted

    def ask_to_close(self) -> None:
        """Lets the thread end as soon as it can."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Ends the thread; one that hangs in its sink for longer is left behind. Never raises."""
        self.ask_to_close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "run=%s the sink %s did not end within %.0f s and is left behind",
                self._run,
                self.sink.name,
                timeout_s,
            )

    def _work(self) -> None:
        _let_others_go_first()
        backoff_s = self._first_backoff_s
        pause_s, is_steady = 0.0, False  # to connect is dear, and no measure of what follows
        while self._wait(pause_s):
            started_s = time.thread_time()
            try:
                if not self._tenure.holds():  # another recorder delivers from here on
                    break
                self._deliver()
            except StartOver:
                self._spool.seek(START)
            except Exception as error:  # whatever a sink raises, it fails alone
                pause_s, is_steady = backoff_s, False
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
                self._note_failure(error)
            else:
                cost_s = time.thread_time() - started_s if is_steady else 0.0
                pause_s = max(self.sink.interval_s, min(cost_s / MAX_SHARE, MAX_PAUSE_S))
                backoff_s, is_steady = self._first_backoff_s, True
        try:
            if self._tenure.surely_holds():
                self.sink.close()
            else:
                self.sink.abandon()
        except Exception as error:  # it ends anyway
            logger.warning("run=%s closing the sink %s: %r", self._run, self.sink.name, error)
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _wait(self, pause_s: float) -> bool:
        """Sleeps until there is something to deliver and the pause is over; False at the end."""
        over = self._monotonic() + pause_s
        with self._changed:
            while not self._closing:
                is_due = self._num_delivered < self._num_announced
                left_s = over - self._monotonic()
                if is_due and (left_s <= 0 or self._hurry):
                    self._hurry = self._hurry and not self.failing
                    return True
                self._changed.wait(left_s if is_due else IDLE_S)
        return False

    def _deliver(self) -> None:
        with self._changed:
            announced, latest, self._latest = self._num_announced, self._latest, None
            reports, self._reports = self._reports, deque()
            num_dropped, self._num_dropped = self._num_dropped, 0
            more, self._has_grown = self._has_grown, False
        try:
            while more and not self._closing:
                lines = self._spool.read(MAX_LINES)
                more = len(lines) == MAX_LINES
                self.sink.take(lines, more=more)
                if lines:
                    self._spool.seek(lines[-1].position)
        except BaseException:
            self._has_grown = True
            raise
        if latest is not None:
            self.sink.live(latest)
        if reports:
            self.sink.reports(reports, num_dropped)
        self._note_success()  # before anybody who waits for it goes on
        with self._changed:
            if not more:
                self._num_delivered = announced
            self._changed.notify_all()

    def _note_failure(self, error: Exception) -> None:
        now = self._monotonic()
        if self._failing_since is None:
            self._failing_since, self._reminder_s = now, REMINDER_S
            self._tell(self.sink.explain(error))
        elif now - self._failing_since >= self._reminder_s:
            lasted_s = now - self._failing_since
            while self._reminder_s <= lasted_s:
                self._reminder_s *= 2
            self._tell(
                f"for {lasted_s / 60:.0f} min now, with {self.num_waiting} records waiting: "
                f"{self.sink.explain(error)}"
            )
        with self._changed:
            self._num_failures += 1
            self._changed.notify_all()

    def _tell(self, text: str) -> None:
        logger.info("run=%s %s", self._run, text)  # people see the note
        self._notes.append(text)

    def _note_success(self) -> None:
        if self._failing_since is not None:
            away_s = self._monotonic() - self._failing_since
            self._failing_since = None
            self._notes.append(f"{self.sink.name} is back after {away_s:.0f} s")


def _let_others_go_first() -> None:
    """This thread alone gets a lower priority: workers may compute on the same cores."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + NICE, MAX_NICE))


class Outlets:
    """All outlets of a run, as its recorder handles them.

    Args:
        sinks: what to feed.
        info: the run; `waiting` is replaced by what is known here.
        tenure: of the recorder, as for an `Outlet`.
        num_lines: lines of the ledger.

    Raises:
        InputError: a sink refuses the start; the others are closed.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        info: RunInfo,
        tenure: Tenure | None = None,
        *,
        num_lines: int = 0,
    ) -> None:
        self._outlets: list[Outlet] = []
        info = replace(info, waiting=self.waiting)
        try:
            for sink in sinks:
                self._outlets.append(Outlet(sink, info, tenure, num_lines=num_lines))
        except BaseException:
            self.close(CLOSE_S)
            raise

    def __bool__(self) -> bool:
        return bool(self._outlets)

    def announce(self, latest: StepRecord | None, num_lines: int) -> None:
        """Says that the ledger has grown to so many lines, or that a step was taken again."""
        for outlet in self._outlets:
            outlet.announce(latest, num_lines)

    def waiting(self) -> dict[str, int]:
        """Lines of the ledger that each sink has not taken yet, by its name; from any thread."""
        return {outlet.sink.name: outlet.num_waiting for outlet in self._outlets}

    def report(self, report: WorkerReport) -> None:
        """Hands on a worker's report, for display."""
        for outlet in self._outlets:
            outlet.report(report)

    def notes(self) -> list[str]:
        """What the sinks have said since the last time."""
        return [note for outlet in self._outlets for note in outlet.notes()]

    def status(self) -> dict[str, Any]:
        """What the sinks add to the status of the run."""
        return {key: value for outlet in self._outlets for key, value in outlet.status().items()}

    def drain(self, timeout_s: float, failing_timeout_s: float) -> list[str]:
        """Waits until everything is delivered; the names of the sinks that lack something."""
        end = time.monotonic() + timeout_s
        lacking = [
            outlet.sink.name
            for outlet in self._outlets
            if not outlet.drain(
                max(0.0, end - time.monotonic()), failing_timeout_s=failing_timeout_s
            )
        ]
        for outlet in self._outlets:
            outlet.sink.wait_until_seen()
        return lacking

    def close(self, timeout_s: float) -> None:
        """Ends all threads; the outlets can't be used any more."""
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            outlet.ask_to_close()
        end = time.monotonic() + timeout_s
        for outlet in outlets:
            outlet.close(max(0.0, end - time.monotonic()))
