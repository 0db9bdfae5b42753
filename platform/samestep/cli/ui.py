"""`samestep ui`: MLflow's own pages for the runs of a storage folder, and where the metrics are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from types import FrameType
from typing import Annotated, Final

import typer

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import RUNS
from samestep.cli.settle import settle
from samestep.errors import InputError
from samestep.names import TRACKING_DATABASE, TRACKING_FILE, Env
from samestep.telemetry.targets import announced, withdraw_all_left

START_S: Final = 120.0
STOP_S: Final = 10.0
POLL_S: Final = 0.2


@handles_errors
def ui(
    storage: Annotated[
        str,
        typer.Argument(metavar="STORAGE", help="The folder that holds run directories."),
    ] = RUNS,
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port of MLflow's pages.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Start MLflow's pages for the runs here, and say where Prometheus finds the live ones.

    Ctrl-C ends it. Runs that are tracked by a server (MLFLOW_TRACKING_URI) are seen there.
    """
    place = Storage.at(storage)
    withdraw_all_left(place)
    for line in _pages(announced(place)):
        print(line)
    settle(place.child(name) for name in place.list() if place.exists(f"{name}/{TRACKING_FILE}"))
    server = os.environ.get(Env.MLFLOW_TRACKING_URI, "")
    if server.startswith(("http://", "https://")):
        print(f"MLflow: {server} ({Env.MLFLOW_TRACKING_URI}); open it in a browser")
        return
    if not place.is_local or not place.exists(TRACKING_DATABASE):
        raise InputError(
            f"there is no {TRACKING_DATABASE} in {place.uri}: no run there was delivered to "
            f"MLflow's file. Give the storage folder of the runs, or set {Env.MLFLOW_TRACKING_URI} "
            "to the server that they were delivered to"
        )
    _require_free(host, port)
    _serve(f"sqlite:///{place.root}/{TRACKING_DATABASE}", host, port)


def _pages(targets: Mapping[str, str]) -> list[str]:
    found = [f"metrics of {run}: http://{target}/metrics" for run, target in targets.items()]
    found = found or ["metrics: no run here is alive"]
    return [*found, "Prometheus and Grafana: dashboards/README.md of the repository says how"]


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise InputError(
            f"can't listen on {host}:{port} ({error.strerror}); give another --port"
        ) from error


def _serve(uri: str, host: str, port: int) -> None:
    """Runs MLflow's server, in a process group of its own, until a signal comes."""
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--backend-store-uri", uri, "--host", host, "--port", str(port)),
    ]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    process = subprocess.Popen(command, env={**os.environ, **quiet}, start_new_session=True)
    try:
        _wait_for(process, f"http://{host}:{port}/health")
        print(f"MLflow: http://{host}:{port} shows {uri}; Ctrl-C ends it", flush=True)
        process.wait()
        raise InputError(f"MLflow's server ended with status {process.returncode}; see above")
    except KeyboardInterrupt:  # the usual end
        return
    finally:
        _end(process)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(POLL_S)
    raise InputError(f"MLflow's server did not answer at {address} in {START_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
