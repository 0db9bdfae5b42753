"""What holds for every test: no leaks, no surprises from Ray's defaults."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Explicit, because Ray 2.60 otherwise turns token authentication on by itself and writes a token
# into the home folder. Tests of authentication set their own values.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Processes that a raylet keeps ready know nothing of a run's environment, so none could use them.
os.environ.update({"RAY_prestart_worker_first_driver": "0"})

# Hundreds of processes import the package: the first of them compiles it for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A part of shared memory that no other run of the tests on this machine writes into.
MEMORY = "/dev/shm"
SHARED_MEMORY = Path(
    tempfile.mkdtemp(prefix="samestep-tests-", dir=MEMORY if os.path.isdir(MEMORY) else None)
)
os.environ["SAMESTEP_SHARED_MEMORY"] = str(SHARED_MEMORY)

# How long an example takes says more about the machine than about the code.
settings.register_profile("samestep", deadline=None)
settings.load_profile("samestep")

MARK = "SAMESTEP_TEST_MARK"
GRACE_S = 10.0
STARTING_S = 1.0
# Set by libraries at their first import or use, whichever test happens to come first.
SET_BY_LIBRARIES = frozenset(
    {
        "KMP_DUPLICATE_LIB_OK",  # scikit-learn
        "KMP_INIT_AT_FORK",  # scikit-learn
        "PYTEST_CURRENT_TEST",
        # Mode local sets these where torch is not loaded yet; what torch was loaded under stays so.
        *("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "TORCHINDUCTOR_DETERMINISTIC"),
        *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        "RAY_CLIENT_MODE",  # ray
        "TORCHINDUCTOR_CACHE_DIR",  # torch, with its first optimizer
    }
)
# Helpers of multiprocessing, which Python keeps for the life of the process.
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
NEED_RAY = ("tests/chaos/", "tests/integration/")
# Of those, the ones that start no cluster.
NEED_NO_RAY = tuple(
    f"tests/integration/test_{name}.py"
    for name in ("ray_private", "settling", "tracked_afterwards", "tracked_model", "tracking")
)
# These have clusters of their own; the other process has time for them.
OTHER_CLUSTERS = tuple(
    f"tests/integration/test_{name}.py" for name in ("lost_head", "several_nodes", "submitted_job")
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands tests out file by file, and those with a Ray cluster to one process, but for a few.

    All side by side they would get in one another's way, in time.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneClusterAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(NEED_RAY) and file not in NEED_NO_RAY:
                return "other clusters" if file in OTHER_CLUSTERS else "ray"
            # These look at what is made once for all of them.
            return "replay" if file.startswith("tests/unit/replay/") else file

    return OneClusterAtATime(config, log)


def pytest_unconfigure() -> None:
    """Takes the tests' shared memory away."""
    shutil.rmtree(SHARED_MEMORY, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves environment variables, processes, threads or memory of ours behind.

    Processes are found as new children of this one, and by a mark in their environment, which
    finds those whose parent has ended as well. What leaked is ended, so that only the test that
    leaked fails.
    """
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    variables = _variables()
    processes = set(psutil.pids())
    threads = set(threading.enumerate())
    memory = set(SHARED_MEMORY.iterdir())
    yield
    leaks = [
        *_changed(variables, _variables()),
        *_leaked_threads(threads),
        *_leaked_processes(processes, mark),
        *_leaked_memory(memory),
    ]
    for name in set(os.environ) - set(variables) - SET_BY_LIBRARIES - {MARK}:
        del os.environ[name]
    os.environ.update(variables)
    del os.environ[MARK]
    if leaks:
        pytest.fail("the test leaked:\n  " + "\n  ".join(leaks), pytrace=False)


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SET_BY_LIBRARIES and name != MARK
    }


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"environment variable {name}: {before.get(name)!r} before, {after.get(name)!r} after"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    ours = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("samestep")
    ]
    for thread in ours:
        thread.join(GRACE_S / len(ours))
    return [f"thread {thread.name}" for thread in ours if thread.is_alive()]


def _leaked_memory(before: set[Path]) -> list[str]:
    left = sorted(set(SHARED_MEMORY.iterdir()) - before)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [f"shared memory {path.name}" for path in left]


def _has_mark(process: psutil.Process, mark: str, end: float) -> bool:
    """Whether a process was started with this mark; Ray's processes write their title over it.

    While a program starts there is nothing to read at all, for a moment: what is looked at must
    be what was read.
    """
    pause, entry = threading.Event(), f"{MARK}={mark}".encode()
    while True:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:  # it has ended, is another user's, or this is not Linux
            return process.environ().get(MARK) == mark
        if environment or time.monotonic() > end:
            return entry in environment.split(b"\0")
        pause.wait(0.001)


def _command_of(process: psutil.Process, end: float) -> str:
    """Its command line, which is empty for a moment too."""
    pause = threading.Event()
    while not (command := process.cmdline()) and time.monotonic() < end:
        if process.status() == psutil.STATUS_ZOMBIE:
            break
        pause.wait(0.001)
    return " ".join(command)


def _leaked_processes(before: set[int], mark: str) -> list[str]:
    own, end = os.getpid(), time.monotonic() + STARTING_S
    found: list[tuple[psutil.Process, str]] = []
    for pid in set(psutil.pids()) - before:
        try:
            process = psutil.Process(pid)
            if process.ppid() != own and not _has_mark(process, mark, end):
                continue
            command = _command_of(process, end)
        except psutil.Error:
            continue  # ended meanwhile, or another user's
        if not any(name in command for name in KEPT_BY_PYTHON):
            found.append((process, command))
    _, alive = psutil.wait_procs([process for process, _ in found], timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return [f"process {process.pid}: {command}" for process, command in found if process in alive]
