"""The worker's side of the recorder: a thread that delivers records, in order, each once.

The training thread only puts records into a queue, which goes on in files where memory can't hold
it. Batches are numbered and acknowledged; one is under way at a time, and it is sent again,
unchanged, until its answer arrives. The link asks at least once a second even with nothing to send:
so the worker learns of a stop, of a divergence, and that its attempt is no longer the present one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from samestep.errors import RecorderError
from samestep.names import THREAD_LINK
from samestep.telemetry.record_queue import RecordQueue, decoded

if TYPE_CHECKING:
    from samestep.telemetry.recorder import Recorder

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 60.0
MAX_BATCH: Final = 10_000
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
CLOSE_S: Final = 5.0

logger = logging.getLogger(__name__)


class Target(Protocol):
    """Where a recorder is reached."""

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the recorder and returns its answer.

        Must return or raise within a bounded time. A `RecorderError` is the recorder's own
        refusal; anything else is taken as "away for now".
        """


class InProcess:
    """A recorder in this process; threads take turns."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any) -> Any:
        """Calls the recorder under a lock."""
        with self._lock:
            return getattr(self._recorder, method)(*args)


class Patient:
    """A target that is asked again while it is away: a recorder that died is started again.

    For calls that may be repeated: commit, finish, fail and verdict may, and an incident that is
    told twice is recorded once.
    """

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float = TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.once = target
        """The same for calls that are not worth repeating."""
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._sleep = sleep

    def call(self, method: str, *args: Any) -> Any:
        """Calls the recorder.

        Raises:
            RecorderError: it refuses, or was away for the whole time.
        """
        end, pause_s = self._monotonic() + self._timeout_s, FIRST_BACKOFF_S
        while True:
            try:
                return self.once.call(method, *args)
            except (ConnectionError, TimeoutError) as error:
                if self._monotonic() >= end:
                    raise RecorderError(
                        f"the recorder was away for {self._timeout_s:g} s ({method}): {error}"
                    ) from error
                logger.warning("%s waits for the recorder: %r", method, error)
            self._sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)


class Link:
    """Delivers a worker's records; `record` from one thread, the rest from any.

    Args:
        target: the recorder.
        attempt: the worker's attempt.
        sender: names the worker within the attempt.
        interval_s: least time between two batches, and longest between two questions.
        timeout_s: how long the recorder may be away before `flush` gives up.
        queue: for what waits.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        target: Target,
        attempt: int,
        sender: str,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        queue: RecordQueue | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._attempt = attempt
        self._sender = sender
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._queue = queue if queue is not None else RecordQueue()
        # The queue's oldest, until they are acknowledged.
        self._batch: list[Mapping[str, Any]] = []
        self._sequence = 0
        self._num_recorded = 0
        self._num_delivered = 0
        self._urgent_through = 0
        self._closing = False
        self._ack: Mapping[str, Any] = {}
        self._away_since: float | None = None
        self._last_error: BaseException | None = None
        self._broken: RecorderError | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_LINK, daemon=True)
        self._thread.start()

    @property
    def stop_requested(self) -> bool:
        """Whether the workers are asked to stop at the next step boundary."""
        return bool(self._ack.get("stop", False))

    @property
    def num_delivered(self) -> int:
        """How many of the records are in the ledger, in the order in which they were recorded."""
        return self._num_delivered

    @property
    def divergence(self) -> str | None:
        """What differs from the ledger, once something does: the attempt must end."""
        text = self._ack.get("divergence")
        return None if text is None else str(text)

    @property
    def refused(self) -> bool:
        """Whether the attempt is no longer the present one: the worker must end."""
        return bool(self._ack.get("refused", False))

    def record(self, data: Mapping[str, Any]) -> None:
        """Queues a record (its `to_json`); never waits for the recorder.

        After a refusal records are of no use to anybody and are let go.

        Raises:
            RecorderError: the link is broken or closed, or there is no room for what waits, in
                memory or on the disk.
        """
        with self._changed:
            if self._closing:
                raise RecorderError("the link is closed; record before closing it")
            if self._broken is not None:
                raise self._broken
            if self.refused:
                return
            was_in_memory = not self._queue.spooled_bytes
            self._queue.append(data)
            self._num_recorded += 1
            if was_in_memory and self._queue.spooled_bytes:
                logger.warning(
                    "attempt=%d %d records wait for the recorder; more go to a file (%s)",
                    self._attempt,
                    len(self._queue),
                    self._last_error or "it is slow",
                )

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything recorded so far is in the ledger.

        Args:
            timeout_s: how long to wait; default: the link's own timeout.

        Raises:
            RecorderError: the recorder was away for too long, refused the attempt, or the
                records; says which.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        end = self._monotonic() + limit_s
        with self._changed:
            wanted = self._num_recorded
            self._hurry()
            while self._num_delivered < wanted or self.refused:
                if self.refused:
                    raise RecorderError(
                        f"attempt {self._attempt} is refused: a later one has begun or the run "
                        "is over; this worker must end"
                    )
                if self._broken is not None:
                    raise self._broken
                left_s = end - self._monotonic()
                if left_s <= 0:
                    raise RecorderError(self._away(wanted - self._num_delivered, limit_s))
                self._changed.wait(left_s)

    def close(self) -> None:
        """Ends the thread after one last try to deliver what waits; never raises.

        Call `flush` first where the records matter.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
        with self._changed:
            self._queue.clear()
        left = self._num_recorded - self._num_delivered
        if left and not self.refused:
            logger.warning(
                "attempt=%d the link closes with %d records undelivered", self._attempt, left
            )

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            last = self._wait(backoff_s if self._away_since is not None else self._interval_s)
            try:
                self._send()
                backoff_s = FIRST_BACKOFF_S
            except RecorderError as error:
                self._break(error)
                return
            except Exception as error:  # whatever a target that is away raises, we try again
                self._note_away(error)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            if last or self.refused:
                return

    def _wait(self, pause_s: float) -> bool:
        """Sleeps until it is time to send; True when this is the last time."""
        end = self._monotonic() + pause_s
        with self._changed:
            while not self._closing:
                left_s = end - self._monotonic()
                if left_s <= 0 or (self._hurried() and self._away_since is None):
                    break
                self._changed.wait(left_s)
            return self._closing

    def _send(self) -> None:
        while True:
            with self._changed:
                oldest = [] if self._batch else self._queue.oldest(MAX_BATCH)
                self._sequence += bool(oldest)
            if oldest:  # decoded outside of the lock: the training thread may want it
                self._batch = [decoded(waiting) for waiting in oldest]
            batch, sequence = self._batch, self._sequence if self._batch else 0
            ack = self._target.call("push", self._attempt, self._sender, sequence, batch)
            if not self._take(ack, batch, sequence):
                return

    def _take(self, ack: Mapping[str, Any], batch: list[Mapping[str, Any]], sequence: int) -> bool:
        """Notes an answer; True when more is waiting that should go at once."""
        with self._changed:
            self._ack = dict(ack)
            if self._away_since is not None:
                away_s = self._monotonic() - self._away_since
                logger.warning("attempt=%d recorder back after %.1f s", self._attempt, away_s)
                self._away_since = self._last_error = None
            if "expected" in ack:
                raise RecorderError(
                    f"the recorder expects batch {ack['expected']} of worker {self._sender}, but "
                    f"{sequence} is the oldest not acknowledged: batches in between were lost"
                )
            if batch and not self.refused:
                if ack["acknowledged"] < sequence:
                    raise RecorderError(f"the recorder answered {dict(ack)} to batch {sequence}")
                self._num_delivered += len(batch)
                self._queue.drop(len(batch))
                self._batch = []
            if self.refused:
                self._queue.clear()
            self._changed.notify_all()
            more = self._hurried() or self._closing or len(self._queue) >= MAX_BATCH
            return bool(self._queue) and not self.refused and more

    def _hurry(self) -> None:
        self._urgent_through = self._num_recorded
        self._changed.notify_all()

    def _hurried(self) -> bool:
        return self._num_delivered < self._urgent_through

    def _break(self, error: RecorderError) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()
        logger.error("attempt=%d the recorder refuses a batch: %s", self._attempt, error)

    def _note_away(self, error: BaseException) -> None:
        with self._changed:
            if self._away_since is None:
                self._away_since = self._monotonic()
                logger.warning("attempt=%d recorder away, trying on: %r", self._attempt, error)
            self._last_error = error
            self._changed.notify_all()

    def _away(self, num_waiting: int, waited_s: float) -> str:
        return (
            f"{num_waiting} records of attempt {self._attempt} are not in the ledger after "
            f"{waited_s:.1f} s: "
            + (f"the recorder is away ({self._last_error!r})" if self._last_error else "it is slow")
        )
