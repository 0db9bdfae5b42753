"""Any schedule of faults leaves a run with the weights it would have had without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from samestep import load_spec
from samestep.cluster.drill import Drill, RoundResult
from samestep.cluster.strikes import Fault, Strike

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "workloads" / "faulty" / "job.yaml"
# So many random rounds, a function of the seed, instead of those below.
ROUNDS = int(os.environ.get("SAMESTEP_CHAOS_ROUNDS", "0"))
SEED = int(os.environ.get("SAMESTEP_CHAOS_SEED", "1"))


def strike(fault: Fault, step: int, worker: int = 0) -> Strike:
    return Strike(fault=fault, step=step, worker=worker)


# Each fault once; starting a run costs more than a fault, so there are few rounds with many.
EACH_ONCE = [
    [
        strike(Fault.FREEZE_WORKER, 6, 1),
        strike(Fault.KILL_WORKER, 14, 1),
        strike(Fault.TERMINATE_WORKER, 22),
        strike(Fault.KILL_RECORDER, 30),
        strike(Fault.KILL_NODE, 38, 1),
        strike(Fault.ADD_NODE, 40),
    ],
    [
        strike(Fault.KILL_ALL_WORKERS, 8),
        strike(Fault.DRAIN_NODE, 16, 2),
        strike(Fault.TERMINATE_ALL_WORKERS, 24),
        strike(Fault.STOP_DRIVER, 32),
        strike(Fault.KILL_DRIVER, 40),
    ],
]

pytestmark = pytest.mark.timeout(900 + 120 * ROUNDS)


@pytest.fixture(scope="module")
def drilled(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[RoundResult], list[str]]:
    """Three nodes, one cluster for all rounds."""
    lines = [f"seed {SEED}, {ROUNDS} rounds" if ROUNDS else "each fault once"]
    spec = load_spec(JOB, {"args.pause_s": 0.05, "checkpoint.every_steps": 10})
    folder = tmp_path_factory.mktemp("drill")
    drill = Drill(spec, job_folder=JOB.parent, folder=folder, num_nodes=3, say=lines.append)
    return drill.run((SEED, ROUNDS) if ROUNDS else EACH_ONCE), lines


def test_faults_change_no_bit(
    drilled: tuple[list[RoundResult], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    results, lines = drilled
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert [_told(result) for result in results] == [
        (result.name, "done", results[0].digest, 64) for result in results
    ], "\n".join(lines)
    assert len(results) == (ROUNDS or len(EACH_ONCE)) + 1
    if not ROUNDS:
        struck = [struck.strike.fault for result in results for struck in result.struck]
        assert sorted(struck) == sorted(Fault)


def _told(result: RoundResult) -> tuple[str, str, str, int]:
    return result.name, result.status, result.digest, result.steps
