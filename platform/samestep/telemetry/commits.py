"""Makes checkpoints real: each is committed once, noted in the ledger, and older ones go."""

from __future__ import annotations

from collections.abc import Callable

from samestep.checkpoint.committed import commit
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.retention import apply_retention, clear_unfinished
from samestep.checkpoint.storage import Storage
from samestep.errors import DivergenceError, RecorderError
from samestep.names import Event
from samestep.telemetry.intake import Intake
from samestep.telemetry.rollbacks import Rollbacks


class Commits:
    """The recorder's side of checkpoints whose files are written.

    Args:
        run: the run directory.
        intake: of the ledger, which must hold the steps before a checkpoint.
        rollbacks: of the run: what was taken back is not committed.
        back_steps: how far back the run may go; None: it never does.
        divergence: what differs from the ledger, once something does.
    """

    def __init__(
        self,
        run: Storage,
        *,
        intake: Intake,
        rollbacks: Rollbacks,
        back_steps: int | None,
        divergence: Callable[[], str | None],
    ) -> None:
        self._run = run
        self._intake = intake
        self._rollbacks = rollbacks
        self._back_steps = back_steps
        self._divergence = divergence
        self._last: tuple[int, int, str] | None = None

    def commit(self, manifest_json: str, keep: int) -> None:
        """Makes a checkpoint real, and deletes the oldest beyond `keep`.

        Raises:
            RecorderError: the ledger does not hold all steps before the checkpoint's, or they were
                taken back.
            DivergenceError: the attempt diverged from the ledger.
        """
        manifest = Manifest.from_json(manifest_json)
        refused = f"the checkpoint at step {manifest.step} is not committed"
        divergence = self._divergence()
        if divergence is not None:
            raise DivergenceError(f"{refused}: {divergence}")
        if self._rollbacks.has_ended(self._intake.attempt):
            raise RecorderError(f"{refused}: the run went back")
        missing = self._intake.missing_before(manifest.step)
        if missing is not None:
            raise RecorderError(
                f"{refused}: step {missing} is not in the ledger yet; flush the link before "
                "committing"
            )
        commit(self._run, manifest)
        made = (self._intake.attempt, manifest.step, manifest.digest)
        if made != self._last:  # asked again because the answer was lost: told once
            fields = {"digest": manifest.digest, "bytes": manifest.num_bytes}
            self._intake.log(Event.CHECKPOINT_COMMITTED, manifest.step, fields)
            self._last = made
        apply_retention(self._run, keep, back_steps=self._back_steps)
        clear_unfinished(self._run, manifest.step)
