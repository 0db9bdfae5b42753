"""Whole commands, one after another: what MLflow and Prometheus cost training, and a replay.

Through Ray, runs with everything off and with everything on take turns, in an order that changes
from round to round; compared are the median step times of the runs of one round.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def telemetry_times(*, workers: int, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Median step time in seconds by what is on, a run of each per round.

    Raises:
        LaunchError: a run failed.
    """
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder, _deaf_server() as deaf:
        variants = {
            OFF: ["tracking.enabled=false", "metrics.enabled=false"],
            "MLflow (SQLite) and Prometheus": [],
            "MLflow's server never answers": [f"tracking.uri={deaf}"],
        }
        for number in range(rounds):
            names = list(variants)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                run = f"r{number}-{list(variants).index(name)}"
                settings = [f"storage={folder}", f"max_steps={num_steps}", *variants[name]]
                found.setdefault(name, []).append(_step_s(run, Path(folder), settings, workers))
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


def telemetry_rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per variant: step time in ms, and the ratios to all off, paired by round."""
    return [
        {
            "telemetry": name,
            "step_ms": 1000 * statistics.median(values),
            "ratios": [a / b for a, b in zip(values, times[OFF], strict=True)],
        }
        for name, values in times.items()
    ]


def _step_s(run: str, folder: Path, settings: list[str], workers: int) -> float:
    command = ["train", str(JOB), "--name", run, "--workers", str(workers), *_set(settings)]
    _samestep(command, folder)
    taken = steps(Storage.at(str(folder / run)), WARM_UP_STEPS).values()
    return statistics.median(record.timing["step_s"] for record in taken)


def _set(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _samestep(arguments: list[str], folder: Path, *, ends_with: int = 0) -> None:
    command = [sys.executable, "-m", "samestep", *arguments]
    env = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != ends_with:
        raise LaunchError(f"{command} ended with {done.returncode}:\n{done.stdout[-8000:]}")


@contextmanager
def _deaf_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
