"""The workloads that come with samestep, as they are: the same bits in every place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from attempts import PLACES, Run

from samestep.spec import dump_spec, load_spec

Results = Callable[..., list[Any]]
WORKLOADS = Path(__file__).resolve().parents[3] / "workloads"
EVERYWHERE = [*PLACES, {"world_size": 4}]
NUM_STEPS = 3
# What --set may give on the command line: only size and length are other than in the job files.
SMALL: dict[str, dict[str, object]] = {
    "chargpt": {
        "args.context": 64,
        "args.width": 16,
        "args.depth": 1,
        "args.warmup_steps": 2,
        "args.decay_steps": 4,
        "batch_size": 10,
        "evaluate.batch_size": 100,
        "args.sha256": None,  # whatever text this Python has
    },
    "digits": {
        "args.width": 4,
        "args.decay_steps": 4,
        "batch_size": 13,
        "evaluate.batch_size": 90,
        "epochs": None,
    },
}


LAST_OF_EPOCH = {"batch_size": 499, "evaluate.every_epochs": 0}
"""Of 1,437 images the third batch has 439, and with four shards the last one fewest."""
OTHERWISE: dict[str, dict[str, object]] = {
    "digits": {**LAST_OF_EPOCH, "precision": "bf16"},
    "chargpt": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_workload_gives_the_same_digest_in_bf16_with_loader_processes_and_a_short_batch(
    name: str, results: Results, tmp_path: Path
) -> None:
    folder = WORKLOADS / name
    digests: set[str] = set()
    for loaders, place in ((0, {"world_size": 1}), (2, {"world_size": 2}), (0, {"world_size": 3})):
        given = {**OTHERWISE[name], "loader_processes": loaders, "max_steps": NUM_STEPS}
        spec = yaml.safe_load(dump_spec(load_spec(folder / "job.yaml", {**SMALL[name], **given})))
        run = tmp_path / f"run-{len(digests)}-{loaders}-{place['world_size']}"
        answers = results("attempt", spec=spec, run=str(run), search=str(folder), **place)
        found = Run(run, answers)
        digests.add(found.digest)
        sizes = [step.samples for step in found.steps()]
        assert sizes == ([499, 499, 439] if name == "digits" else [10, 10, 10])
    assert len(digests) == 1


@pytest.mark.parametrize("name", SMALL)
def test_a_workload_gives_the_same_digest_in_every_place_and_over_a_stop(
    name: str, results: Results, tmp_path: Path
) -> None:
    folder = WORKLOADS / name

    def trained(called: str, place: dict[str, int], max_steps: int = NUM_STEPS) -> Run:
        settings = {**SMALL[name], "max_steps": max_steps}
        spec = yaml.safe_load(dump_spec(load_spec(folder / "job.yaml", settings)))
        run = tmp_path / called
        answers = results("attempt", spec=spec, run=str(run), search=str(folder), **place)
        return Run(run, answers)

    runs = [trained(f"run-{number}", place) for number, place in enumerate(EVERYWHERE)]
    assert {run.digest for run in runs} == {runs[0].digest}
    losses = [step.loss for step in runs[0].steps()]
    assert len(set(losses)) == NUM_STEPS
    assert all([step.loss for step in run.steps()] == losses for run in runs)
    for stop, before, after in ((1, 4, 3), (2, 2, 0)):
        stopped = trained(f"stopped-{stop}", EVERYWHERE[before], stop)
        assert len(stopped.steps()) == stop
        assert stopped.digest != runs[0].digest
        assert trained(f"stopped-{stop}", EVERYWHERE[after]).digest == runs[0].digest
