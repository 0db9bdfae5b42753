"""What a run, or a stretch of it that ends as planned, came to: as the recorder is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.engine.appraisal import Appraisal
from samestep.errors import ExitStatus


def result_of(
    appraisal: Appraisal,
    *,
    done: bool,
    is_early: bool,
    step: int,
    digest: str,
    evaluation: Mapping[str, float] | None,
    timing: Mapping[str, Any],
) -> dict[str, Any]:
    """The result as plain data.

    Args:
        appraisal: what the evaluations decided.
        done: the run has come to its end; else it was told to stop.
        is_early: before its last step.
        step: steps taken.
        digest: of the last checkpoint.
        evaluation: metrics of the last evaluation; None without one.
        timing: of what came after the last step.
    """
    reason = "stop"
    if done:
        reason = "early_stop" if is_early else "end"
    return {
        "status": "done" if done else "interrupted",
        "reason": reason,
        "step": step,
        "digest": digest,
        "evaluation": evaluation,
        "best": appraisal.best_as_json(),
        "exit_status": int(ExitStatus.DONE if done else ExitStatus.INTERRUPTED),
        "message": (appraisal.stop_reason or "") if reason == "early_stop" else "",
        "timing": timing,
    }
