"""The page of an incident: whole in itself, and whatever text it holds stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from planted_runs import BAD, PAGE, STEP, Result, Runs

from samestep.replay.report_chart import Mark, line_chart, pixels

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags are closed, and gathers what a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def reported(runs: Runs, replayed: dict[str, Result]) -> tuple[Result, Path]:
    return replayed["report"], runs.folder / PAGE


def test_the_report_tells_verdict_finding_sample_and_command(
    reported: tuple[Result, Path], runs: Runs
) -> None:
    result, path = reported
    assert result.status == 0, result.err
    page = Page(path.read_text(encoding="utf-8"))
    incident = runs.incident("poisoned").id
    for text in (
        f"non finite at step {STEP}",
        "reproduced bit for bit",
        f"{STEP}grad_normnannan",
        "First: the input of batch.x in shard 1: 1 of 24 values are not finite.",
        f"Sample {BAD} (shard 1, place 0)",
        f"samestep replay {runs.folder}/runs/poisoned {incident}",
        "The numerics are those of the run.",
    ):
        assert text in page.text
    assert {"svg", "polyline", "table"} <= page.tags


def test_the_report_of_a_runs_incident_lies_beside_it_too(
    reported: tuple[Result, Path], runs: Runs
) -> None:
    _, path = reported
    run, incident = runs.at("poisoned"), runs.incident("poisoned").id
    assert run.read(f"incidents/{incident}/report.html") == path.read_bytes()


def test_the_report_loads_nothing_and_runs_nothing(reported: tuple[Result, Path]) -> None:
    text = reported[1].read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert [name for name, _ in page.attributes if name.startswith("on") or name == "src"] == []
    assert re.findall(r"https?://|url\(|@import", text) == []


@pytest.mark.parametrize(("name", "command"), [("bundle", "tells"), ("run", "tells from")])
def test_a_secret_that_an_exception_tells_is_in_no_report(
    replayed: dict[str, Result], runs: Runs, elsewhere: Path, name: str, command: str
) -> None:
    assert replayed[command].status == 0, replayed[command].err
    page = Page((elsewhere / f"{name}.html").read_text(encoding="utf-8"))
    assert "Taken again" in page.text
    secret = "(left out: secret)"
    assert page.text.count(f"planted at sample {BAD}, as {secret} may, or '{secret}'") >= 4
    assert "hush" not in page.text


def test_a_secret_that_an_exception_tells_is_in_no_incident_bundle_or_ledger(runs: Runs) -> None:
    run = runs.folder / "runs" / "tells"
    files = [path for part in ("incidents", "ledger") for path in (run / part).rglob("*")]
    read = {path.name: path.read_bytes() for path in files if path.is_file()}
    assert {"incident.json", "bundle.json", "spec.yaml"} <= read.keys()
    assert [name for name, data in read.items() if b"hush" in data] == []
    told = [name for name, data in read.items() if b"as (left out: secret) may" in data]
    assert {"incident.json", "ledger.jsonl"} <= set(told)


def test_text_of_a_chart_stays_text() -> None:
    chart = line_chart(
        "<b>&",
        {0: 1.0, 1: None, 2: float("nan"), 3: 2.0},
        [Mark(step=1, text="<script>alert(1)</script>"), Mark(step=99, text="outside")],
    )
    page = Page(chart)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "outside" not in page.text
    assert chart.count('class="cross"') == 1


@pytest.mark.parametrize(
    "values",
    [
        {5: 0.0},
        {5: 1.0, 6: 1.0},
        {1: 1e-9, 2: 1e9},
        {1: -5.0, 2: 1e300},
        {1: float("inf"), 2: None},
        dict.fromkeys(range(3), 1e-320),
    ],
)
def test_a_chart_is_drawn_of_any_values(values: dict[int, float | None]) -> None:
    chart = line_chart("loss", values, [Mark(step=1, text="the step", is_step=True)])
    Page(chart)
    assert not re.search(r'(?:x|y|cx|cy|x1|y1|points)="[^"]*(?:nan|inf)', chart)


def test_a_pixel_that_is_not_finite_is_told_apart() -> None:
    picture = pixels([[0.0, 1.0], [None, 0.5]])
    assert picture.count("<rect") == 4
    assert picture.count('class="broken"') == 1
