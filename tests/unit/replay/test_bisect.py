"""Two runs whose checkpoints differ already: what made them so is found before them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from planted_runs import HERE, JOB, Result, fresh

NUDGED = 3
"""The step after whose update a weight is another: the last one before a checkpoint."""
RARE = {"digest_every": 6, "checkpoint.every_steps": 2, "checkpoint.keep": 10}
RUNS: dict[str, dict[str, Any]] = {
    "calm": {},
    "nudged": {"args.nudged_at": NUDGED},
    "moved": {"args.moved_at": 4},
    "idle": {**RARE, "args.idle": 1.0},
    "nudged idle": {**RARE, "args.idle": 1.0, "args.nudged_at": 1},
    "other start": {**RARE, "args.idle": 2.0},
}
PAIRS = [
    *[("calm", "nudged"), ("calm", "flipped"), ("flipped", "calm"), ("calm", "moved")],
    *[("idle", "nudged idle"), ("idle", "other start")],
]


@pytest.fixture(scope="module")
def bisected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Result]:
    """What is said of each pair of runs."""
    folder = tmp_path_factory.mktemp("bisected")
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "max_steps": 7}))
    (folder / "wobbly.py").write_text((HERE / "wobbly.py").read_text())
    commands = []
    for name, settings in RUNS.items():
        given = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
        commands.append(["train", "job.yaml", "--name", name.replace(" ", "-"), *given])
    assert [result.status for result in fresh(folder, *commands)] == [0] * len(RUNS)
    flip(folder / "runs" / "nudged", folder / "runs" / "flipped")
    names = [[name.replace(" ", "-") for name in pair] for pair in PAIRS]
    return dict(zip(PAIRS, fresh(folder, *(["bisect", *pair] for pair in names)), strict=True))


def flip(nudged: Path, flipped: Path) -> None:
    """A run whose machine did by itself, once, what the job says in the other."""
    shutil.copytree(nudged, flipped)
    spec = yaml.safe_load((flipped / "spec.yaml").read_text())
    assert spec["args"].pop("nudged_at") == NUDGED
    (flipped / "spec.yaml").write_text(yaml.safe_dump(spec))


def test_an_update_that_differed_right_before_a_checkpoint_is_found(
    bisected: dict[tuple[str, str], Result],
) -> None:
    found = bisected["calm", "nudged"]
    assert found.status == 11
    lines = found.out.splitlines()
    assert lines[0].startswith("first difference at step 4: ")
    tensor = "first tensor that differs: model/first.weight (step 3, state after the step): "
    assert any(line.startswith(tensor) for line in lines)
    assert "the values of step 3 are the same, but not what its update made of them" in lines
    assert "began" not in found.out


def test_an_update_is_found_behind_several_checkpoints_that_differ(
    bisected: dict[tuple[str, str], Result],
) -> None:
    lines = bisected["idle", "nudged idle"].out.splitlines()
    assert lines[0].startswith("first difference at step 5: state_digest: ")
    tensor = "first tensor that differs: model/idle (step 1, state after the step): "
    assert any(line.startswith(tensor) for line in lines)
    assert lines[-1] == "the values of step 1 are the same, but not what its update made of them"


@pytest.mark.parametrize(("pair", "odd"), [(("calm", "flipped"), "b"), (("flipped", "calm"), "a")])
def test_a_run_that_does_not_come_to_its_own_checkpoint_again_is_named_with_step_and_tensor(
    bisected: dict[tuple[str, str], Result], pair: tuple[str, str], odd: str
) -> None:
    lines = bisected[pair].out.splitlines()
    assert lines[0].startswith("first difference at step 4: ")
    tensor = "first tensor that differs: model/first.weight (step 4, state before the step): "
    assert any(line.startswith(tensor) for line in lines)
    # The digest after three steps, which both ledgers have, leaves one step that it can be.
    assert lines[-1] == (
        f"run {odd}, taken again here from its start, does not come to its own checkpoint after 4 "
        "steps: it was computed differently then (another machine, other code, or a fault of the "
        "hardware), in step 3 or when that checkpoint was written"
    )


def test_before_step_that_parts_two_runs_is_no_other_start(
    bisected: dict[tuple[str, str], Result],
) -> None:
    lines = bisected["calm", "moved"].out.splitlines()
    tensor = "first tensor that differs: model/first.weight (step 4, state before the step): "
    assert any(line.startswith(tensor) for line in lines)
    assert lines[-1] == "both come to step 4 with the same state: its before_step parts them"


def test_runs_that_began_with_different_states_are_told_so(
    bisected: dict[tuple[str, str], Result],
) -> None:
    found = bisected["idle", "other start"]
    assert found.status == 11
    lines = found.out.splitlines()
    assert lines[0].startswith("first difference at step 5: state_digest: ")
    tensor = "first tensor that differs: model/idle (step 0, state before the step): "
    assert any(line.startswith(tensor) for line in lines)
    assert lines[-1] == (
        "the states with which the two began differ already; give both the same start"
    )
