"""The end of a run whose workers were all told to end: a planned stop, with nothing lost."""

from __future__ import annotations

from typing import Any

from samestep.checkpoint.committed import committed_digest, list_checkpoints
from samestep.checkpoint.storage import Storage
from samestep.errors import ExitStatus
from samestep.names import RunState


def interrupted_result(run: Storage, why: str) -> dict[str, Any]:
    """What the recorder is to finish the run with.

    Args:
        run: the run directory; the parked workers have committed their last state to it.
        why: for the user.
    """
    step = max((info.step for info in list_checkpoints(run) if info.whole), default=0)
    return {
        "status": str(RunState.INTERRUPTED),
        "reason": "stop",
        "step": step,
        "digest": committed_digest(run, step) or "",
        "evaluation": None,
        "exit_status": int(ExitStatus.INTERRUPTED),
        "message": why,
    }
