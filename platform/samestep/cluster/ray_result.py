"""Tells Ray Train of a checkpoint, so that `Result.checkpoint` leads to it.

The run directory stays the truth: Ray gets a small folder with a pointer, which it copies into its
own bookkeeping and may lose. `samestep.load_weights(result.checkpoint.path)` follows it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train

from samestep.checkpoint.reading import pointer_to
from samestep.checkpoint.storage import Storage
from samestep.names import POINTER_FILE


def report_checkpoint(run_uri: str, step: int, evaluation: dict[str, float] | None) -> None:
    """Reports the checkpoint after `step` steps; at planned stops and at the end of a run only.

    Every worker of the group must call it: Ray waits for all of them.

    Args:
        run_uri: the run directory.
        step: of a checkpoint that is committed.
        evaluation: metrics to go with it.
    """
    metrics: dict[str, Any] = {"step": step, **(evaluation or {})}
    if ray.train.get_context().get_world_rank() > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        Path(folder, POINTER_FILE).write_text(pointer_to(Storage.at(run_uri), step))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
