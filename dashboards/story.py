"""A run that grows, loses a worker and shrinks, on Ray nodes of its own, as Prometheus sees it.

For the README's pictures, and for the test that puts every query to a Prometheus.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import yaml

from samestep.checkpoint.storage import Storage
from samestep.cluster.nodes import local_nodes
from samestep.errors import ExitStatus
from samestep.names import Env
from samestep.telemetry.past import Past, read_past

ROOT: Final = Path(__file__).resolve().parents[1]
RULES: Final = ROOT / "dashboards" / "prometheus" / "rules.yaml"
CONFIG: Final = ROOT / "dashboards" / "prometheus" / "prometheus.yml"
WAIT_S: Final = 180.0
POLL_S: Final = 0.1


@contextmanager
def story(
    job: Path,
    *,
    storage: Path,
    run: str,
    settings: Sequence[str],
    rest: Callable[[str], object],
) -> Iterator[None]:
    """Trains a job through all acts; a planned stop follows what is done with the result.

    Args:
        job: its file; it must last for longer than the story does.
        storage: folder of the run.
        run: its name.
        settings: further ones, as `--set` takes them.
        rest: called after each act with its name, while the run goes on: "alone" (one worker),
            "grown" (a second node has come), "replaced" (a worker was killed, and there are two
            again), "shrunk" (the node has gone).
    """
    place = Storage.at(str(storage / run))
    paths = [str(ROOT / "platform"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with local_nodes(1, env={"PYTHONPATH": os.pathsep.join(paths)}) as nodes:
        driver = subprocess.Popen(
            [
                *(sys.executable, "-m", "samestep", "train", str(job), "--name", run),
                *("--workers", "1:2", "--set", f"storage={storage}"),
                *(word for setting in settings for word in ("--set", setting)),
            ],
            cwd=storage,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                str(Env.RAY_ADDRESS): nodes.address,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def present() -> Past | None:
            """Of the run while it lives, once its last attempt has taken a step."""
            if driver.poll() is not None:
                raise RuntimeError(f"the run ended: {driver.communicate()[0]}")
            past = read_past(place)
            return past if past.attempts and past.attempts[-1].num_written else None

        def wait_for(workers: int, *, after: int = 0) -> Past:
            """Waits for an attempt of so many, other than the first `after` ones."""

            def there() -> Past | None:
                past = present()
                if past is None or len(past.attempts) <= after:
                    return None
                return past if past.attempts[-1].fields["world_size"] == workers else None

            return wait_until(there, f"the run has {workers} worker(s)")

        try:
            wait_for(1)
            rest("alone")
            node = nodes.add()
            wait_for(2)
            rest("grown")
            attempts = wait_for(2).attempts
            os.kill(int(attempts[-1].fields["pids"][1]), signal.SIGKILL)
            wait_for(2, after=len(attempts))
            rest("replaced")
            nodes.drain(node)
            wait_for(1)
            rest("shrunk")
            yield
        finally:
            driver.send_signal(signal.SIGINT)
            try:
                output, _ = driver.communicate(timeout=WAIT_S)
            finally:
                driver.kill()
    if driver.returncode != ExitStatus.INTERRUPTED:
        raise RuntimeError(f"the run ended with {driver.returncode}: {output}")


@contextmanager
def prometheus(folder: Path, storage: Path) -> Iterator[str]:
    """A Prometheus that scrapes the runs of a folder, and looks at the rules, every second.

    Args:
        folder: for its own files.
        storage: where the runs are.

    Yields:
        Its address.
    """
    rules = RULES.read_text(encoding="utf-8").replace("interval: 30s", "interval: 1s")
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    (pattern,) = discovery["files"]
    discovery |= {
        "files": [pattern.replace("../../runs", str(storage))],
        "refresh_interval": "1s",
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"),
    ]
    with served(command, f"http://{address}/-/ready", folder / "prometheus.log"):
        yield f"http://{address}"


@contextmanager
def served(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """A server, from its first answer on."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended: {log.read_text(errors='replace')[-2000:]}")
        with suppress(OSError), urllib.request.urlopen(ready, timeout=2):
            return True
        return False

    try:
        wait_until(answers, f"{ready} answers")
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition; waits for three minutes at most."""
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        pause.wait(POLL_S)
    raise TimeoutError(f"{what}: not within {WAIT_S:g} s")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
