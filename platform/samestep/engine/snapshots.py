"""Copies of the state in shared memory, for when all workers die at once.

The workers of a node copy together, each a part, into one of two images in turn, so that one is
whole at any time. That every worker is done shows in the next step's exchange; only then does
the node's first worker, in a thread, hash the image and write the header that makes it count.

Until then what an earlier attempt left is the one that is whole, and holds the room of the second
image: with the one of checkpoints there are three at any time. It is not taken over, for a worker
that was cut off may go on writing into it.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.checkpoint import shared_memory, snapshot
from samestep.checkpoint.image import Image, Plan
from samestep.checkpoint.split import Piece, split
from samestep.checkpoint.state import Parts, collect, flatten
from samestep.engine.drag import Drag
from samestep.engine.node import Node
from samestep.engine.peers import Peers
from samestep.errors import StorageError
from samestep.names import THREAD_SNAPSHOT
from samestep.spec import JobSpec

logger = logging.getLogger(__name__)

AIM: Final = 0.006
"""The share of the time that snapshots are to take: 1 % is promised, and what they take is known
from a few noisy times (aiming at 0.75 % gave 0.74 and 0.99)."""
FIRST_AFTER_STEPS: Final = 3
"""Steps before the first automatic one: the first steps are slow, and tell a wrong interval."""
NUM_COPIES: Final = 5
MAX_DRAG: Final = 2.0
"""Hashing takes less than copying: what the steps after one take longer than that is not its doing.
Of so many copies by each worker of the node, for one of them hashes what all have copied."""
CLOSE_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """An image that is complete once every worker has taken another step."""

    image: Image
    plan: Plan
    step: int
    values_json: str
    records: Sequence[Mapping[str, Any]]
    at_s: float


class Snapshots:
    """Takes snapshots in one worker, together with the others.

    Every worker must make the same calls at the same steps.

    Args:
        spec: the job.
        parts: the live objects.
        records: of the attempt that may be missing in the ledger, at present.
        peers: the other workers.
        node: this worker's place on its node.
        run_uri: the run directory.
        attempt: number of the attempt.
        first_step: the attempt's first step.
        monotonic: clock in seconds.

    Attributes:
        cost_s: seconds for which the last one held training up; None before the first.
        whole_at_s: when the state of the last whole one was copied, in seconds since the epoch, as
            the first worker of a node knows; None before.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        parts: Parts,
        records: Callable[[], Iterable[Mapping[str, Any]]],
        peers: Peers,
        node: Node,
        run_uri: str,
        attempt: int,
        first_step: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._records = records
        self._peers = peers
        self._node = node
        self._run_uri = run_uri
        self._attempt = attempt
        self._monotonic = monotonic
        every = spec.checkpoint.snapshot_every
        self._is_automatic = every == "auto"
        self._every = 0 if every == "auto" else every
        self._next = self._first_after(first_step)
        self._timed_from = (first_step, monotonic())
        self._copies_s: deque[float] = deque(maxlen=NUM_COPIES)
        self._drag = Drag()
        self._images: list[Image | None] = [None, None]
        self._num_taken = 0
        self.cost_s: float | None = None
        self.whole_at_s: float | None = None
        self._copied: _Copied | None = None
        self._thread: threading.Thread | None = None
        self._has_header = False
        if node.local_rank == 0:
            snapshot.begin_attempt(run_uri, attempt)

    @property
    def are_on(self) -> bool:
        """Whether any are taken."""
        return self._is_automatic or self._every > 0

    def is_due(self, step: int) -> bool:
        """Whether one is to be taken after `step` steps."""
        return self.are_on and step >= self._next

    def warm(self, plan: Plan) -> None:
        """Gets memory for the first image, so that the first copy need not wait for it.

        Raises:
            StorageError: there is not enough.
        """
        if self.are_on:
            self._image_for(0, plan).warm(plan, self._pieces(plan))

    def take(self, step: int, *, extras: Mapping[str, Any]) -> None:
        """Copies the state after `step` steps; when it returns the state may change again.

        Args:
            step: steps taken so far.
            extras: what the state holds beside the parts.

        Raises:
            StorageError: shared memory is full.
        """
        started_s = self._monotonic()
        self._join()
        turn = self._num_taken % 2
        if self._node.local_rank == 0:
            snapshot.drop_header(self._path(turn))
        begun = self._peers.gather(self._interval(step, started_s))
        state = collect(self._parts, step=step, extras=extras)
        tensors, values_json = flatten(state)
        plan = Plan.of(tensors)
        # Nobody copies before the old header is gone, nor gets memory before what there was before
        # is given back. Worker 0's clock decides on the next one.
        asked_s = self._monotonic()
        self._every = int(begun()[0])
        # Whoever is here first waits for the others, as it would in the next step anyhow.
        waited_s = self._monotonic() - asked_s
        image = self._image_for(turn, plan)
        image.fill(plan, tensors, self._pieces(plan))
        self._copied = _Copied(
            image=image,
            plan=plan,
            step=step,
            values_json=values_json,
            records=list(self._records()),
            at_s=time.time(),
        )
        self._num_taken += 1
        ended_s = self._monotonic()
        self.cost_s = ended_s - started_s
        self._copies_s.append(self.cost_s - waited_s)
        self._drag.taken(self.cost_s)
        self._timed_from = (step, ended_s)
        self._next = step + max(self._every, 1)
        if not self._is_automatic:
            self._next -= step % self._every

    def after_exchange(self) -> None:
        """Every worker has taken another step since `take`: what was copied is whole."""
        self._drag.exchanged(self._monotonic())
        copied, self._copied = self._copied, None
        if copied is None or self._node.local_rank > 0:
            return

        def finish() -> None:
            try:
                snapshot.write_header(
                    copied.image,
                    copied.plan,
                    step=copied.step,
                    values_json=copied.values_json,
                    records=copied.records,
                )
                self.whole_at_s = copied.at_s
                if not self._has_header:
                    snapshot.drop_others(self._run_uri, self._attempt)
                    self._has_header = True
                    # Room for it there is from now on; for the other workers of the node as well.
                    self._image_for(1, copied.plan).warm(
                        copied.plan, split(copied.plan.sized(), 1)[0]
                    )
            except StorageError as error:
                logger.warning("attempt=%d no snapshot: %s", self._attempt, error)

        self._thread = threading.Thread(target=finish, name=THREAD_SNAPSHOT, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; what it was about to finish is finished."""
        self._join()
        self._images = [None, None]

    def _first_after(self, first_step: int) -> int:
        """When the first one is due; by hand at multiples of the interval.

        Counted from the attempt's first step instead, a restart would stretch the interval up to
        twice its length. One that was not whole yet when the attempt before ended is taken again.
        """
        if self._is_automatic:
            return first_step + FIRST_AFTER_STEPS
        return max(1, math.ceil(first_step / max(self._every, 1))) * self._every

    def _interval(self, step: int, now_s: float) -> int:
        """Steps until the next one, as this worker measured it."""
        if not self._is_automatic:
            return self._every
        num_steps = step - self._timed_from[0]
        step_s = (now_s - self._timed_from[1]) / max(num_steps, 1)
        if len(self._copies_s) < 2 or step_s <= 0:
            return FIRST_AFTER_STEPS  # the cost is not known yet
        copy_s = statistics.median_low(self._copies_s)
        drag_s = min(self._drag.seconds, MAX_DRAG * self._node.local_size * copy_s)
        return max(1, math.ceil((copy_s + drag_s) / (AIM * step_s)))

    def _path(self, turn: int) -> Path:
        folder = shared_memory.make_folder(self._run_uri)
        return snapshot.image_path(folder, self._attempt, f"snapshot-{turn}")

    def _image_for(self, turn: int, plan: Plan) -> Image:
        image = self._images[turn]
        if image is None or len(image.data) < plan.num_bytes:
            image = self._images[turn] = Image.shared(self._path(turn), plan.num_bytes)
        return image

    def _pieces(self, plan: Plan) -> list[Piece]:
        return split(plan.sized(), self._node.local_size)[self._node.local_rank]

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = None
