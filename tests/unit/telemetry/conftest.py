from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.telemetry.records import StepRecord

MakeStep = Callable[..., StepRecord]


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


@pytest.fixture
def make_step() -> MakeStep:
    """Builds a step record; the values depend on the step alone, unless given."""

    def make(step: int, **changes: Any) -> StepRecord:
        fields: dict[str, Any] = {
            "step": step,
            "epoch": step // 10,
            "samples": 8,
            "loss": 1.0 / (step + 3),
            "shard_losses": [0.1 * step, None],
            "shard_weights": [8.0, None],
            "grad_norm": 0.5,
            "lr": [0.1],
            "ids": f"{step:032x}",
            "metrics": {"accuracy": step / 100},
            "timing": {"step_s": 0.01},
        }
        return StepRecord(**{**fields, **changes})

    return make
