"""Any schedule of faults leaves a run with the weights it would have had without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from samestep import load_spec
from samestep.cluster.drill import Drill, RoundResult

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "workloads" / "faulty" / "job.yaml"
ROUNDS = int(os.environ.get("SAMESTEP_CHAOS_ROUNDS", "6"))
SEED = int(os.environ.get("SAMESTEP_CHAOS_SEED", "1"))

pytestmark = pytest.mark.timeout(300 + 120 * ROUNDS)


def test_random_faults_change_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three nodes, one cluster for all rounds; the faults follow from the seed that is printed."""
    lines: list[str] = [f"seed {SEED}, {ROUNDS} rounds"]
    spec = load_spec(JOB, {"args.pause_s": 0.02, "checkpoint.every_steps": 10})
    drill = Drill(spec, job_folder=JOB.parent, folder=tmp_path, num_nodes=3, say=lines.append)
    results = drill.run((SEED, ROUNDS))
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert [_told(result) for result in results] == [
        (result.name, "done", results[0].digest, 64) for result in results
    ], "\n".join(lines)
    assert len(results) == ROUNDS + 1


def _told(result: RoundResult) -> tuple[str, str, str, int]:
    return result.name, result.status, result.digest, result.steps
