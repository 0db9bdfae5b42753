"""Makes the README's pictures of a run that grows, loses a worker and shrinks, anew.

python dashboards/pictures.py docs

Needs Prometheus and Chromium (Debian's packages `prometheus` and `chromium`) and about three
minutes: it starts Ray nodes of its own, trains digits on them, and looks at the run in Prometheus,
in MLflow's pages and as the panels of its dashboard.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from browser import photograph
from draw import Source, draw
from story import free_port, prometheus, served, story

from samestep.checkpoint.storage import Storage
from samestep.telemetry.tracking_file import read_tracked

ROOT: Final = Path(__file__).resolve().parents[1]
JOB: Final = ROOT / "workloads" / "digits" / "job.yaml"
RUN: Final = "digits"
ACT_S: Final = 20.0
"""How long each act of the story lasts."""
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
            settings = ["epochs=2000", "checkpoint.snapshot_every=20"]
            began: list[float] = []

            def rest(act: str) -> None:
                began.append(time.time())
                time.sleep(ACT_S)

            with story(JOB, storage=storage, run=RUN, settings=settings, rest=rest):
                pass
            source = Source(url=url, run=RUN, start=began[0], end=time.time())
            draw(source, title=RUN, only=PANELS).savefig(out / "run.png")
            graphs: dict[str, str] = {}
            for number, expr in enumerate(GRAPHED):
                seconds = int(time.time() - began[0]) + 10
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


@contextmanager
def mlflow_pages(storage: Path) -> Iterator[str]:
    """MLflow's pages of the runs, as `samestep ui` shows them; their address."""
    port = free_port()
    command = [sys.executable, "-m", "samestep", "ui", str(storage), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with served(command, f"{url}/health", storage / "ui.log"):
        yield url


if __name__ == "__main__":
    main()
