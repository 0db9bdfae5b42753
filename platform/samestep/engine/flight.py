"""One save behind the training: this worker's part written, then followed to its end."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from samestep.checkpoint.image import Image
from samestep.checkpoint.job import Written
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import Writer
from samestep.checkpoint.writing import Outline
from samestep.errors import DivergenceError, RecorderError, SamestepError
from samestep.names import THREAD_SAVE
from samestep.telemetry.link import Link, Target
from samestep.telemetry.saves import Answer, Part

logger = logging.getLogger(__name__)

MAX_WRITE_S: Final = 3600.0
FLUSH_S: Final = 120.0
FIRST_PAUSE_S: Final = 0.02
MAX_PAUSE_S: Final = 0.5
NEWS_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Cargo:
    """What is saved.

    Attributes:
        outline: of the state; the live tensors that it refers to are not looked at.
        image: holds the tensors, unchanged until the flight has ended.
        meta: goes into the manifest.
        part: what is told to the recorder, as far as it is known before; of digests that are
            empty those of the image are taken.
    """

    outline: Outline
    image: Image
    meta: CheckpointMeta
    part: Part


class Flight:
    """A save under way, in a thread of its own.

    Args:
        cargo: what is saved.
        run: the run directory.
        writer: writes this worker's part.
        target: the recorder.
        link: worker 0's: the manifest waits for its ledger lines.
        attempt: number of the attempt.

    Attributes:
        step: of the state.
        answer: how the save ended; None until it has, or where nobody knows.
        problem: what must end the training; None while nothing must.
    """

    answer: Answer | None = None
    problem: SamestepError | None = None

    def __init__(
        self,
        cargo: Cargo,
        *,
        run: Storage,
        writer: Writer,
        target: Target,
        link: Link | None,
        attempt: int,
    ) -> None:
        self.step = cargo.outline.step
        self._cargo = cargo
        self._run = run
        self._writer = writer
        self._target = target
        self._link = link
        self._attempt = attempt
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._fly, name=THREAD_SAVE, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; False when it has not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Lets the thread end soon; its part, if it is not written, counts as failed."""
        self._abandoned.set()
        self._writer.abort()

    def _fly(self) -> None:
        try:
            part = self._written()
            if self._link is not None:
                self._link.flush(FLUSH_S)
            self._follow(part)
        except DivergenceError as error:
            self._await_news()
            self.problem = error
            self.answer = Answer(state="failed", message=str(error))
        except RecorderError as error:
            if self._link is not None and self._link.refused:
                self.problem = error
            self.answer = Answer(state="failed", message=str(error))
        except Exception as error:  # it ends the save, never the training
            logger.exception("attempt=%d saving step %d failed", self._attempt, self.step)
            self.answer = Answer(state="failed", message=f"{type(error).__name__}: {error}")

    def _await_news(self) -> None:
        """The recorder has written the incident; the link hears of it with its next answer.

        Until then the attempt would write one more when it fails.
        """
        deadline = time.monotonic() + NEWS_S
        while self._link is not None and self._link.divergence is None:
            if time.monotonic() > deadline or self._abandoned.wait(FIRST_PAUSE_S):
                return

    def _written(self) -> Part:
        cargo, part = self._cargo, self._cargo.part
        job = cargo.outline.job(self._run, part.world_rank, cargo.image)
        written = Written(files={})
        try:
            if job.files:
                written = self._writer.write(job, cargo.image.memory, MAX_WRITE_S)
            manifest = None
            if part.world_rank == 0:
                manifest = cargo.outline.manifest(written, cargo.meta).to_json()
        except SamestepError as error:
            return replace(part, error=str(error))
        digests = [
            digest or cargo.outline.digest_of(number, cargo.image)
            for number, digest in enumerate(part.digests)
        ]
        if self._abandoned.is_set():  # another save may have overwritten the image by now
            return replace(part, error="it took too long and was given up")
        return replace(part, files=written.files, manifest=manifest, digests=digests)

    def _follow(self, part: Part) -> None:
        """Tells the recorder until it says how the save ended."""
        pause_s = FIRST_PAUSE_S
        while True:
            answer = Answer(**self._target.call("part", self._attempt, part.to_json()))
            if answer.state != "waiting":
                self.answer = answer
                return
            if self._abandoned.wait(pause_s):
                self.answer = Answer(state="failed", message=f"it waited {answer.message}")
                return
            pause_s = min(pause_s * 2, MAX_PAUSE_S)
