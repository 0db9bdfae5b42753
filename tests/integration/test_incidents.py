"""Incidents of several workers under Ray: packed, moved away, and taken again with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import Outcome, load_spec, train
from samestep.checkpoint.storage import Storage
from samestep.exact.tree import shard_range
from samestep.incidents.bundle import folder_of
from samestep.incidents.bundle_folder import read_bundle
from samestep.incidents.packing import pack as pack_bundle
from samestep.incidents.record import Incident
from samestep.replay.summary import summarize
from samestep.spec import JobSpec, changed_spec

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ROOT / "workloads"
PLANTED = '''
import torch
from torch import nn

from chargpt import CharGPT
from digits import Digits


class Mislabelled(Digits):
    """One image has a label that is none."""

    def data(self):
        images = super().data()
        images.labels = images.labels.clone()
        images.labels[411] = 12
        return images


class Divides(nn.Module):
    """Divides by zero at one step."""

    by = 1.0

    def forward(self, x):
        return x / self.by


class Divided(CharGPT):
    """A division by zero behind the second block."""

    def model(self):
        net = super().model()
        net.blocks[1] = nn.Sequential(net.blocks[1], Divides())
        return net

    def before_step(self, model, step):
        model.blocks[1][1].by = 0.0 if step == 4 else 1.0
'''
SLOW = '''
import os
import threading

import torch

from faulty import Faulty


class SlowInAFork(torch.utils.data.Dataset):
    """Samples that take their time in a process forked from the one that trains."""

    def __init__(self, samples):
        self.samples, self.made_in = samples, os.getpid()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if os.getpid() != self.made_in:
            threading.Event().wait(0.5)
        return self.samples[index]


class SlowToTell(Faulty):
    """Its bundle takes longer than failing once more does."""

    def data(self):
        return SlowInAFork(super().data())
'''
WITHOUT_DATA = """

def _no_data(self):
    raise RuntimeError("the data is not here")


{name}.data = {name}.evaluation_data = _no_data
"""
SLOW_TO_TELL = 12.0


def job(folder: str, settings: dict[str, Any], storage: Path) -> JobSpec:
    more = {"storage": str(storage), "workers": 3, "tracking.enabled": False, "faults.spares": 0}
    return changed_spec(load_spec(WORKLOADS / folder / "job.yaml"), {**more, **settings})


STEP = {"nan": 12, "flip": 20, "crash": 23, "hang": 26, "memory": 32}
"""When each fault of the one job strikes that gets past all of them."""
DRILL = {
    "max_steps": 40,
    "epochs": None,
    "args.position": 9,
    "args.nan_at": STEP["nan"],
    "incidents.non_finite": "skip",
}
FAULTS = {
    "args.slow_s": 0.3,
    "incidents.straggler_after_s": 2.0,
    "args.flip_at": STEP["flip"],
    "incidents.audit_every": 7,  # step 20, and shard 2 of it, by the seed
    "args.crash_at": STEP["crash"],
    "args.hang_at": STEP["hang"],
    "faults.hang_timeout_s": 8.0,
    "args.grow_at": STEP["memory"],
    "args.grow_bytes": 2**50,
    "args.grow_limit_bytes": 2**50,
}
KINDS = {
    "slow": "straggler",
    "flip": "corruption",
    "nan": "non_finite",
    "crash": "crash",
    "hang": "hang",
    "memory": "out_of_memory",
}
"""Of each fault of that job, what it is told as."""
TWO = {"workers": 2}
"""Where who met it says nothing more: each process takes seconds to start."""
ONE = {"mode": "dataparallel"}
ENDING: dict[str, tuple[str, dict[str, Any]]] = {
    "explodes": ("digits", {"args.lr": 3000.0, **ONE}),
    "label": ("digits", {"workload": "planted:Mislabelled", **ONE}),
    "zero": ("chargpt", {"workload": "planted:Divided", "max_steps": 6, **TWO}),
}
"""Jobs that end with what they met."""


@pytest.fixture(scope="module")
def packed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind the outcome, the incident and its bundle in one file; the runs are gone."""
    place = tmp_path_factory.mktemp("incidents")
    code = place / "code"
    code.mkdir()
    (code / "planted.py").write_text(PLANTED)
    search = [code, *(WORKLOADS / name for name in ("faulty", "digits", "chargpt"))]
    found: dict[str, Any] = {"place": place}

    def run(name: str, folder: str, settings: dict[str, Any]) -> tuple[Outcome, list[Incident]]:
        outcome = train(job(folder, settings, place / "runs"), name=name, search=search)
        return outcome, list(summarize(Storage.at(outcome.run)).incidents)

    def pack(kind: str, outcome: Outcome, incident: Incident) -> None:
        pack_bundle(folder_of(Storage.at(outcome.run), incident.id), place / f"{kind}.bundle")

    found["calm"], _ = run("calm", "faulty", {**DRILL, **ONE})
    marker = {"args.marker": str(place / "marker")}
    outcome, incidents = run("faulty", "faulty", {**DRILL, **FAULTS, **marker})
    for kind, told_as in KINDS.items():
        of_kind = [incident for incident in incidents if incident.kind == told_as]
        found[kind] = (outcome, of_kind[0])
        if kind == "slow":
            bundle = Path(outcome.run, "incidents", of_kind[0].id, "bundle.json")
            found["bundle of slow"] = bundle.exists()
        else:
            assert len(of_kind) == 1, of_kind
            pack(kind, *found[kind])
    for kind, (folder, settings) in ENDING.items():
        outcome, incidents = run(kind, folder, settings)
        found[kind] = (outcome, incidents[0])
        pack(kind, *found[kind])
    shutil.rmtree(place / "runs")
    for name, workload in (("faulty", "Faulty"), ("digits", "Digits"), ("chargpt", "CharGPT")):
        source = (WORKLOADS / name / f"{name}.py").read_text()
        (code / f"{name}.py").write_text(source + WITHOUT_DATA.format(name=workload))
    return found


def samestep(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    temporary = cwd / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-P", "-m", "samestep", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform"), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def again(packed: dict[str, Any], kind: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    """The replay of a kind, in a new process and an empty folder; as `--json` tells it."""
    place = packed["place"]
    # What strikes once has to strike here as well; a bit that was flipped must not.
    strikes = kind in ("hang", "crash", "memory")
    marker = ["--set", f"args.marker={tmp_path / 'marker'}"] if strikes else []
    given = ["--code", str(place / "code"), "--json", *marker, *options]
    done = samestep("replay", str(place / f"{kind}.bundle"), *given, cwd=tmp_path)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["verdict"] == "reproduced"
    assert list(tmp_path.glob("tmp/samestep-*")) == []
    return data


def of(packed: dict[str, Any], kind: str) -> tuple[Outcome, Incident]:
    outcome, incident = packed[kind]
    if kind in STEP:
        assert incident.step == STEP[kind]
    return outcome, incident


def test_a_run_gets_past_what_does_not_come_again_with_the_weights_of_a_calm_one(
    packed: dict[str, Any],
) -> None:
    """Only the NaN is in the weights: the calm one met it as well."""
    outcome, _ = of(packed, "flip")
    assert (outcome.status, outcome.step) == ("done", 40)
    assert outcome.digest == packed["calm"].digest


def test_a_poisoned_sample(packed: dict[str, Any], tmp_path: Path) -> None:
    of(packed, "nan")
    data = again(packed, "nan", tmp_path, "--deep")
    assert (data["step"], data["record"]["loss"]["hex"]) == (STEP["nan"], "nan")
    first = data["deep"]["first"]
    assert (first["name"], first["module"], first["shard"]) == ("0", "Linear", 2)
    epoch = torch.randperm(250, generator=torch.Generator().manual_seed(0)).tolist()
    assert [each["id"] for each in data["deep"]["samples"]] == [epoch[STEP["nan"] * 16 + 9]]


def test_an_exploding_learning_rate(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "explodes")
    assert (outcome.status, incident.kind) == ("failed", "non_finite")
    data = again(packed, "explodes", tmp_path, "--deep")
    assert data["step"] == incident.step
    assert data["deep"]["first"] is not None


def test_a_worker_that_is_slow(packed: dict[str, Any]) -> None:
    """It has no bundle: a step of it computes what it would on any other worker."""
    _, incident = of(packed, "slow")
    rank = next(rank for rank in range(3) if 2 in shard_range(4, 3, rank))
    assert (incident.world_rank, incident.attempt) == (rank, 1)
    assert incident.host
    assert incident.seen["ratio"] > 3
    assert not packed["bundle of slow"]


def test_a_bad_label(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "label")
    assert (outcome.status, incident.kind) == ("failed", "exception")
    data = again(packed, "label", tmp_path, "--deep")
    assert data["raised"].startswith("IndexError at ")
    assert [sample["id"] for sample in data["deep"]["samples"]] == [411]


def test_a_division_by_zero_in_a_module(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "zero")
    assert (outcome.status, incident.kind, incident.step) == ("failed", "non_finite", 4)
    data = again(packed, "zero", tmp_path, "--deep")
    first = data["deep"]["first"]
    assert (first["name"], first["module"]) == ("blocks.1.1", "Divides")


def test_a_worker_that_stands_still(packed: dict[str, Any], tmp_path: Path) -> None:
    of(packed, "hang")
    data = again(packed, "hang", tmp_path, "--still", str(SLOW_TO_TELL))
    assert data["ended"] == f"it stands still in forward of step {STEP['hang']}, shard 2"


def test_a_worker_that_is_killed(packed: dict[str, Any], tmp_path: Path) -> None:
    of(packed, "crash")
    data = again(packed, "crash", tmp_path)
    told = f"the process was ended by SIGKILL in forward of step {STEP['crash']}, shard 2"
    assert data["ended"] == told


def test_memory_that_runs_out(packed: dict[str, Any], tmp_path: Path) -> None:
    of(packed, "memory")
    data = again(packed, "memory", tmp_path)
    assert data["raised"].startswith("MemoryError at ")
    assert data["raised"].endswith(" in grow")


def test_a_flipped_bit(packed: dict[str, Any], tmp_path: Path) -> None:
    of(packed, "flip")
    data = again(packed, "flip", tmp_path)
    assert data["step"] == STEP["flip"]
    assert data["audit"] is not None


def test_a_bundle_that_takes_longer_than_the_rest_of_its_run(cluster: None, tmp_path: Path) -> None:
    """The step fails in the same way in the next attempt, within a second: the run is over."""
    (tmp_path / "slow.py").write_text(SLOW)
    settings = {"workload": "slow:SlowToTell", "args.raise_at": 20, **TWO}
    search = [tmp_path, WORKLOADS / "faulty"]
    outcome = train(job("faulty", settings, tmp_path / "runs"), name="slow", search=search)
    assert outcome.status == "failed"
    assert "failed in the same way twice" in outcome.message
    incident = summarize(Storage.at(outcome.run)).incidents[0]
    assert (incident.kind, incident.step, incident.attempt) == ("exception", 20, 1)
    told = read_bundle(Storage.at(outcome.run).child("incidents").child(incident.id))
    assert (told.sample_steps, told.missing) == ((20,), ())
