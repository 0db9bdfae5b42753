"""Whole commands, one after another: what MLflow and Prometheus cost training, and a replay.

Through Ray, runs with everything off and with everything on take turns, in an order that changes
from round to round; compared are the median step times of the runs of one round. These drift from
run to run by more than what is looked for. So the processor time of all processes but the workers
is taken as well: two workers fill two cores, and what somebody else computes holds up at most both
of them for as long.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from launches import UNWANTED, LaunchError

from samestep.checkpoint.storage import Storage
from samestep.errors import ExitStatus
from samestep.names import BUNDLE_FILE, INCIDENTS_DIR
from samestep.telemetry.ledger import steps

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "workloads" / "chargpt" / "job.yaml"
DIGITS = ROOT / "workloads" / "digits"
OFF = "all off"
WARM_UP_STEPS = 20
TIMEOUT_S = 600
SAMPLE_S = 0.5
WORKER_TITLE = "ray::SteadyWorker"


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a run went, from its warm-up on.

    Attributes:
        step_s: the median time of a step.
        beside: cores that all processes but the workers kept busy, in the mean.
    """

    step_s: float
    beside: float


def telemetry_courses(*, workers: int, rounds: int, num_steps: int) -> dict[str, list[Course]]:
    """How runs went by what is on, one of each per round.

    Raises:
        LaunchError: a run failed.
    """
    found: dict[str, list[Course]] = {}
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder, _deaf_server() as deaf:
        variants = {
            OFF: ["tracking.enabled=false", "metrics.enabled=false"],
            "MLflow (SQLite) and Prometheus": [],
            "MLflow's server never answers": [f"tracking.uri={deaf}"],
            "MLflow's server is away": [f"tracking.uri={_away()}"],
        }
        for number in range(rounds):
            names = list(variants)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                run = f"r{number}-{list(variants).index(name)}"
                settings = [f"storage={folder}", f"max_steps={num_steps}", *variants[name]]
                found.setdefault(name, []).append(_course(run, Path(folder), settings, workers))
    return found


def replay_times(times: int) -> list[float]:
    """Seconds that `samestep replay` takes for a bundle of digits, from its process's start on.

    Raises:
        LaunchError: the run left no bundle, or the step was not reproduced.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as temporary:
        folder, settings = Path(temporary), [f"storage={temporary}", "tracking.enabled=false"]
        command = ["train", str(DIGITS / "job.yaml"), "--name", "run", "--mode", "local"]
        command += _set(["args.lr=3000.0", *settings])  # soon no number any more
        _samestep(command, folder, ends_with=ExitStatus.FAILED)
        bundles = list((folder / "run" / INCIDENTS_DIR).glob(f"*/{BUNDLE_FILE}"))
        if not bundles:
            raise LaunchError(f"{command} left no bundle")
        command, taken_s = ["replay", str(bundles[0].parent), "--code", str(DIGITS)], []
        for _ in range(times):
            started = time.perf_counter()
            _samestep(command, folder)
            taken_s.append(time.perf_counter() - started)
        return taken_s


def telemetry_rows(courses: dict[str, list[Course]]) -> list[dict[str, Any]]:
    """A row per variant: step time in ms, and the ratios to all off, paired by round.

    `beside` are cores, and `more_beside` those beyond the median of all off.
    """
    off = statistics.median(course.beside for course in courses[OFF])
    return [
        {
            "telemetry": name,
            "step_ms": 1000 * statistics.median(course.step_s for course in found),
            "ratios": [a.step_s / b.step_s for a, b in zip(found, courses[OFF], strict=True)],
            "beside": [course.beside for course in found],
            "more_beside": statistics.median(course.beside for course in found) - off,
        }
        for name, found in courses.items()
    ]


def _course(run: str, folder: Path, settings: list[str], workers: int) -> Course:
    command = ["train", str(JOB), "--name", run, "--workers", str(workers), *_set(settings)]
    samples: list[tuple[float, dict[int, float]]] = []

    def sample(driver: int) -> None:
        samples.append((time.time(), _cpu_s_beside(driver)))

    _samestep(command, folder, meanwhile=sample)
    taken = steps(Storage.at(str(folder / run)), WARM_UP_STEPS).values()
    at_s = [record.timing["at_s"] for record in taken]
    during = [known for known in samples if min(at_s) <= known[0] <= max(at_s)]
    (first_s, before), (last_s, after) = during[0], during[-1]
    # Whoever ended in between is not counted; who began is.
    cpu_s = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    return Course(
        step_s=statistics.median(record.timing["step_s"] for record in taken),
        beside=cpu_s / (last_s - first_s),
    )


def _cpu_s_beside(driver: int) -> dict[int, float]:
    """Processor time so far of a driver and all it started, by process, but for the workers."""
    found: dict[int, float] = {}
    with suppress(psutil.Error):
        process = psutil.Process(driver)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended just now
                if not " ".join(one.cmdline()).startswith(WORKER_TITLE):
                    times = one.cpu_times()
                    found[one.pid] = times.user + times.system
    return found


def _set(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _samestep(
    arguments: list[str],
    folder: Path,
    *,
    ends_with: int = 0,
    meanwhile: Callable[[int], None] | None = None,
) -> None:
    command = [sys.executable, "-m", "samestep", *arguments]
    env = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True
        ) as process:
            end = time.monotonic() + TIMEOUT_S
            while process.returncode is None:
                if time.monotonic() > end:
                    process.kill()
                    raise LaunchError(f"{command} took more than {TIMEOUT_S:g} s")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_S if meanwhile is not None else TIMEOUT_S)
                if meanwhile is not None:
                    meanwhile(process.pid)
        output.seek(0)
        text = output.read()
    if process.returncode != ends_with:
        raise LaunchError(f"{command} ended with {process.returncode}:\n{text[-8000:]}")


def _away() -> str:
    """The address of nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def _deaf_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
