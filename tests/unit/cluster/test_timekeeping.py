"""What a run that was really trained says of its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep import load_spec, train
from samestep.checkpoint.storage import Storage
from samestep.names import Event, TimePart
from samestep.telemetry.accounting import TIMING, Accounting
from samestep.telemetry.identity import read_result
from samestep.telemetry.ledger import events
from samestep.telemetry.spool import Spool

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "workloads" / "faulty" / "job.yaml"


def test_all_of_a_runs_time_is_accounted_over_a_resume(tmp_path: Path) -> None:
    for max_steps in (8, 20):
        settings = {
            "mode": "local",
            "storage": str(tmp_path),
            "epochs": None,
            "max_steps": max_steps,
            "tracking.enabled": False,
            "checkpoint.every_steps": 4,
            "args.pause_s": 0.01,
        }
        outcome = train(load_spec(JOB, settings), name="timed", search=[JOB.parent])
        assert outcome.status == "done"
    run = Storage.at(outcome.run)
    accounting = Accounting()
    for line in Spool(run).read(10_000):
        accounting.add(line.record)
    seconds = accounting.seconds
    assert sum(seconds.values()) == pytest.approx(accounting.wall_s, abs=1e-3)
    # Twenty pauses of 10 ms are part of the steps.
    assert seconds[TimePart.KEPT] >= 0.2
    for part in (TimePart.DATA, TimePart.CHECKPOINT, TimePart.EVALUATION, TimePart.STARTING):
        assert seconds[part] > 0, part
    assert seconds[TimePart.REDONE] == seconds[TimePart.COMMUNICATION] == 0
    assert seconds[TimePart.IDLE] < accounting.wall_s / 2
    assert all(TIMING in event.fields for event in events(run, Event.FINISHED))
    result = read_result(run)
    assert result is not None
    assert TIMING not in result
