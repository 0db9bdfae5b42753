"""Any schedule of faults leaves a run with the weights it would have had without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from samestep import load_spec
from samestep.cluster.drill import Drill
from samestep.cluster.drilled import RoundResult

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "workloads" / "faulty" / "job.yaml"
ROUNDS = int(os.environ.get("SAMESTEP_CHAOS_ROUNDS", "6"))
SEED = int(os.environ.get("SAMESTEP_CHAOS_SEED", "1"))

pytestmark = pytest.mark.timeout(600 + 120 * ROUNDS)


@pytest.fixture(scope="module")
def drilled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[RoundResult], list[str]]:
    """Three nodes, one cluster for all rounds; the faults follow from the seed."""
    lines: list[str] = []
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:  # as it comes: the long form takes most of an hour
        lines.append(line)
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    say(f"\nseed {SEED}, {ROUNDS} rounds")
    spec = load_spec(JOB, {"args.pause_s": 0.02, "checkpoint.every_steps": 10})
    folder = tmp_path_factory.mktemp("drill")
    drill = Drill(spec, job_folder=JOB.parent, folder=folder, num_nodes=3, say=say)
    return drill.run((SEED, ROUNDS)), lines


def test_random_faults_change_no_bit(drilled: tuple[list[RoundResult], list[str]]) -> None:
    results, lines = drilled
    assert [_told(result) for result in results] == [
        (result.name, "done", results[0].digest, 64) for result in results
    ], "\n".join(lines)
    assert len(results) == ROUNDS + 1


def _told(result: RoundResult) -> tuple[str, str, str, int]:
    return result.name, result.status, result.digest, result.steps
