"""Starts torchrun for one task after another, and brings back what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import MODELS

from samestep.exact import numerics

WORKER = Path(__file__).resolve().with_name("worker.py")
TIMEOUT_S = 900

# They choose OpenBLAS's kernels by hand, which a machine may need and a measurement must not have.
UNWANTED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class LaunchError(Exception):
    """A launch failed; holds what it printed."""


def launch(task: dict[str, Any], *, workers: int) -> Any:
    """Runs a task of `worker.py` in a group of workers under torchrun on this machine.

    Raises:
        LaunchError: it failed, or took longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(workers)),
            *(str(WORKER), json.dumps(task), str(result)),
        ]
        try:
            done = subprocess.run(
                command,
                env=_environment(task),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"{task} took longer than {TIMEOUT_S} s: take fewer --rounds"
            ) from error
        if done.returncode != 0:
            raise LaunchError(f"{task} ended with {done.returncode}:\n{done.stdout[-8000:]}")
        return json.loads(result.read_text())


def _environment(task: dict[str, Any]) -> dict[str, str]:
    """What a worker of samestep has; the plain script gets the same."""
    spec = MODELS[task["model"]].spec(shards=1, threads=task["threads"])
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    return {"GLOO_SOCKET_IFNAME": "lo", **kept, **numerics.environment(spec)}
