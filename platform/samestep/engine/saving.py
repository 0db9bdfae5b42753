"""Saving the state while training goes on: only the next update waits for a copy in shared memory.

The workers of a node copy the state together, each a part, into one image in the node's shared
memory, while the forward and backward of the next step run. Each worker's writer then makes its
part of the files out of the image, and the recorder commits the manifest once it has heard of
every part.

All workers must hold the same state, all of it, or nothing is committed. So each digests every
part: those that another copied out of its own live tensors, before the update; what it copied
itself, out of the image, afterwards. The recorder compares.

The writer of worker 0 hashes the whole state besides, in its canonical
order: its node's image has all of it, wherever the other workers are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from samestep.checkpoint import shared_memory, snapshot
from samestep.checkpoint.image import Image, Plan
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.marks import Marks
from samestep.checkpoint.model_state import bare
from samestep.checkpoint.split import Piece, split
from samestep.checkpoint.state import Parts, collect, flatten
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import InlineWriter, ProcessWriter, Writer
from samestep.checkpoint.writing import Outline
from samestep.engine.copying import Copying
from samestep.engine.flight import Cargo, Flight
from samestep.engine.node import Node
from samestep.engine.peers import Peers
from samestep.errors import PeerLostError, StorageError
from samestep.names import THREAD_WARM
from samestep.spec import JobSpec
from samestep.telemetry.link import Link, Target
from samestep.telemetry.saves import Answer, Part

logger = logging.getLogger(__name__)

PROCESS_BYTES: Final = 8 << 20
"""States below this size are written by a thread of the worker: a process costs more."""
LAST_TRIES: Final = 3
RETRY_S: Final = 2.0
CLOSE_S: Final = 10.0
FLEETING_S: Final = 0.5
PATIENCE_S: Final = 10.0
"""A writer rests for half the time since the save before, so that it is through before the next
one, and no longer than this."""


class Saving:
    """Saves the state of one worker's attempt, together with the other workers.

    Every worker must make the same calls at the same steps.

    Args:
        spec: the job.
        parts: the live objects.
        peers: the other workers.
        node: this worker's place on its node.
        run: the run directory.
        target: the recorder.
        link: worker 0's link; None in the others.
        attempt: number of the attempt.
        committed: step and digest of the checkpoint that was restored, if one was.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        parts: Parts,
        peers: Peers,
        node: Node,
        run: Storage,
        target: Target,
        link: Link | None,
        attempt: int,
        committed: tuple[int, str] | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._peers = peers
        self._run = run
        self._target = target
        self._link = link
        self._attempt = attempt
        self._monotonic = monotonic
        self._node = node
        self.committed = committed
        self._restored_step = committed[0] if committed is not None else None
        self._flight: Flight | None = None
        self._num_tries = 0
        self._inline: Writer = InlineWriter()
        self._process = ProcessWriter()
        self._image: Image | None = None
        self._marks: Marks | None = None
        self._warming: threading.Thread | None = None
        self._saved_at_s = monotonic()

    @property
    def is_due_by_time(self) -> bool:
        """Whether `every_seconds` has passed by this worker's clock; worker 0's alone counts."""
        every_s = self._spec.checkpoint.every_seconds
        return bool(every_s) and self._monotonic() - self._saved_at_s >= every_s

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun and not ended, as this worker knows."""
        return self._flight is not None and not self._flight.wait(0)

    def prepare(
        self, step: int, *, extras: Mapping[str, Any], also: Callable[[Plan], None]
    ) -> None:
        """Gets memory and writer ready in the background, so that the first save finds them warm.

        To be called after the first step, when the optimizer has its state.

        Args:
            step: steps taken so far.
            extras: what the state holds beside the parts.
            also: called in that thread; may raise StorageError.
        """
        tensors, _ = flatten(collect(self._parts, step=step, extras=extras))
        plan = Plan.of(tensors)
        if plan.num_bytes < PROCESS_BYTES:
            return

        def warm() -> None:
            try:
                image = self._image_for(plan)
                image.warm(plan, self._pieces(plan))
                self._process.start()
                also(plan)
            except StorageError as error:  # told when it is needed
                logger.warning("attempt=%d no memory for checkpoints yet: %s", self._attempt, error)

        self._warming = threading.Thread(target=warm, name=THREAD_WARM, daemon=True)
        self._warming.start()

    def wait_until_prepared(self) -> None:
        """What `prepare` began is over; bounded."""
        if self._warming is not None:
            self._warming.join(self._spec.faults.hang_timeout_s / 2)
            self._warming = None

    def save(
        self,
        step: int,
        *,
        extras: Mapping[str, Any],
        meta: CheckpointMeta,
        is_agreed: bool = False,
    ) -> None:
        """Starts a save of the state after `step` steps, to be copied before the next update.

        Until `wait_until_copied` has returned, only a forward and backward may be computed.

        Waits for the save before, if that is still under way. Where a checkpoint of this step is
        under way or exists, nothing happens.

        Args:
            step: steps taken so far.
            extras: what the state holds beside the parts.
            meta: what is kept with it.
            is_agreed: the workers have just compared digests of this state.

        Raises:
            DivergenceError: of the save before, as `settle`.
            CheckpointError: the state holds something that can't be kept.
        """
        # Not by what was committed meanwhile: that another worker may not know yet.
        if step == self._restored_step or (self._flight and self._flight.step == step):
            return
        now_s = self._monotonic()
        patience_s = min((now_s - self._saved_at_s) / 2, PATIENCE_S)
        self._saved_at_s = now_s
        self.settle()
        # The image is free when nobody on the node reads it any more.
        everyone_is_ready = self._peers.gather(step)
        state = collect(self._parts, step=step, extras=extras)
        stem = f"{self._attempt:04d}-"
        outline = Outline.of(state, num_parts=self._peers.world_size, stem=stem)
        everyone_is_ready()
        self.wait_until_prepared()
        image, pieces = self._image_for(outline.plan), self._pieces(outline.plan)
        compares = self._peers.world_size > 1 and self._spec.reduction == "exact" and not is_agreed
        # Those of what this worker copies itself wait until that is done.
        later = outline.parts_within(pieces)
        self._num_tries += 1
        copying = Copying(
            outline=outline,
            image=image,
            pieces=pieces,
            compared=[n for n in range(self._peers.world_size) if compares and n not in later],
            number=self._num_tries,
            local_rank=self._node.local_rank,
            marks=self._marks,
        )
        copying = copying.begin(bare(self._parts.model))
        self._launch(copying, meta, compares=compares, patience_s=patience_s)
        if not copying.is_behind:
            self.wait_until_copied()

    def wait_until_copied(self) -> None:
        """Returns when the live state may change again, if a save under way still copies it.

        To be called before anything changes that a forward does not. A copy that takes too long
        is given up; to one that hangs in the middle of a tensor the watchdog puts an end.
        """
        if self._flight is None or self._flight.copied.wait(self._spec.faults.hang_timeout_s / 2):
            return
        self._flight.abandon()
        self._flight.copied.wait()

    def save_now(
        self,
        step: int,
        *,
        extras: Mapping[str, Any],
        meta: CheckpointMeta,
        is_agreed: bool = False,
    ) -> None:
        """Saves as `save`, and returns when the checkpoint is committed: for the end and stops.

        Raises:
            StorageError: worker 0: it could not be saved, several times.
            PeerLostError: another worker: the same.
        """
        for number in range(LAST_TRIES):
            if number:
                time.sleep(RETRY_S * number)
            agreed = is_agreed or number > 0
            self.save(step, extras=extras, meta=meta, is_agreed=agreed)
            answer = self.settle()
            told = self._peers.gather(asdict(answer) if answer is not None else None)()[0]
            if told is None or told["state"] == "committed":  # None: there was one already
                if told is not None:
                    self.committed = (step, told["digest"])
                return
        text = f"the last checkpoint, at step {step}, could not be saved: {told['message']}"
        if self._peers.world_rank == 0:
            raise StorageError(f"{text}. Start the run again when the storage can be written")
        raise PeerLostError(text)

    def settle(self) -> Answer | None:
        """Waits until the save under way has ended, for half the hang timeout; then it has failed.

        That is an incident, as where a part could not be written: the recorder is told.

        Returns:
            How it ended; None where there was none.

        Raises:
            DivergenceError: the workers' states differed, or the attempt's steps from the ledger's.
            RecorderError: the attempt is no longer the present one.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        limit_s = self._spec.faults.hang_timeout_s / 2
        if not flight.wait(limit_s):
            flight.give_up(limit_s, within_s=min(CLOSE_S, limit_s / 2))
        problem = flight.problem
        if problem is not None and self._peers.world_rank == 0:
            # A new one: a frame that held what it raises would hold the process group as well.
            raise type(problem)(str(problem))
        answer = flight.answer or Answer(
            state="failed",
            message=(
                f"the save of step {flight.step} had not ended {limit_s:g} s later, half of "
                "faults.hang_timeout_s: raise it, or use faster storage"
            ),
        )
        if answer.state == "committed":
            self.committed = (flight.step, answer.digest)
        else:
            logger.error("attempt=%d step %d not saved: %s", self._attempt, flight.step, answer)
        return answer

    def close(self, *, wait_s: float, keep_images: bool) -> None:
        """Ends threads and processes; what is not committed by then never will be.

        Args:
            wait_s: how long a save under way is waited for.
            keep_images: what lies in shared memory is needed by another attempt.
        """
        flight, self._flight = self._flight, None
        if flight is not None and not flight.wait(wait_s):
            flight.leave()
        self._process.close()
        if flight is not None:
            # After a lost peer every second counts; the thread ends by itself, and is refused.
            flight.wait(CLOSE_S if wait_s else FLEETING_S)
        if self._warming is not None:
            self._warming.join(CLOSE_S)
        image, self._image = self._image, None
        for shared in (image, self._marks):
            if shared is not None and shared.path is not None:
                shared.path.unlink(missing_ok=True)
        if not keep_images:
            shared_memory.remove(self._run.uri)

    def _pieces(self, plan: Plan) -> list[Piece]:
        """What this worker copies into the node's image."""
        return split(plan.sized(), self._node.local_size)[self._node.local_rank]

    def _image_for(self, plan: Plan) -> Image:
        if self._node.local_size > 1 and self._marks is None:
            folder = shared_memory.make_folder(self._run.uri)
            path = snapshot.image_path(folder, self._attempt, "marks")
            self._marks = Marks(path, self._node.local_size)
        if self._image is None or len(self._image.data) < plan.num_bytes:
            if self._node.local_size == 1 and plan.num_bytes < PROCESS_BYTES:
                self._image = Image.private(plan.num_bytes)
            else:
                folder = shared_memory.make_folder(self._run.uri)
                path = snapshot.image_path(folder, self._attempt, "checkpoint")
                self._image = Image.shared(path, plan.num_bytes)
        return self._image

    def _launch(
        self, copying: Copying, meta: CheckpointMeta, *, compares: bool, patience_s: float
    ) -> None:
        outline = copying.outline
        part = Part(
            step=outline.step,
            try_number=self._num_tries,
            world_rank=self._peers.world_rank,
            num_parts=self._peers.world_size,
            keep=self._spec.checkpoint.keep,
        )
        is_small = outline.plan.num_bytes < PROCESS_BYTES
        self._flight = Flight(
            Cargo(copying=copying, meta=meta, part=part, compares=compares, patience_s=patience_s),
            run=self._run,
            writer=self._inline if is_small else self._process,
            target=self._target,
            link=self._link,
            attempt=self._attempt,
        )
