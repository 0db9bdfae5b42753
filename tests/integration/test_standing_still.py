"""Workers of a group that stand still, each in a way of its own, and what does not pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from samestep import ExitStatus, JobSpec, Outcome, train
from samestep.checkpoint.storage import Storage
from samestep.replay.summary import summarize

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

pytestmark = pytest.mark.timeout(400)

HANG_S = 8.0
STILL = '''
import ctypes
import os
import signal
import threading
from pathlib import Path

import torch
from samestep.engine import attempt
from tiny import Data, Tiny

attempt.FORMING_S = 8.0
GATE = Path(__file__).parent / "gate"
AN_HOUR_US = 3_600_000_000


def meets(what):
    """Whether this process is the first one that meets what the file stands for."""
    try:
        (GATE / what).rename(GATE / f"{what}-{os.getpid()}-{os.getppid()}")
    except FileNotFoundError:
        return False
    return True


class StillData(Data):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and meets("loader"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


class Still(Tiny):
    def data(self):
        return StillData()

    def loss(self, model, batch):
        if self.step == 0 and meets("first"):  # the group is only forming
            threading.Event().wait()
        return super().loss(model, batch)

    def before_step(self, model, step):
        super().before_step(model, step)
        if step == 2 and meets("arms"):
            (GATE / "loader").touch()
        if step == 7 and meets("lock"):
            ctypes.PyDLL(None).usleep(AN_HOUR_US)
        if step == 10 and meets("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)


class Unpicklable(Exception):
    def __init__(self, step):
        super().__init__(f"of step {step}")
        self.lock = threading.Lock()

    def __reduce__(self):
        raise TypeError("this can't be taken anywhere")


class Raises(Tiny):
    def before_step(self, model, step):
        super().before_step(model, step)
        if step == 5:
            raise Unpicklable(step)  # the user's line
'''


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "still.py").write_text(STILL)
    path = tmp_path / "gate"
    path.mkdir()
    return path


@pytest.mark.usefixtures("cluster")
def test_a_group_that_does_not_form_a_stopped_loader_a_held_lock_and_a_stopped_worker_cost_no_bit(
    make_spec: MakeSpec,
    folder: Path,
    tmp_path: Path,
    gate: Path,
    wait_until: WaitUntil,
    straight: Outcome,
) -> None:
    for kind in ("first", "arms", "lock", "stop"):
        (gate / kind).touch()
    spec = make_spec(
        mode="ddp",
        workers=2,
        workload="still:Still",
        loader_processes=1,
        faults={"hang_timeout_s": HANG_S},
    )
    outcome = train(spec, name="still", search=[tmp_path, folder])
    struck = [path.name.split("-") for path in gate.iterdir()]
    met = {kind: (int(pid), int(parent)) for kind, pid, parent in struck}
    assert set(met) == {"first", "arms", "loader", "lock", "stop"}
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    found = summarize(Storage.at(outcome.run))
    assert (found.num_redone, len(found.attempts)) == (0, 4)
    first, *incidents = found.incidents
    assert (str(first.kind), first.step) == ("hang", 0), first.message
    assert "forward of step 0, shard 0" in first.message
    culprits = [met["loader"][1], met["lock"][0], met["stop"][0]]
    steps = [2, 7, 10]
    for incident, pid, step in zip(incidents, culprits, steps, strict=True):
        assert str(incident.kind) == "hang", incident.message
        assert incident.step == step or (pid == culprits[0] and 2 < incident.step < 7)
        assert incident.world_rank is not None
        assert found.attempts[incident.attempt - 1].fields["pids"][incident.world_rank] == pid
    assert "data of step" in incidents[0].message
    ended = [met["loader"][0], met["first"][0], *culprits]
    wait_until(lambda: not any(map(psutil.pid_exists, ended)), 30, "nobody is left")


@pytest.mark.usefixtures("cluster")
def test_an_exception_that_does_not_pickle_is_told_with_its_line_and_ends_the_run(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, gate: Path
) -> None:
    assert gate.is_dir()
    spec = make_spec(mode="ddp", workers=2, workload="still:Raises")
    outcome = train(spec, name="raises", search=[tmp_path, folder])
    assert (outcome.status, outcome.exit_status) == ("failed", ExitStatus.FAILED)
    assert "Unpicklable: of step 5" in outcome.message
    assert "raise Unpicklable(step)  # the user's line" in outcome.message
    assert "The same step failed in the same way twice" in outcome.message
    found = summarize(Storage.at(outcome.run))
    assert {(str(incident.kind), incident.step) for incident in found.incidents} == {
        ("exception", 5)
    }
