"""One save behind the training: the state copied, this worker's part written and followed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from samestep.checkpoint.job import Written
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.marks import GIVEN_UP
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import Writer
from samestep.engine.copying import Copying
from samestep.engine.pace import Pace
from samestep.errors import CheckpointError, DivergenceError, RecorderError, SamestepError
from samestep.names import THREAD_SAVE, THREAD_SAVE_GIVEN_UP
from samestep.telemetry.link import Link, Target
from samestep.telemetry.saves import Answer, Part

logger = logging.getLogger(__name__)

MAX_WRITE_S: Final = 3600.0
FLUSH_S: Final = 120.0
LET_GO_S: Final = 0.5
NEWS_S: Final = 5.0
NEWS_POLL_S: Final = 0.02
OF_ANOTHER: Final = "another worker of its node did not copy the state"


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
        pace: of the questions how it stands; None: what is right for so many workers.

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
        pace: Pace | None = None,
    ) -> None:
        self.step = cargo.copying.outline.step
        self.copied = threading.Event()
        self._cargo = cargo
        self._run = run
        self._writer = writer
        self._target = target
        self._link = link
        self._attempt = attempt
        self._pace = pace or Pace(cargo.part.num_parts)
        self._abandoned = threading.Event()
        self._is_written = self._is_told = self._is_given_up = self._is_left = False
        self._doing = "copying the state"
        self._thread = threading.Thread(target=self._fly, name=THREAD_SAVE, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end, and has it hurried; False when it has not come in time."""
        if timeout_s > 0:
            self._pace.hurry()
            if not self._is_written:
                self._writer.hurry()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """As `abandon`, but of a worker that ends, which is no fault of the save.

        Why the attempt ends is the incident; that its save is not completed only follows from it.
        """
        self._is_left = True
        self.abandon()

    def abandon(self) -> None:
        """Lets the thread end soon; its part, if it is not written, counts as failed."""
        self._abandoned.set()
        self._pace.end()
        self._writer.abort()

    def give_up(self, after_s: float, *, within_s: float) -> None:
        """Ends a save that takes too long: it has failed, and the recorder is told by what.

        Told from a thread of its own, for this one's may hang in the storage for good. Where only
        other workers' parts lack, those are first given time to tell: they know what hangs.

        Args:
            after_s: for so long it was waited for.
            within_s: it is over by then, whatever hangs; a recorder that is away hears it later.
        """
        end_s = time.monotonic() + within_s
        if self._is_told and self.wait(within_s / 2):
            return
        self._is_given_up = True
        why = f"it was waited for {after_s:g} s and was still {self._doing}"
        failed = replace(self._cargo.part, error=why)
        telling = threading.Thread(
            target=lambda: self._note(lambda: self._ask(failed)),
            name=THREAD_SAVE_GIVEN_UP,
            daemon=True,
        )
        telling.start()
        self.abandon()
        telling.join(max(0.0, end_s - time.monotonic()))
        self._thread.join(LET_GO_S)

    def _fly(self) -> None:
        self._note(self._save)

    def _save(self) -> Answer | None:
        part = self._written()
        if part is None:
            return Answer(state="failed", message=OF_ANOTHER)
        # What could not be written needs no ledger, which may be on the storage that is full.
        failed = part.error is not None and not self._abandoned.is_set()
        if self._link is not None and not failed:
            self._doing = "delivering its steps to the ledger"
            self._link.flush(FLUSH_S)
        return self._follow(part)

    def _note(self, action: Callable[[], Answer | None]) -> None:
        """Keeps what an action comes to; its errors end the save, and of them few the training."""
        try:
            self.answer = action() or self.answer
        except DivergenceError as error:
            self._await_news()
            self.problem = error
            self.answer = Answer(state="failed", message=str(error))
        except RecorderError as error:
            if self._link is not None and self._link.refused:
                self.problem = error
            self.answer = Answer(state="failed", message=str(error))
        except Exception as error:
            logger.exception("attempt=%d saving step %d failed", self._attempt, self.step)
            self.answer = Answer(state="failed", message=f"{type(error).__name__}: {error}")

    def _await_news(self) -> None:
        """The recorder has written the incident; the link hears of it with its next answer.

        Until then the attempt would write one more when it fails.
        """
        deadline = time.monotonic() + NEWS_S
        while self._link is not None and self._link.divergence is None:
            if time.monotonic() > deadline or self._abandoned.wait(NEWS_POLL_S):
                return

    def _written(self) -> Part | None:
        """What to tell; None where another worker of the node did not copy: that one tells why."""
        cargo, part = self._cargo, self._cargo.part
        try:
            live = self._copy()
            if not self._have_others_copied():
                return None
            self._doing = "writing its files: its storage hangs or is too slow"
            written, manifest = self._write()
        except SamestepError as error:
            return replace(part, error=str(error))
        finally:
            self._is_written = True
        self._doing = "digesting the state"
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

    def _have_others_copied(self) -> bool:
        self._doing = "waiting for the copies of the other workers of its node"
        try:
            self._cargo.copying.wait_for_others(self._abandoned)
        except CheckpointError as error:
            if self._abandoned.is_set():
                raise
            logger.warning("attempt=%d step %d: %s", self._attempt, self.step, error)
            return False
        return True

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

    def _follow(self, part: Part) -> Answer | None:
        """Tells the recorder until it says how the save ended; None where it was given up."""
        self._doing = "waiting for the recorder"
        while not self._is_given_up:
            answer = self._ask(replace(part, has_left=self._is_left))
            if answer.state != "waiting":
                return answer
            self._doing, self._is_told = f"waiting {answer.message}", True
            if not self._pace.pause() and not self._is_given_up:
                return Answer(state="failed", message=f"it waited {answer.message}")
        return None

    def _ask(self, part: Part) -> Answer:
        return Answer(**self._target.call("part", self._attempt, part.to_json()))
