"""Makes the README's pictures of a run that grows, loses a worker and shrinks, anew.

python dashboards/pictures.py docs

Needs Prometheus and Chromium (Debian's packages `prometheus` and `chromium`) and about three
minutes: it starts Ray nodes of its own, trains digits on them, and looks at the run in Prometheus,
in MLflow's pages and as the panels of its dashboard.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import yaml
from browser import photograph
from draw import Source, draw

from samestep.checkpoint.storage import Storage
from samestep.cluster.nodes import LocalNodes, local_nodes
from samestep.errors import ExitStatus
from samestep.names import Env
from samestep.telemetry.past import Past, read_past
from samestep.telemetry.tracking_file import read_tracked

ROOT: Final = Path(__file__).resolve().parents[1]
JOB: Final = ROOT / "workloads" / "digits" / "job.yaml"
RUN: Final = "digits"
ACT_S: Final = 20.0
"""How long each act of the story lasts."""
WAIT_S: Final = 120.0
POLL_S: Final = 0.1
PANELS: Final = (
    *("Training loss", "Evaluation", "Per second", "A step's time", "Time by part", "Workers"),
    *("Restarts, incidents, steps redone", "Standing still", "Where attempts got their state"),
    *("A worker's own time of a step", "Age of the last checkpoint", "Age of the last snapshot"),
)
GRAPHED: Final = (
    "samestep_workers",
    "samestep_loss",
    "sum by (part) (samestep_time_seconds_total)",
)


def main() -> None:
    """Writes run.png, prometheus.png and mlflow.png into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    out = parser.parse_args().folder.resolve()
    missing = [name for name in ("prometheus", "chromium") if shutil.which(name) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} can't be found; apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="samestep-pictures-") as temporary:
        folder = Path(temporary)
        storage = folder / "runs"
        storage.mkdir()
        with prometheus(folder, storage) as url:
            began = tell_story(storage)
            source = Source(url=url, run=RUN, start=began, end=time.time())
            draw(source, title=RUN, only=PANELS).savefig(out / "run.png")
            graphs: dict[str, str] = {}
            for number, expr in enumerate(GRAPHED):
                seconds = int(time.time() - began) + 10
                given = {"expr": expr, "tab": "0", "range_input": f"{seconds}s"}
                graphs |= {f"g{number}.{name}": value for name, value in given.items()}
            # Debian's Prometheus has the older pages only.
            photograph(
                f"{url}/classic/graph?{urllib.parse.urlencode(graphs)}",
                out / "prometheus.png",
                ready=f"document.querySelectorAll('.rickshaw_graph svg').length == {len(GRAPHED)}",
                size=(1500, 2400),
            )
        with mlflow_pages(storage) as url:
            tracked = read_tracked(Storage.at(str(storage / RUN)))
            assert tracked is not None
            page = f"{url}/#/experiments/1/runs/{tracked.run_id}"
            photograph(
                f"{page}/model-metrics",
                out / "mlflow.png",
                ready="document.querySelectorAll('.scatterlayer .js-line').length >= 3",
                size=(1500, 1500),
            )


def tell_story(storage: Path) -> float:
    """One worker; a second node comes; a worker is killed; the node goes; a planned stop.

    Returns:
        When the run took its first steps, in seconds since the epoch.
    """
    run = Storage.at(str(storage / RUN))
    with local_nodes(1) as nodes:
        driver = start_driver(storage, nodes)
        try:
            wait_until(lambda: num_workers(driver, run) == 1, "the run has one worker")
            began = time.time()
            time.sleep(ACT_S)
            node = nodes.add()
            wait_until(lambda: num_workers(driver, run) == 2, "the run has two workers")
            time.sleep(ACT_S)
            num_attempts = len(past_of(run).attempts)
            os.kill(int(past_of(run).attempts[-1].fields["pids"][1]), signal.SIGKILL)
            wait_until(lambda: len(past_of(run).attempts) > num_attempts, "the next attempt")
            time.sleep(ACT_S)
            nodes.drain(node)
            wait_until(lambda: num_workers(driver, run) == 1, "the run has one worker again")
            time.sleep(ACT_S)
        finally:
            driver.send_signal(signal.SIGINT)
            output, _ = driver.communicate(timeout=WAIT_S)
    if driver.returncode != ExitStatus.INTERRUPTED:
        raise RuntimeError(f"the run ended with {driver.returncode}: {output}")
    return began


def start_driver(storage: Path, nodes: LocalNodes) -> subprocess.Popen[str]:
    """Trains for longer than the story is."""
    settings = ["epochs=2000", f"storage={storage}", "checkpoint.snapshot_every=20"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "samestep", "train", str(JOB), "--name", RUN),
            *("--workers", "1:2"),
            *(word for setting in settings for word in ("--set", setting)),
        ],
        cwd=storage,
        env={**os.environ, str(Env.RAY_ADDRESS): nodes.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def past_of(run: Storage) -> Past:
    """What the run's ledger tells."""
    return read_past(run)


def num_workers(driver: subprocess.Popen[str], run: Storage) -> int:
    """Workers of the present attempt, once it has taken a step."""
    if driver.poll() is not None:
        raise RuntimeError(f"the run ended: {driver.communicate()[0]}")
    past = past_of(run)
    last = past.attempts[-1] if past.attempts else None
    return int(last.fields["world_size"]) if last is not None and last.num_written else 0


@contextmanager
def prometheus(folder: Path, storage: Path) -> Iterator[str]:
    """A Prometheus that scrapes the runs of a folder every second; its address."""
    config = yaml.safe_load(
        (ROOT / "dashboards" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    )
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "dashboards" / "prometheus" / "rules.yaml")]
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    discovery |= {"files": [f"{storage}/.prometheus/*.json"], "refresh_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"),
    ]
    with served(command, f"http://{address}/-/ready", folder / "prometheus.log"):
        yield f"http://{address}"


@contextmanager
def mlflow_pages(storage: Path) -> Iterator[str]:
    """MLflow's pages of the runs, as `samestep ui` shows them; their address."""
    port = free_port()
    command = [sys.executable, "-m", "samestep", "ui", str(storage), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with served(command, f"{url}/health", storage / "ui.log"):
        yield url


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


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits for two minutes at most."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {WAIT_S:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    main()
