"""The page of an incident as a real browser shows it: from a file, and in MLflow's frame."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Looked, look

from samestep.checkpoint.storage import Storage
from samestep.errors import ExitStatus
from samestep.incidents.record import list_incidents

WORKLOADS = Path(__file__).resolve().parents[2] / "workloads"
BAD = 411
"""The image whose label is none: taken, the loss raises."""
MISLABELLED = f"""
from digits import Digits


class Mislabelled(Digits):
    def data(self):
        images = super().data()
        images.labels = images.labels.clone()
        images.labels[{BAD}] = 12
        return images
"""
SETTINGS = (
    "mode=local",
    "workload=mislabelled:Mislabelled",
    "tracking.enabled=false",
    "metrics.enabled=false",
)
# As MLflow's pages show an artifact that is HTML.
FRAME = """<!doctype html>
<html><body style="margin: 0"><script>
const frame = document.createElement("iframe");
frame.sandbox = "allow-scripts";
frame.style = "width: 100%; height: 900px; border: 0";
frame.src = URL.createObjectURL(new Blob([{page}], {{type: "text/html"}}));
document.body.append(frame);
</script></body></html>
"""
READY = "document.readyState == 'complete' && document.querySelector('main') != null"
ASKED = """(() => {
  const sizes = (what) => [...document.querySelectorAll(what)].map((each) => {
    const box = each.getBoundingClientRect();
    return [box.width, box.height];
  });
  const wide = [...document.querySelectorAll("body *")].filter((each) =>
    each.getBoundingClientRect().right > innerWidth && !each.parentElement.closest(".wide, pre"));
  const badge = document.querySelector(".badge");
  return {
    title: document.title,
    text: document.body.innerText,
    headline: document.querySelector("h1").innerText,
    lead: document.querySelector("p.lead").innerText,
    charts: sizes("svg.chart"),
    lines: [...document.querySelectorAll("svg.chart .line")].map((one) => one.getTotalLength()),
    pictures: sizes("svg.picture"),
    cells: sizes("svg.picture rect"),
    images: [...document.images].map((image) => image.naturalWidth),
    badge: [getComputedStyle(badge).color, getComputedStyle(badge).borderStyle],
    wide: wide.map((each) => each.outerHTML.slice(0, 100)),
    widths: [document.documentElement.scrollWidth, innerWidth],
  };
})()"""
SIZES = [(1280, 900), (500, 900)]

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page about an incident, and what it is to tell."""

    path: Path
    incident_id: str
    message: str
    step: int


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of a run that an image without a right label ended."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "digits.py").write_bytes((WORKLOADS / "digits" / "digits.py").read_bytes())
    (folder / "job.yaml").write_bytes((WORKLOADS / "digits" / "job.yaml").read_bytes())
    (folder / "mislabelled.py").write_text(MISLABELLED, encoding="utf-8")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    samestep(folder, "train", "job.yaml", "--name", "digits", *settings, status=ExitStatus.FAILED)
    (incident,) = list_incidents(Storage.at(str(folder / "runs" / "digits")))
    samestep(
        folder, "replay", "digits", incident.id, "--report", "page.html", status=ExitStatus.DONE
    )
    return Report(
        path=folder / "page.html",
        incident_id=incident.id,
        message=incident.message,
        step=incident.step,
    )


def samestep(folder: Path, *arguments: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr


def require_shown(found: dict[str, Any], report: Report) -> None:
    """All of the report is there, and its style sheet holds."""
    assert found["title"] == f"exception at step {report.step}"
    assert found["headline"] == f"exception at step {report.step} reproduced"
    told = "of a run of mislabelled:Mislabelled, in attempt 1 on worker 0"
    assert found["lead"].startswith(f"At step {report.step} {told}")
    assert report.message.splitlines()[0] in found["lead"]
    assert len(found["charts"]) == 2
    assert all(width > 300 and height > 60 for width, height in found["charts"])
    assert len(found["lines"]) == 2
    assert all(length > 100 for length in found["lines"])
    assert f"Sample {BAD} (shard" in found["text"]
    assert found["pictures"] == [[192, 192]]
    assert len(found["cells"]) == 8 * 8
    assert all(width > 20 and height > 20 for width, height in found["cells"])
    assert all(width > 0 for width in found["images"])
    assert f"samestep replay digits {report.incident_id}\n" in found["text"]
    assert found["badge"] == ["rgb(26, 127, 55)", "solid"]


@pytest.mark.parametrize("size", SIZES)
def test_the_report_opened_from_its_file_is_whole_and_asks_for_nothing(
    report: Report, size: tuple[int, int]
) -> None:
    url = report.path.as_uri()
    found = look(url, ready=READY, asked=ASKED, size=size)
    require_shown(found.answer, report)
    require_quiet(found, [url])


def test_the_report_in_mlflows_frame_is_whole_and_asks_for_nothing(
    report: Report, tmp_path: Path
) -> None:
    frame = tmp_path / "frame.html"
    page = json.dumps(report.path.read_text(encoding="utf-8")).replace("</", r"<\/")
    frame.write_text(FRAME.format(page=page), encoding="utf-8")
    found = look(frame.as_uri(), ready=READY, asked=ASKED, size=SIZES[0], within=True)
    require_shown(found.answer, report)
    [own, *more] = found.requests
    assert own == frame.as_uri()
    require_quiet(found, [own, *(each for each in more if each.startswith("blob:"))])
    assert len(more) == 1


def require_quiet(found: Looked, requests: list[str]) -> None:
    """Nothing was asked for beside these, nothing complained of, and nothing is too wide."""
    assert list(found.requests) == requests
    assert found.complaints == ()
    assert found.answer["wide"] == []
    whole, window = found.answer["widths"]
    assert whole <= window
