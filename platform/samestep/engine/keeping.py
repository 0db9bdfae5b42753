"""What is kept of the state while training goes on, and when: checkpoints and snapshots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import State, collect
from samestep.checkpoint.storage import Storage
from samestep.engine.agreement import agreed_digest
from samestep.engine.appraisal import Appraisal
from samestep.engine.detection import Detection
from samestep.engine.node import Node, require_room
from samestep.engine.peers import Peers
from samestep.engine.recording import Recording
from samestep.engine.resume import Saved
from samestep.engine.saving import Saving
from samestep.engine.setup import Built
from samestep.engine.snapshots import Snapshots
from samestep.spec import JobSpec, bits_part
from samestep.telemetry.link import Link, Target
from samestep.telemetry.timesheet import SAVE, SNAPSHOT, SNAPSHOT_AT

SAVE_FLAG: Final = 1024
"""Added to worker 0's flag in the small talk of a step: save after it."""


class Keeping:
    """Keeps the state of one worker's attempt, together with the other workers.

    Every worker must make the same calls at the same steps. Nothing here leads back to its owner:
    a worker that failed must let go of the process group at once, without waiting for a collection.

    Args:
        spec: the job.
        built: what the workload gave.
        appraisal: what evaluations decided; a part of it is kept with the state.
        detection: what steps are judged by; kept with the state as well.
        recording: knows the ledger records that a snapshot has to hold.
        peers: the other workers.
        run: the run directory.
        target: the recorder.
        link: worker 0's link; None in the others.
        attempt: number of the attempt.
        start: where the attempt starts.
        fingerprint: of the numerics.

    Raises:
        StorageError: a node has too little shared memory.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        built: Built,
        appraisal: Appraisal,
        detection: Detection,
        recording: Recording,
        peers: Peers,
        run: Storage,
        target: Target,
        link: Link | None,
        attempt: int,
        start: Saved,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._built = built
        self._appraisal = appraisal
        self._detection = detection
        self._recording = recording
        self._peers = peers
        self._start = start
        self._fingerprint = fingerprint
        self._agreed_at = -1
        self._news: dict[str, float] = {}
        self._snapshot_told_s: float | None = None
        node = Node.of(peers)
        self._saving = Saving(
            spec=spec,
            parts=built.parts,
            peers=peers,
            node=node,
            run=run,
            target=target,
            link=link,
            attempt=attempt,
            committed=(start.step, start.digest) if start.digest is not None else None,
        )
        self._snapshots = Snapshots(
            spec=spec,
            parts=built.parts,
            records=recording.rest,
            peers=peers,
            node=node,
            run_uri=run.uri,
            attempt=attempt,
            first_step=start.step,
        )
        require_room(built.parts, peers, run.uri, snapshots=self._snapshots.are_on)

    def state(self, step: int, more: Mapping[str, Any] = MappingProxyType({})) -> State:
        """The live state after `step` steps; `more` goes to its extras."""
        return collect(self._built.parts, step=step, extras={**self._extras(), **more})

    @property
    def digest(self) -> str:
        """Of the last checkpoint that was committed."""
        assert self._saving.committed is not None, "nothing is committed yet"
        return self._saving.committed[1]

    @property
    def flag(self) -> int:
        """What worker 0 has to tell the others with the next step: a save by time is due."""
        return SAVE_FLAG * int(self._saving.is_due_by_time)

    def agreed_digest(self, step: int) -> str:
        """Digest of the live state after `step` steps, equal on all workers.

        Raises:
            DivergenceError: it is not.
        """
        state = collect(self._built.parts, step=step, extras={})
        digest = agreed_digest(self._spec, self._peers, state)
        self._agreed_at = step
        return digest

    def begin(self) -> None:
        """Before the first step: what a run starts from elsewhere becomes its own.

        A resume needs the source no more, whatever becomes of it.
        """
        if self._spec.init_from.path is not None and self._start.source is None:
            step = self._start.step
            self._saving.save_now(step, extras=self._extras(), meta=self._meta(None))

    def after_exchange(self) -> None:
        """All workers are at the same step; to be called once in each, before the update."""
        self.wait_until_copied()
        self._snapshots.after_exchange()

    def wait_until_copied(self) -> None:
        """As `Saving.wait_until_copied`; counted as what the save costs."""
        began_s = time.perf_counter()
        self._saving.wait_until_copied()
        if SAVE in self._news:
            self._news[SAVE] += time.perf_counter() - began_s

    def after_step(
        self, step: int, *, flag: int, is_best: bool, evaluation: Mapping[str, float] | None
    ) -> None:
        """Starts what is due after `step` steps.

        Until `wait_until_copied` has returned, only a forward and backward may be computed.

        Args:
            step: steps taken so far, fewer than the run's.
            flag: the largest of the workers' flags in the step's small talk.
            is_best: the state is the best so far.
            evaluation: metrics of the evaluation of this state; None without one.
        """
        extras = self._extras()
        if step == self._start.step + 1:
            self._saving.prepare(step, extras=extras, also=self._snapshots.warm)
        every = self._spec.checkpoint.every_steps
        if is_best or flag >= SAVE_FLAG or (every and step % every == 0):
            agreed, began_s = self._agreed_at == step, time.perf_counter()
            self._saving.save(step, extras=extras, meta=self._meta(evaluation), is_agreed=agreed)
            self._news[SAVE] = time.perf_counter() - began_s
        # While the recorder is away for long the last one stays: it has all records before it.
        if self._snapshots.is_due(step) and not self._recording.is_behind:
            self._saving.wait_until_prepared()
            self._snapshots.take(step, extras=extras)
            assert self._snapshots.cost_s is not None
            self._news[SNAPSHOT] = self._snapshots.cost_s

    def news(self) -> dict[str, float]:
        """What a step's timing tells of what was kept since the last call (see `timesheet`)."""
        news, self._news = self._news, {}
        at_s = self._snapshots.whole_at_s
        if at_s is not None and at_s != self._snapshot_told_s:
            news[SNAPSHOT_AT] = self._snapshot_told_s = at_s
        return news

    def end(self, step: int, *, evaluation: Mapping[str, float] | None) -> None:
        """Saves the last state; returns when it is committed.

        Args:
            step: steps taken.
            evaluation: metrics of the evaluation of this state; None without one.

        Raises:
            StorageError: worker 0: it can't be saved.
            PeerLostError: another worker: the same.
        """
        agreed, meta = self._agreed_at == step, self._meta(evaluation)
        self._saving.save_now(step, extras=self._extras(), meta=meta, is_agreed=agreed)

    def close(self, *, wait_s: float, keep_images: bool) -> None:
        """Ends threads and processes, and gives shared memory back.

        Args:
            wait_s: how long a save under way is waited for.
            keep_images: another attempt may start from what lies in shared memory.
        """
        self._snapshots.close()
        self._saving.close(wait_s=wait_s, keep_images=keep_images)

    def _extras(self) -> dict[str, Any]:
        """What the state holds beside that of the workload's parts."""
        return {
            "nominal_weight": self._start.nominal_weight,
            "dataset_size": self._built.dataset_size,
            "steps_per_epoch": self._built.order.steps_per_epoch,
            **self._appraisal.state,
            **self._detection.state,
        }

    def _meta(self, evaluation: Mapping[str, float] | None) -> CheckpointMeta:
        return CheckpointMeta(
            numerics=self._fingerprint,
            spec=bits_part(self._spec),
            created_s=time.time(),
            evaluation=evaluation or {},
            ranking=self._appraisal.ranking,
        )
