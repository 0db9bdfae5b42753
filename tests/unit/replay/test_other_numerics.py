"""A bundle that was made under another torch: what its replay promises, and that it is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_runs import Result, Runs, fresh
from sealing import reseal

from samestep.incidents.bundle import folder_of
from samestep.telemetry.records import StepRecord

OLD = "1.13.1"
NAMED = f"  torch: {OLD!r} against {torch.__version__!r}"
TITLE = "the numerics differ, in the run against here:"


@pytest.fixture(scope="module")
def replayed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """By what was recorded there, against what is computed here."""
    folder = tmp_path_factory.mktemp("numerics")
    bundle = Path(folder_of(runs.at("loud"), runs.incident("loud").id).local_path)
    cases = {
        "equal": (OLD, 1.0),
        "near": (OLD, 1 + 1e-5),
        "far": (OLD, 1.01),
        "near under this torch": (None, 1 + 1e-5),
    }
    commands = []
    for number, (version, factor) in enumerate(cases.values()):
        copy = folder / f"bundle-{number}"
        shutil.copytree(bundle, copy)
        remember(copy, version, factor)
        commands.append(["replay", str(copy), "--code", str(runs.folder)])
    return dict(zip(cases, fresh(folder, *commands), strict=True))


def remember(bundle: Path, version: str | None, factor: float) -> None:
    """Lets it say that the run had another torch, and another loss."""
    body = json.loads((bundle / "bundle.json").read_bytes())
    if version is not None:
        assert body["numerics"]["binding"]["torch"] == torch.__version__
        body["numerics"]["binding"]["torch"] = version
    (bundle / "bundle.json").write_text(json.dumps(body))
    step = bundle / "step.json"
    record = StepRecord.from_json(json.loads(step.read_bytes()))
    assert record.loss is not None
    step.write_text(json.dumps(replace(record, loss=record.loss * factor).to_json()) + "\n")
    reseal(bundle)


def test_equal_bits_under_another_torch_are_reproduced_and_it_is_named(
    replayed: dict[str, Result],
) -> None:
    found = replayed["equal"]
    assert found.status == 0, found.out + found.err
    lines = found.out.splitlines()
    assert lines[0].startswith("reproduced bit for bit: step 6 (loss ")
    assert lines[lines.index(TITLE) + 1 :][:1] == [NAMED]


def test_other_bits_under_another_torch_are_within_tolerance_and_it_is_named(
    replayed: dict[str, Result],
) -> None:
    found = replayed["near"]
    assert found.status == 10, found.out + found.err
    lines = found.out.splitlines()
    assert lines[0].startswith("reproduced within 0.001, under other numerics: step 6 (loss ")
    assert any(line.startswith("first difference in bits at step 6: loss: 0x") for line in lines)
    assert lines[lines.index(TITLE) + 1 :][:1] == [NAMED]


def test_a_value_beyond_the_tolerance_is_not_reproduced_whatever_torch(
    replayed: dict[str, Result],
) -> None:
    found = replayed["far"]
    assert found.status == 11, found.out + found.err
    lines = found.out.splitlines()
    assert lines[0].startswith("not reproduced: first difference at step 6: loss: 0x")
    assert lines[lines.index(TITLE) + 1 :][:1] == [NAMED]


def test_there_is_no_tolerance_under_the_same_torch(replayed: dict[str, Result]) -> None:
    found = replayed["near under this torch"]
    assert found.status == 11, found.out + found.err
    assert found.out.startswith("not reproduced: first difference at step 6: loss: 0x")
    assert TITLE not in found.out
