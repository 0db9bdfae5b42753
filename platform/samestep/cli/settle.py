"""Tells Prometheus and MLflow of runs that died, on the way: see `telemetry.settling`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import samestep
from samestep.checkpoint.storage import Storage
from samestep.telemetry.settling import is_due
from samestep.telemetry.targets import withdraw_left

LIMIT_S: Final = 30.0
_seen: Final[list[Storage]] = []


def remember(run: Storage) -> None:
    """Notes a run that the command has found, to be settled when the command ends."""
    _seen.append(run)


def forget_seen() -> None:
    """Leaves the runs that were remembered as they are."""
    _seen.clear()


def settle_seen() -> None:
    """Settles the runs that were remembered."""
    runs = list(_seen)
    forget_seen()
    settle(runs)


def settle(runs: Iterable[Storage]) -> None:
    """Settles those that need it, within half a minute; takes no time where none does.

    MLflow is told in a process of its own: its client may wait for longer than anybody who only
    looks at a run, and such a process can be ended.
    """
    runs = list(runs)
    for run in runs:
        withdraw_left(run)
    due = [run.uri for run in runs if is_due(run)]
    if not due:
        return
    package = str(Path(samestep.__file__).parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            # Without the working directory on the path: a user's file must not stand for a module.
            [sys.executable, "-P", "-m", "samestep.telemetry.settling", *due],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
