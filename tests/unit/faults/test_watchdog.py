"""The watchdog of a worker: in this process where it only tells, else in one of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.faults.progress import Phase, Position, Progress
from samestep.faults.watchdog import EXIT_STATUS, Stall, Watchdog

PLATFORM = Path(__file__).resolve().parents[3] / "platform"


@pytest.fixture
def told() -> queue.Queue[Stall]:
    return queue.Queue()


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def watchdog(progress: Progress, told: queue.Queue[Stall]) -> Iterator[Watchdog]:
    made = Watchdog(progress, timeout_s=0.05, report=told.put)
    made.start()
    yield made
    made.close()


@pytest.mark.usefixtures("watchdog")
def test_a_stall_is_told_once_with_its_place_and_all_stacks(
    progress: Progress, told: queue.Queue[Stall]
) -> None:
    progress.at(Phase.FORWARD, step=4, shard=1)
    stall = told.get(timeout=10)
    while stall.position == Position():  # it may have looked before the mark
        stall = told.get(timeout=10)
    assert stall.position == Position(step=4, phase=Phase.FORWARD, shard=1)
    assert stall.still_s > 0.05
    assert "thread MainThread" in stall.stacks
    assert "test_a_stall_is_told_once" in stall.stacks
    assert not stall.ends
    assert stall.to_json()["place"] == "forward of step 4, shard 1"
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    progress.at(Phase.FORWARD, step=5)
    assert told.get(timeout=10).position.step == 5


def test_while_it_is_paused_standing_still_is_fine(
    progress: Progress, told: queue.Queue[Stall]
) -> None:
    looked: queue.Queue[bool] = queue.Queue()

    def paused() -> bool:
        looked.put(True)
        return True

    watchdog = Watchdog(progress, timeout_s=0.02, report=told.put, paused=paused)
    watchdog.start()
    for _ in range(3):
        assert looked.get(timeout=10)
    watchdog.close()
    assert told.empty()


def test_a_report_that_fails_does_not_end_the_watch(progress: Progress) -> None:
    calls: queue.Queue[int] = queue.Queue()

    def report(stall: Stall) -> None:
        calls.put(stall.position.step)
        raise ConnectionError("the recorder is away")

    watchdog = Watchdog(progress, timeout_s=0.02, report=report)
    watchdog.start()
    for step in (1, 2):
        progress.at(Phase.UPDATE, step=step)
        while calls.get(timeout=10) != step:
            pass
    watchdog.close()


def run_worker(body: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A process with a watchdog of 0.3 s that does `body`."""
    code = textwrap.dedent("""
        import json, sys, threading, time
        from pathlib import Path
        from samestep.faults import watchdog as module
        from samestep.faults.progress import Phase, Progress
        module.LOCKED_GRACE_S = 0.5
        progress = Progress()
        out = Path(sys.argv[1])
        watchdog = module.Watchdog(
            progress, timeout_s=0.3, may_exit=True, stack_file=out / "stacks",
            report=lambda stall: (out / "stall.json").write_text(json.dumps(stall.to_json())),
        )
        watchdog.start()
    """) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(PLATFORM)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_worker_that_hangs_in_its_own_code_ends_after_it_was_told(tmp_path: Path) -> None:
    done = run_worker(
        """
        def user_code():
            threading.Event().wait()
        progress.at(Phase.FORWARD, step=3, shard=0)
        user_code()
        """,
        tmp_path,
    )
    assert done.returncode == EXIT_STATUS
    stall = json.loads((tmp_path / "stall.json").read_text())
    assert stall["place"] == "forward of step 3, shard 0"
    assert "user_code" in stall["stacks"]


def test_a_worker_that_waits_for_others_is_told_and_lives(tmp_path: Path) -> None:
    done = run_worker(
        """
        progress.at(Phase.EXCHANGE, step=3)
        pause = threading.Event()
        while not (out / "stall.json").exists():
            pause.wait(0.02)
        pause.wait(0.5)
        progress.at(Phase.UPDATE, step=3)
        watchdog.close()
        print("alive")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_a_worker_that_holds_the_interpreter_lock_ends_and_leaves_its_stacks(
    tmp_path: Path,
) -> None:
    done = run_worker(
        """
        import re
        progress.at(Phase.DATA, step=9)
        pause = threading.Event()
        pause.wait(0.15)  # the watchdog has armed the timer
        re.match(r"(a+)+$", "a" * 64 + "b")  # one call in C that never lets go of the lock
        """,
        tmp_path,
    )
    assert done.returncode == 1
    assert not (tmp_path / "stall.json").exists()
    assert "Timeout" in (tmp_path / "stacks").read_text()


def test_a_watchdog_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    done = run_worker(
        """
        watchdog.close()
        threading.Event().wait(1.5)
        print("alive")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")
