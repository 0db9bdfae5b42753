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


def test_every_number_of_workers_and_every_mode_gives_the_same_ledger_and_weights(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    assert (straight.status, straight.step) == ("done", 12)
    others = {  # two workers train in many other tests
        "one": make_spec(mode="ddp", workers=1),
        "three": make_spec(mode="ddp", workers=3, loader_processes=1),
        "actor": make_spec(mode="dataparallel"),
    }
    for name, spec in others.items():
        outcome = train(spec, name=name, search=[folder])
        assert outcome.digest == straight.digest, name
        assert outcome.evaluation == straight.evaluation, name
        comparison = compare_runs(Storage.at(straight.run), Storage.at(outcome.run))
        assert comparison.verdict is Verdict.IDENTICAL, (name, comparison)
        assert comparison.num_compared == 12
        assert outcome.checkpoint == f"{outcome.run}/checkpoints/step-00000012"
        weights, ours = load_weights(outcome.checkpoint), load_weights(straight.run)
        assert weights.keys() == ours.keys()
        assert all(weights[key].equal(ours[key]) for key in ours)


def test_a_run_resumed_in_another_mode_and_size_ends_with_the_weights_of_a_straight_one(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    stages = [
        make_spec(mode="local", epochs=None, max_steps=3),
        make_spec(mode="dataparallel", epochs=None, max_steps=5),
        make_spec(mode="ddp", workers=3, epochs=None, max_steps=9),
        make_spec(mode="local", epochs=None, max_steps=12),
    ]
    for spec in stages:
        outcome = train(spec, name="moved", search=[folder])
        assert (outcome.status, outcome.step) == ("done", spec.max_steps)
    assert outcome.digest == straight.digest


def test_fast_reduction_gives_other_bits_than_exact(
    make_spec: MakeSpec, folder: Path, straight: Outcome
) -> None:
    spec = make_spec(mode="ddp", workers=2, reduction="fast")
    fast = train(spec, name="fast", search=[folder])
    assert (fast.status, fast.step) == ("done", straight.step)
    assert fast.digest != straight.digest
