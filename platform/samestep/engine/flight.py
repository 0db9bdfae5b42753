"""One save behind the training: the state copied, this worker's part written and followed."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from samestep.checkpoint.job import Written
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.marks import GIVEN_UP
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import Writer
from samestep.engine.copying import Copying
from samestep.errors import CheckpointError, DivergenceError, RecorderError, SamestepError
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
        copying: of the state into an image, which nobody else changes until the flight has ended.
        meta: goes into the manifest.
        part: what is told to the recorder, as far as it is known before.
        compares: whether this worker digests every part, for the recorder to compare.
        patience_s: for so long the writer may rest.
    """

    copying: Copying
    meta: CheckpointMeta
    part: Part
    compares: bool
    patience_s: float


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
        copied: set when the live state may change again.
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
        self.step = cargo.copying.outline.step
        self.copied = threading.Event()
        self._cargo = cargo
        self._run = run
        self._writer = writer
        self._target = target
        self._link = link
        self._attempt = attempt
        self._abandoned = threading.Event()
        self._is_written = False
        self._thread = threading.Thread(target=self._fly, name=THREAD_SAVE, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end, and has it hurried; False when it has not come in time."""
        if timeout_s > 0 and not self._is_written:
            self._writer.hurry()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Lets the thread end soon; its part, if it is not written, counts as failed."""
        self._abandoned.set()
        self._writer.abort()

    def _fly(self) -> None:
        try:
            part = self._written()
            # What could not be written needs no ledger, which may be on the storage that is full.
            failed = part.error is not None and not self._abandoned.is_set()
            if self._link is not None and not failed:
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
        try:
            live = self._copy()
            cargo.copying.wait_for_others(self._abandoned)
            written, manifest = self._write()
        except SamestepError as error:
            return replace(part, error=str(error))
        finally:
            self._is_written = True
        outline, image = cargo.copying.outline, cargo.copying.image
        numbers = range(part.num_parts if cargo.compares else 0)
        digests = [live.get(n) or outline.digest_of(n, image) for n in numbers]
        if self._abandoned.is_set():  # another save may have overwritten the image by now
            return replace(part, error=GIVEN_UP)
        return replace(part, files=written.files, manifest=manifest, digests=digests)

    def _copy(self) -> dict[int, str]:
        """As `Copying.run`; raises no error but ours, which the recorder is told: others wait."""
        try:
            return self._cargo.copying.run(self._abandoned)
        except SamestepError:
            raise
        except Exception as error:
            logger.exception("attempt=%d step %d not copied", self._attempt, self.step)
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        finally:
            self.copied.set()

    def _write(self) -> tuple[Written, str | None]:
        """This worker's files, and the manifest if it is worker 0."""
        outline, image = self._cargo.copying.outline, self._cargo.copying.image
        world_rank = self._cargo.part.world_rank
        job = outline.job(self._run, world_rank, image)
        job = replace(job, patience_s=self._cargo.patience_s)
        written = Written(files={})
        if job.files:
            written = self._writer.write(job, image.memory, MAX_WRITE_S)
        manifest = outline.manifest(written, self._cargo.meta) if world_rank == 0 else None
        return written, manifest.to_json() if manifest is not None else None

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
