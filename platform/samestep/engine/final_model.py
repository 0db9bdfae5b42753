"""The final model, handed out once to whoever keeps it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.reading import load_weights
from samestep.engine.appraisal import Best
from samestep.engine.ema import averages_in
from samestep.engine.peers import Peers
from samestep.engine.setup import Built
from samestep.telemetry.finished import Finished
from samestep.workload import Workload


def hand_out(
    built: Built,
    taker: Callable[[Finished], None],
    *,
    run_uri: str,
    step: int,
    best: Best | None,
    device: torch.device,
) -> None:
    """Gives the model after `step` steps: the one that is evaluated, so the averages if any."""
    model = built.parts.model

    def use() -> None:
        """Calls it once, as an evaluation does; nothing where there is none."""
        if built.evaluation is not None:
            built.evaluation.run(model, Peers(None), step=step, device=device, max_batches=1)

    def best_weights() -> Mapping[str, Any] | None:
        """Those of the best checkpoint, read from storage; None where the last state has them."""
        if best is None or best[0] == step:
            return None
        return load_weights(run_uri, checkpoint=best[0])

    with averages_in(model, built.parts.ema):
        code = module_file(built.workload)
        taker(Finished(model=model, use=use, code=code, best_weights=best_weights))


def module_file(workload: Workload) -> Path | None:
    """The file of a workload's module; None where it has none, as in a notebook."""
    file = getattr(sys.modules.get(type(workload).__module__), "__file__", None)
    return Path(file) if file else None
