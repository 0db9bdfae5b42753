"""The final model, handed out once to whoever keeps it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from samestep.engine.ema import averages_in
from samestep.engine.peers import Peers
from samestep.engine.setup import Built
from samestep.workload import Workload

Taker = Callable[[nn.Module, Callable[[], object], Path | None], None]
"""Given the model, a call that uses it once, and the file of the workload; must not raise."""


def hand_out(built: Built, taker: Taker, *, step: int, device: torch.device) -> None:
    """Gives the model after `step` steps: the one that is evaluated, so the averages if any."""
    model = built.parts.model

    def use() -> None:
        """Calls it once, as an evaluation does; nothing where there is none."""
        if built.evaluation is not None:
            built.evaluation.run(model, Peers(None), step=step, device=device, max_batches=1)

    with averages_in(model, built.parts.ema):
        taker(model, use, module_file(built.workload))


def module_file(workload: Workload) -> Path | None:
    """The file of a workload's module; None where it has none, as in a notebook."""
    file = getattr(sys.modules.get(type(workload).__module__), "__file__", None)
    return Path(file) if file else None
