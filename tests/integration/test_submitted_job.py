"""`ray job submit` to a cluster with token authentication, from a copy of the repository."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from samestep import load_spec, train
from samestep.checkpoint.storage import Storage
from samestep.names import Event, Tag
from samestep.telemetry.ledger import events

WaitUntil = Callable[[Callable[[], Any], float, str], Any]

ROOT = Path(__file__).resolve().parents[2]
HEAD = "127.0.0.3"
BIN = Path(sys.executable).parent
FREE_PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
MORE_PORTS = ("metrics-export-port", "ray-client-server-port")

JOB = """
workload: reader:Reader
args: {hold: HOLD}
batch_size: 8
shards: 2
epochs: 3
workers: 2
loader_processes: 1
checkpoint: {every_steps: 0}
"""
WORKLOAD = '''
import os
import threading
from pathlib import Path

import torch
from torch import nn

import samestep

BESIDE = "workloads/reader/data/d.txt"


class Data(torch.utils.data.Dataset):
    """32 samples; what it reads by a relative path is read in the loader process."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 32

    def __getitem__(self, index):
        value = float(Path(BESIDE).read_text()) + float((self.folder / "data/d.txt").read_text())
        return torch.full((2,), value) + torch.rand(2)


class Reader(samestep.Workload):
    """Waits before step 3 for as long as the file `hold` is there."""

    def __init__(self, hold):
        self.hold = Path(hold)
        print("reads", Path(BESIDE).read_text().strip(), "in", os.getcwd())
        print("samestep of", Path(samestep.__file__).parent)

    def model(self):
        return nn.Linear(2, 1)

    def data(self):
        return Data(self.folder)

    def before_step(self, model, step):
        if step == 1:
            Path("out.txt").write_text("one of several")
            self.output_folder.joinpath("out.txt").write_text(str(os.getpid()))
        while step == 3 and self.hold.exists():
            threading.Event().wait(0.05)
        threading.Event().wait(0.3)

    def loss(self, model, batch):
        return model(batch).square().mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
'''

pytestmark = pytest.mark.timeout(590)


@dataclass
class Cluster:
    """A head with its address for jobs, and how to talk to it."""

    address: str
    env: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def ray(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(BIN / "ray"), *arguments],
            cwd=cwd,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(process)
        return process

    def submit(self, copy: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
        return self.ray(
            *("job", "submit", "--address", self.address, "--submission-id", name),
            *("--working-dir", ".", "--runtime-env", "deploy/runtime_env.yaml"),
            *("--", "python", "-m", "samestep", "train", "workloads/reader/job.yaml"),
            *arguments,
            cwd=copy,
        )


def free_ports(number: int) -> list[int]:
    """Free ports outside of the range that Ray gives to workers."""
    found: list[int] = []
    while len(found) < number:
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            port = int(probe.getsockname()[1])
        if not 10002 <= port <= 19999 and port not in found:
            found.append(port)
    return found


def answers(port: int) -> bool:
    try:
        with socket.create_connection((HEAD, port), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    names = (*FREE_PORTS, *MORE_PORTS)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    env = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    # Short: Ray puts sockets below it, whose paths may have 107 characters.
    folder = tmp_path_factory.getbasetemp().parent / f"j{ports['port']}"
    head = subprocess.Popen(
        [
            *(str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address", HEAD),
            *("--dashboard-host", HEAD, "--num-cpus", "2", "--temp-dir", str(folder)),
            *(f"--{name}={port}" for name, port in ports.items()),
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    made = Cluster(address=f"http://{HEAD}:{ports['dashboard-port']}", env=env)
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The part of the repository that a job needs, elsewhere on disk, with a workload in it."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT / "platform", copy / "platform", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "deploy", copy / "deploy")
    shutil.copy(ROOT / ".rayignore", copy)
    reader = copy / "workloads" / "reader"
    (reader / "data").mkdir(parents=True)
    (reader / "data" / "d.txt").write_text("7\n")
    (reader / "reader.py").write_text(WORKLOAD)
    (reader / "job.yaml").write_text(JOB.replace("HOLD", str(tmp_path / "hold")))
    return copy


def test_a_job_is_refused_relative_storage_then_trains_is_attached_to_stopped_and_resumed(
    cluster: Cluster,
    copy: Path,
    tmp_path: Path,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = int(cluster.address.rpartition(":")[2])
    wait_until(lambda: answers(port), 120, "the dashboard")
    refused, _ = cluster.submit(copy, "relative").communicate(timeout=120)
    assert "storage './runs' is relative" in refused, refused
    assert "exit code 2" in refused

    hold = tmp_path / "hold"
    hold.touch()
    run = Storage.at(str(tmp_path / "runs" / "reader"))
    storage = ("--set", f"storage={tmp_path / 'runs'}")
    first = cluster.submit(copy, "first", *storage)
    ledger = tmp_path / "runs/reader/ledger"
    wait_until(lambda: ledger.exists() and events(run, Event.ATTEMPT_STARTED), 180, "the start")
    second = cluster.submit(copy, "second", *storage)
    assert second.stdout is not None
    line = next(line for line in second.stdout if "the run is alive" in line or "rror" in line)
    assert re.search(r"the run is alive \(process \d+ on \S+, Ray job first", line), line

    stop = cluster.ray("job", "stop", "--no-wait", "--address", cluster.address, "first", cwd=copy)
    wait_until(lambda: events(run, Event.STOP_REQUESTED), 60, "the stop")
    hold.unlink()
    output, _ = second.communicate(timeout=120)
    assert "interrupted" in output
    stop.communicate(timeout=60)
    output, _ = first.communicate(timeout=60)
    stopped_at = int(re.search(r"checkpoint at step (\d+)", output)[1])  # type: ignore[index]
    assert 3 < stopped_at < 12

    third, _ = cluster.submit(copy, "third", *storage).communicate(timeout=240)
    assert f"attempt 2 starts at step {stopped_at}" in third, third
    with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as tracked:
        tags = tracked.execute("SELECT value FROM tags WHERE key = ?", (str(Tag.JOB_ID),))
        assert tags.fetchall() == [("third",)]
    assert "writes 'out.txt' by a relative path" in output + third
    assert "the working directory of a submitted job is thrown away" in output + third
    for rank in (0, 1):
        log = (tmp_path / f"runs/reader/logs/attempt-00002/worker-{rank}.log").read_text()
        assert re.search(r"^reads 7 in \S+/working_dir_files/", log, flags=re.MULTILINE), log
        assert re.search(r"^samestep of \S+/py_modules_files/", log, flags=re.MULTILINE), log
        assert (tmp_path / f"runs/reader/outputs/worker-{rank}/out.txt").read_text().isdigit()

    monkeypatch.chdir(copy)
    reader = copy / "workloads/reader"
    here = load_spec(reader / "job.yaml", {"mode": "local", "storage": str(tmp_path / "here")})
    straight = train(here, name="reader", search=[reader])
    assert straight.digest in third
