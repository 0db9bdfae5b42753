"""`samestep check` knows the training features as training does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attempts import Train
from pool import spec_of

from samestep import parse_spec
from samestep.engine.inspect import inspect_job
from samestep.engine.report import Report

FOLDER = Path(__file__).resolve().parent


def checked(workload: str, args: dict[str, Any], **fields: Any) -> Report:
    spec = spec_of(f"feature_cases:{workload}", args=args, **fields)
    return inspect_job(parse_spec(spec), [FOLDER])


@pytest.mark.parametrize("schedule", ["step", "epoch", "evaluation", "plateau"])
def test_a_job_with_any_schedule_and_averages_passes(schedule: str) -> None:
    report = checked("Scored", {"schedule": schedule}, ema={"decay": 0.9})
    assert report.refused == []
    assert report.evaluation is not None
    assert report.evaluation.keys() == {"error", "score"}


def test_a_metric_that_no_evaluation_gives_is_refused() -> None:
    report = checked("Scored", {"schedule": "plateau", "name": "scor"})
    assert report.refused == [
        "the schedule's metric is 'scor', but evaluate() gives error, score; did you mean score?"
    ]


def test_weights_to_start_from_are_looked_at(train: Train) -> None:
    source = train(spec_of("feature_cases:Named", max_steps=1), "source")
    path = {"path": str(source.folder), "strict": False}
    (refused,) = checked("Named", {"kind": "wider"}, init_from=path).refused
    assert "0.weight: shape (9, 6) in the checkpoint, shape (11, 6) in the model" in refused
    report = checked("Named", {"kind": "renamed"}, init_from=path)
    assert report.refused == []
    assert any("as the workload initialised them: 3.weight" in line for line in report.warnings)
