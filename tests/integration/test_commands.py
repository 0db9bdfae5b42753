"""The command line as a user meets it: stop and resume, exit statuses, a breakpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from samestep import ExitStatus, Outcome, load_spec, train
from samestep.checkpoint.storage import Storage
from samestep.replay.compare import Verdict, compare_runs
from samestep.replay.summary import summarize

pytestmark = pytest.mark.timeout(400)

StartCommand = Callable[..., subprocess.Popen[str]]
WriteJob = Callable[..., Path]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

STOP_S = 120.0


@pytest.fixture
def shared_cluster(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this test find the cluster of this module, and start none of their own."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


def stop(process: subprocess.Popen[str], signal_it: Callable[[], None]) -> str:
    """Stops a run, which ends by itself then; gives the output of its command."""
    signal_it()
    output, _ = process.communicate(timeout=STOP_S)
    return output


def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_resumes_under_another_size(
    start_command: StartCommand, write_job: WriteJob, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    # More than there are: the cluster of the command's own says so, and no bit follows from it.
    too_many = len(os.sched_getaffinity(0)) + 1
    job = write_job(
        args={"pause_s": 0.2, "gate": str(gate)},
        checkpoint={"every_steps": 0},
        resources={"cpu": too_many},
    )
    straight = train(load_spec(job, {"mode": "local"}), name="straight", search=[job.parent])

    before = set(os.listdir(gate))
    first = start_command("train", job, "--name", "stopped", "--workers", "1", cwd=tmp_path)
    wait_until(lambda: set(os.listdir(gate)) - before, 120, "the first step")
    output = stop(first, lambda: first.send_signal(signal.SIGINT))
    assert first.returncode == 3, output
    assert "interrupted" in output
    advertised = f"this machine has {too_many - 1} cores; the local cluster advertises {too_many}"
    assert advertised in output
    stopped_at = int(re.search(r"checkpoint at step (\d+)", output)[1])  # type: ignore[index]
    assert 0 < stopped_at < 12

    second = start_command("train", job, "--name", "stopped", "--mode", "local", cwd=tmp_path)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    # A slow machine may have lost a worker before, and begun an attempt more.
    assert re.search(rf"attempt \d+ starts at step {stopped_at}: mode local", output), output
    assert straight.digest in output

    runs = (Storage.at(str(tmp_path / "runs" / name)) for name in ("straight", "stopped"))
    assert compare_runs(*runs).verdict is Verdict.IDENTICAL


@pytest.mark.usefixtures("shared_cluster")
def test_sigterm_to_the_whole_process_group_is_a_planned_stop_too(
    start_command: StartCommand,
    write_job: WriteJob,
    tmp_path: Path,
    wait_until: WaitUntil,
    straight: Outcome,
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    args = {"pause_s": 0.2, "gate": str(gate)}
    job = write_job(mode="ddp", workers=2, args=args, checkpoint={"every_steps": 0})
    process = start_command(
        *("train", job, "--name", "t"), cwd=tmp_path, start_new_session=False, process_group=0
    )
    wait_until(lambda: len({n.split("-")[0] for n in os.listdir(gate)}) == 2, 180, "two workers")
    output = stop(process, lambda: os.killpg(process.pid, signal.SIGTERM))
    assert process.returncode == ExitStatus.INTERRUPTED, output
    assert re.search(r"^status +interrupted$", output, flags=re.MULTILINE)
    pids = [int(name.split("-")[0]) for name in os.listdir(gate)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    run = Storage.at(str(tmp_path / "runs" / "t"))
    stopped_at = summarize(run).num_steps
    assert 0 < stopped_at < 12
    (gate / "fast").touch()
    resumed = train(load_spec(job, {"mode": "local"}), name="t", search=[job.parent])
    assert (resumed.status, resumed.digest) == ("done", straight.digest)
    found = summarize(run)
    assert [attempt.start_step for attempt in found.attempts] == [0, stopped_at]
    assert (found.num_redone, list(found.incidents)) == (0, [])


def test_sigterm_to_the_driver_is_a_planned_stop(
    start_command: StartCommand, write_job: WriteJob, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    job = write_job(args={"pause_s": 0.2, "gate": str(gate)})
    process = start_command("train", job, "--name", "t", "--mode", "local", cwd=tmp_path)
    wait_until(lambda: os.listdir(gate), 60, "the first step")
    output = stop(process, process.terminate)
    assert process.returncode == 3, output
    assert "stop requested: SIGTERM" in output


@pytest.mark.usefixtures("shared_cluster")
def test_a_number_of_workers_that_is_asked_for_is_not_fallen_back_from(
    start_command: StartCommand, write_job: WriteJob, tmp_path: Path
) -> None:
    job = write_job(mode="auto", resources={"cpu": 2}, faults={"placement_timeout_s": 1})
    process = start_command("train", job, "--workers", "4", cwd=tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitStatus.BAD_INPUT, output
    assert "no room for 4 workers" in output
    assert "falling back" not in output


@pytest.mark.usefixtures("shared_cluster")
def test_a_breakpoint_in_the_actor_reaches_the_terminal_that_started_the_run(
    start_command: StartCommand, write_job: WriteJob, tmp_path: Path
) -> None:
    job = write_job(args={"break_at": 2})
    process = start_command(
        "train", job, "--mode", "dataparallel", cwd=tmp_path, stdin=subprocess.PIPE
    )
    output, _ = process.communicate("p answer, step\ncontinue\n", timeout=240)
    assert process.returncode == 0, output
    assert "(42, 2)" in output
    assert "done" in output


def test_bad_input_ends_with_status_2_and_says_what_is_allowed(
    start_command: StartCommand, write_job: WriteJob, tmp_path: Path
) -> None:
    process = start_command("train", write_job(shard=3), cwd=tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "shard: unknown field; did you mean shards?" in output
    assert "Traceback" not in output
