"""What the controller tells the recorder, from a thread of its own: restarts don't wait for it."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any, Final

from samestep.errors import RecorderError
from samestep.names import THREAD_NOTES
from samestep.telemetry.link import Patient, Target

CLOSE_S: Final = 30.0

logger = logging.getLogger(__name__)


class Notes:
    """Delivers calls in order; one that the recorder refuses is logged and left.

    Args:
        target: the run's recorder.
    """

    def __init__(self, target: Target) -> None:
        self._target = Patient(target)
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(1000)
        self._thread = threading.Thread(target=self._run, name=THREAD_NOTES, daemon=True)
        self._thread.start()

    def put(self, method: str, *args: Any) -> None:
        """Queues a call; never waits."""
        try:
            self._queue.put_nowait((method, args))
        except queue.Full:
            logger.warning("the recorder is behind; %s is left out: %s", method, args)

    def close(self) -> None:
        """Waits until all is told."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            method, args = item
            try:
                self._target.call(method, *args)
            except RecorderError as error:
                logger.warning("the recorder refused %s: %s", method, error)
            except Exception:  # a thread that tells must outlive what it can't tell
                logger.exception("%s could not be told", method)
