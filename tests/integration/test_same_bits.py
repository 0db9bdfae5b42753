"""The promise, through Ray: the same bits for any number of workers, in any mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samestep import JobSpec, Outcome, load_weights, train
from samestep.checkpoint.storage import Storage
from samestep.replay.compare import Verdict, compare_runs

MakeSpec = Callable[..., JobSpec]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]


def test_three_workers_give_the_ledger_the_evaluations_and_the_weights_of_one_process(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    """One worker, two workers and the other modes: in the tests of what befalls them."""
    assert (straight.status, straight.step) == ("done", 12)
    outcome = train(
        make_spec(mode="ddp", workers=3, loader_processes=1), name="three", search=[folder]
    )
    assert (outcome.digest, outcome.evaluation) == (straight.digest, straight.evaluation)
    comparison = compare_runs(Storage.at(straight.run), Storage.at(outcome.run))
    assert (comparison.verdict, comparison.num_compared) == (Verdict.IDENTICAL, 12), comparison
    assert outcome.checkpoint == f"{outcome.run}/checkpoints/step-00000012"
    weights, ours = load_weights(outcome.checkpoint), load_weights(straight.run)
    assert weights.keys() == ours.keys()
    assert all(weights[key].equal(ours[key]) for key in ours)


def test_fast_reduction_gives_other_bits_than_exact(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    spec = make_spec(mode="ddp", workers=1, reduction="fast")
    fast = train(spec, name="fast", search=[folder])
    assert (fast.status, fast.step) == ("done", straight.step)
    assert fast.digest != straight.digest
