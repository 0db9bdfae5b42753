"""Real Ray clusters on this machine, and jobs small enough for two cores."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from samestep import JobSpec, Outcome, parse_spec, train
from samestep.cluster.environment import TRAIN_ENVIRONMENT, prepare_ray
from samestep.exact import numerics

# Test modules share the module beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tracked_story import Story

WaitUntil = Callable[[Callable[[], Any], float, str], Any]

ROOT = Path(__file__).resolve().parents[2]
JOB = {
    "workload": "tiny:Tiny",
    "batch_size": 16,
    "shards": 4,
    "epochs": 3,
    "workers": {"min": 1, "max": 4},
    "resources": {"cpu": 1},
    "checkpoint": {"every_steps": 4},
    "digest_every": 3,
    "tracking": {"enabled": False},
    "faults": {"spares": 0},  # each is a process, which takes seconds of everybody's time
}

WORKLOAD = '''
import os
import threading
from pathlib import Path

import torch
from torch import nn

import samestep


class Data(torch.utils.data.Dataset):
    """61 samples: batches of 16 and one of 13."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator) + 0.1 * torch.rand(8), index % 3


class Tiny(samestep.Workload):
    """BatchNorm, dropout and augmentation; faults at steps of the job, odd metrics."""

    def __init__(
        self, pause_s=0.0, raise_at=None, break_at=None, nan_at=None, gate=None, odd_metrics=False
    ):
        self.odd_metrics = odd_metrics
        self.pause_s, self.raise_at, self.break_at, self.gate = pause_s, raise_at, break_at, gate
        self.nan_at, self.step = nan_at, None

    def model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
        )

    def data(self):
        return Data()

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def before_step(self, model, step):
        if self.gate is not None:
            Path(self.gate, f"{os.getpid()}-{step}").touch()
        if not (self.gate is not None and Path(self.gate, "fast").exists()):
            threading.Event().wait(self.pause_s)
        self.step = step
        if step == self.raise_at:
            raise ValueError("the workload's own message")
        if step == self.break_at:
            answer = 40 + 2
            breakpoint()
            assert answer

    def loss(self, model, batch):
        inputs, labels = batch
        logits = model(inputs * float("nan") if self.step == self.nan_at else inputs)
        metrics = {"accuracy": (logits.argmax(1) == labels).float()}
        if self.odd_metrics:
            half = metrics["accuracy"] / 2
            metrics |= {"recall@10": half, "of none": half / 0 * 0}
        return samestep.Loss(value=nn.functional.cross_entropy(logits, labels), metrics=metrics)

    def evaluation_data(self):
        return Data()

    def evaluate(self, model, batch):
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workload `tiny` in it."""
    path = tmp_path_factory.mktemp("workload")
    (path / "tiny.py").write_text(textwrap.dedent(WORKLOAD))
    return path


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., JobSpec]:
    """Makes the spec of the tiny job, with fields replaced."""

    def make(**fields: Any) -> JobSpec:
        return parse_spec({**JOB, "storage": str(tmp_path / "runs"), **fields})

    return make


@pytest.fixture(scope="session")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The tiny job, without any fault, in one process."""
    spec = parse_spec({**JOB, "mode": "local", "storage": str(tmp_path_factory.mktemp("runs"))})
    return train(spec, name="straight", search=[folder])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster with four slots that the tests of a module share."""
    prepare_ray()
    variables = {**numerics.environment(parse_spec(JOB)), **TRAIN_ENVIRONMENT}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": variables},
        logging_level="WARNING",
    )
    yield
    ray.shutdown()


@pytest.fixture
def wait_until() -> WaitUntil:
    """The first true value of a condition that is looked at every 50 ms."""

    def wait(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            pause.wait(0.05)
        raise AssertionError(f"{what}: not within {timeout_s:g} s")

    return wait


@pytest.fixture
def start_command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `samestep` as a user would, in a group of its own; its output goes to one pipe."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "samestep", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT / "platform"), "COLUMNS": "200"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def write_job(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a job file of the tiny workload, beside it, with fields replaced."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "job"
        path.mkdir(exist_ok=True)
        (path / "tiny.py").write_text((folder / "tiny.py").read_text())
        job = path / "job.yaml"
        job.write_text(yaml.safe_dump({**JOB, "storage": str(tmp_path / "runs"), **fields}))
        return job

    return write


@pytest.fixture
def make_story(tmp_path: Path) -> Iterator[Callable[..., Story]]:
    made: list[Story] = []

    def make(**fields: Any) -> Story:
        made.append(Story(tmp_path, **fields))
        return made[-1]

    yield make
    for story in made:
        if story.recorder is not None:
            story.recorder.close()
