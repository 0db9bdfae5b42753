"""Saves under way: parts come in from the workers, and all of them together become a checkpoint.

Every worker says again and again what its part came to, until it is told how the save ended: so
nothing is lost when the recorder dies in between. A save that fails costs no more than itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Final, Literal

from samestep import names
from samestep.checkpoint.manifest import FileEntry, Manifest, step_name
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError, DivergenceError, RecorderError, StorageError
from samestep.exact.digest import divergence_text
from samestep.incidents.record import Incident
from samestep.names import Event, IncidentKind

logger = logging.getLogger(__name__)

MAX_NAMED: Final = 8
"""So many of the workers that are waited for are named."""

SaveState = Literal["waiting", "committed", "failed"]
SaveKey = tuple[int, int]
"""Step, and which try at it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one worker has to say about its part of a save.

    Attributes:
        step: steps taken before the checkpoint.
        try_number: counts the tries to save this step in this attempt.
        world_rank: of the worker; the one of 0 brings the manifest.
        num_parts: of the save.
        keep: newest checkpoints to keep once this one is real.
        files: by name, `num_bytes` and `sha256` of what it wrote.
        manifest: with the files of part 0 alone; None from others.
        error: why the part was not written; None where it was.
        has_left: the worker ends; where its part was not written, nothing else is wrong.
        digests: of every part of the state, as this worker holds it; empty where the workers have
            compared the whole state before.
    """

    step: int
    try_number: int
    world_rank: int
    num_parts: int
    keep: int
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    manifest: str | None = None
    error: str | None = None
    has_left: bool = False
    digests: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a save stands.

    Attributes:
        state: where it is.
        message: why it failed, or whom it waits for.
        digest: of the checkpoint, once committed.
    """

    state: SaveState
    message: str = ""
    digest: str = ""


class _Save:
    """A save under way: whose parts are in, so that each question costs the same, however many.

    Args:
        num_parts: of it.
    """

    def __init__(self, num_parts: int) -> None:
        self.parts: dict[int, Part] = {}
        self._missing = dict.fromkeys(range(num_parts))
        self._difference: str | None = None  # not looked for yet

    def add(self, part: Part) -> None:
        """Notes a part, once more if need be."""
        self.parts[part.world_rank] = part
        self._missing.pop(part.world_rank, None)

    @property
    def is_whole(self) -> bool:
        """Whether all parts are in."""
        return not self._missing

    def waits_for(self) -> str:
        """Whose parts are not in."""
        named = ", ".join(str(rank) for rank in islice(self._missing, MAX_NAMED))
        num_more = len(self._missing) - MAX_NAMED
        return f"for worker {named}" + (f" and {num_more} more" if num_more > 0 else "")

    def require_agreement(self) -> None:
        """Every worker holds the same state, whichever part of it the file of another was made of.

        Raises:
            DivergenceError: they do not.
        """
        if self._difference is None:
            states = ["".join(part.digests) for _, part in sorted(self.parts.items())]
            differs = len(set(states)) > 1
            self._difference = divergence_text(self.parts[0].step, states) if differs else ""
        if self._difference:
            raise DivergenceError(self._difference)


class Saves:
    """The recorder's side of the workers' saves, of the present attempt.

    Args:
        run: the run directory.
        commit: makes a checkpoint real, given the manifest's text and how many to keep.
        say: tells whoever follows the run.
        log: writes an event (kind, step, fields).
        incident: writes an incident.
    """

    def __init__(
        self,
        run: Storage,
        *,
        commit: Callable[[str, int], None],
        say: Callable[[str], None],
        log: Callable[[Event, int, Mapping[str, Any]], None],
        incident: Callable[[Incident], object],
    ) -> None:
        self._run = run
        self._commit = commit
        self._say = say
        self._log = log
        self._incident = incident
        self._open: dict[SaveKey, _Save] = {}
        self._ended: dict[SaveKey, Answer] = {}
        self._num_failed = 0
        self._untold: Incident | None = None
        self._unlogged: list[tuple[int, str]] = []

    def begin_attempt(self) -> None:
        """Forgets the saves of the attempt before, which nobody can complete."""
        self._open, self._ended = {}, {}

    def take(self, part: Part, attempt: int) -> Answer:
        """Notes a part; commits when it was the last one.

        Raises:
            DivergenceError: the workers' states differ, or the attempt from the ledger: nothing is
                committed.
        """
        key = (part.step, part.try_number)
        if key not in self._ended:
            if any(part.try_number < ended for _, ended in self._ended):
                # Who took part in a later one has given this one up, and told so.
                return Answer(state="failed", message="a later save has ended since")
            if key not in self._open:
                self._open[key] = _Save(part.num_parts)
            save = self._open[key]
            save.add(part)
            answer = self._judge(save, part, attempt)
            if answer.state == "waiting":
                return answer
            self._ended = {key: answer}  # of earlier ones every worker has been told
            self._open.pop(key)
        return self._ended[key]

    def tell(self) -> None:
        """Writes what could not be written when it happened."""
        try:
            while self._unlogged:
                step, message = self._unlogged[0]
                self._log(Event.CHECKPOINT_FAILED, step, {"message": message})
                del self._unlogged[0]
            if self._untold is not None:
                self._incident(self._untold)
                self._untold = None
        except StorageError:
            return  # tried again with the next save

    def _judge(self, save: _Save, part: Part, attempt: int) -> Answer:
        if part.error is not None:
            why = f"worker {part.world_rank}: {part.error}"
            if not part.has_left:
                return self._fail(part.step, attempt, why)
            # What ended the attempt is told by whom it befell.
            logger.info(
                "run=%s the save of step %d ends with its attempt", self._run.uri, part.step
            )
            self._clear(part.step)
            return Answer(state="failed", message=why)
        if not save.is_whole:
            return Answer(state="waiting", message=save.waits_for())
        save.require_agreement()
        text = save.parts[0].manifest
        assert text is not None, "worker 0 brings the manifest"
        try:
            manifest = Manifest.from_json(text)
            files = {
                name: FileEntry(**entry)
                for rank in range(part.num_parts)
                for name, entry in save.parts[rank].files.items()
            }
            self._commit(replace(manifest, files=files).to_json(), part.keep)
        except RecorderError as error:
            return Answer(state="waiting", message=f"for the commit: {error}")
        except (StorageError, CheckpointError) as error:
            return self._fail(part.step, attempt, str(error))
        if self._num_failed:
            self._say(f"checkpoints are written again, after {self._num_failed} that failed")
            self._num_failed = 0
        self.tell()
        return Answer(state="committed", digest=manifest.digest)

    def _fail(self, step: int, attempt: int, why: str) -> Answer:
        message = (
            f"the checkpoint at step {step} could not be saved: {why}. Training goes on, the last "
            "good checkpoint stays, and the next one that is due is tried"
        )
        logger.error("run=%s %s", self._run.uri, message)
        self._num_failed += 1
        self._unlogged.append((step, message))
        if self._num_failed == 1:  # an outage is one incident, however many saves it costs
            self._untold = Incident(
                kind=IncidentKind.STORAGE,
                step=step,
                attempt=attempt,
                message=message,
                time=time.time(),
            )
        self.tell()
        if self._unlogged:  # else the event has told it
            self._say(message)
        self._clear(step)
        return Answer(state="failed", message=why)

    def _clear(self, step: int) -> None:
        """Gives back the room that the parts took, which may be what lacks."""
        folder = f"{names.CHECKPOINTS_DIR}/{step_name(step)}"
        try:
            if not self._run.exists(f"{folder}/{names.MANIFEST_FILE}"):
                self._run.delete(folder)
        except StorageError as error:
            logger.warning("run=%s what step %d left stays: %s", self._run.uri, step, error)
