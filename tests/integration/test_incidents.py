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
from samestep.incidents.bundle_folder import read_bundle
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


TWO = {"workers": 2}
"""Where who met it says nothing more: each process takes seconds to start."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nan": ("faulty", {"args.nan_at": 20, "args.position": 9}),
    "explodes": ("digits", {"args.lr": 3000.0, **TWO}),
    "label": ("digits", {"workload": "planted:Mislabelled", **TWO}),
    "zero": ("chargpt", {"workload": "planted:Divided", "max_steps": 6, **TWO}),
    "hang": (
        "faulty",
        {"args.hang_at": 20, "args.position": 9, "faults.hang_timeout_s": 8.0, **TWO},
    ),
    "crash": ("faulty", {"args.crash_at": 20, "args.position": 9, **TWO}),
    "memory": ("faulty", {"args.grow_at": 20, "args.grow_bytes": 2**50, **TWO}),
    "flip": ("faulty", {"args.flip_at": 20, "args.position": 9, "incidents.audit_every": 1}),
}
ONCE = ("hang", "crash", "flip")
"""Get past it when the step is taken again, and end as if nothing had been."""


@pytest.fixture(scope="module")
def packed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind the outcome, the incident and its bundle in one file; the runs are gone."""
    place = tmp_path_factory.mktemp("incidents")
    code = place / "code"
    code.mkdir()
    (code / "planted.py").write_text(PLANTED)
    search = [code, *(WORKLOADS / name for name in ("faulty", "digits", "chargpt"))]
    found: dict[str, Any] = {"place": place}
    for kind, (folder, settings) in KINDS.items():
        more: dict[str, Any] = {}
        if kind in ONCE:
            more["args.marker"] = str(place / f"marker-{kind}")
        if kind == "memory":
            more["args.grow_limit_bytes"] = 2**50
        outcome = train(job(folder, {**settings, **more}, place / "runs"), name=kind, search=search)
        incident = summarize(Storage.at(outcome.run)).incidents[0]
        bundle = Path(outcome.run, "incidents", incident.id)
        done = samestep("pack", str(bundle), "--out", str(place / f"{kind}.bundle"), cwd=place)
        assert done.returncode == 0, (kind, done.stderr)
        found[kind] = (outcome, incident)
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
    # A hang or crash has to strike here as well; a bit that was flipped must not.
    strikes = kind in ("hang", "crash")
    marker = ["--set", f"args.marker={tmp_path / 'marker'}"] if strikes else []
    given = ["--code", str(place / "code"), "--json", *marker, *options]
    done = samestep("replay", str(place / f"{kind}.bundle"), *given, cwd=tmp_path)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["verdict"] == "reproduced"
    assert list(tmp_path.glob("tmp/samestep-*")) == []
    return data


def of(packed: dict[str, Any], kind: str) -> tuple[Outcome, Incident]:
    return packed[kind]


def test_a_poisoned_sample(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "nan")
    assert (outcome.status, incident.kind, incident.step) == ("failed", "non_finite", 20)
    data = again(packed, "nan", tmp_path, "--deep")
    assert (data["step"], data["record"]["loss"]["hex"]) == (20, "nan")
    first = data["deep"]["first"]
    assert (first["name"], first["module"], first["shard"]) == ("0", "Linear", 2)
    epoch = torch.randperm(250, generator=torch.Generator().manual_seed(1)).tolist()
    assert [each["id"] for each in data["deep"]["samples"]] == [epoch[(20 - 16) * 16 + 9]]


def test_an_exploding_learning_rate(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "explodes")
    assert (outcome.status, incident.kind) == ("failed", "non_finite")
    data = again(packed, "explodes", tmp_path, "--deep")
    assert data["step"] == incident.step
    assert data["deep"]["first"] is not None


def test_a_worker_that_is_slow(cluster: None, tmp_path: Path) -> None:
    """It has no bundle: a step of it computes what it would on any other worker."""
    slow = {"args.slow_s": 0.5, "args.position": 9, "max_steps": 20, "epochs": None}
    settings = {**slow, "incidents.straggler_after_s": 2.0}
    outcome = train(job("faulty", settings, tmp_path), name="slow", search=[WORKLOADS / "faulty"])
    [incident] = summarize(Storage.at(outcome.run)).incidents
    rank = next(rank for rank in range(3) if 2 in shard_range(4, 3, rank))
    assert (outcome.status, incident.kind, incident.world_rank) == ("done", "straggler", rank)
    assert incident.host
    assert incident.seen["ratio"] > 3
    assert not Path(outcome.run, "incidents", incident.id, "bundle.json").exists()


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
    outcome, incident = of(packed, "hang")
    assert (outcome.status, incident.kind, incident.step) == ("done", "hang", 20)
    data = again(packed, "hang", tmp_path, "--still", str(SLOW_TO_TELL))
    assert data["ended"] == "it stands still in forward of step 20, shard 2"


def test_a_worker_that_is_killed(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "crash")
    assert (outcome.status, incident.kind, incident.step) == ("done", "crash", 20)
    data = again(packed, "crash", tmp_path)
    assert data["ended"] == "the process was ended by SIGKILL in forward of step 20, shard 2"


def test_memory_that_runs_out(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "memory")
    assert (outcome.status, incident.kind, incident.step) == ("failed", "out_of_memory", 20)
    data = again(packed, "memory", tmp_path)
    assert data["raised"].startswith("MemoryError at ")
    assert data["raised"].endswith(" in grow")


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


def test_a_flipped_bit(packed: dict[str, Any], tmp_path: Path) -> None:
    outcome, incident = of(packed, "flip")
    assert (outcome.status, incident.kind, incident.step) == ("done", "corruption", 20)
    # Faults but NaN leave no trace in the weights.
    assert outcome.digest == of(packed, "hang")[0].digest == of(packed, "crash")[0].digest
    data = again(packed, "flip", tmp_path)
    assert data["step"] == 20
    assert data["audit"] is not None
