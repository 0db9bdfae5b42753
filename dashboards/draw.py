"""Draws a run's dashboard from Prometheus' data: what Grafana would show, without a Grafana.

python dashboards/draw.py http://localhost:9090 RUN --start UNIX_TIME --out FILE
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

GRAFANA: Final = Path(__file__).resolve().parent / "grafana"
NUM_COLUMNS: Final = 3
NUM_POINTS: Final = 240
TIMEOUT_S: Final = 30.0
UNITS: Final = {"s": "s", "bytes": "B", "Bps": "B/s"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Prometheus, and the stretch of time that is looked at (seconds since the epoch)."""

    url: str
    run: str
    start: float
    end: float

    @property
    def step_s(self) -> float:
        """Between two points."""
        return max(1.0, (self.end - self.start) / NUM_POINTS)

    def expression(self, template: str) -> str:
        """What Grafana would ask for a panel's expression."""
        window = f"{math.ceil(max(4 * self.step_s, 15))}s"
        values = {"$__rate_interval": window, "$run": self.run, "$cluster": ".*"}
        for name, value in values.items():
            template = template.replace(name, value)
        return template

    def series(self, template: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """The labels and the points of each series of an expression."""
        given = {
            "query": self.expression(template),
            "start": self.start,
            "end": self.end,
            "step": self.step_s,
        }
        address = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)["data"]["result"]
        return [
            (one["metric"], [(float(t), float(value)) for t, value in one["values"]])
            for one in found
        ]


def draw(source: Source, *, title: str, dashboard: str = "run", only: Sequence[str] = ()) -> Figure:
    """The panels of a dashboard that are lines over time; `only` those titles, where given.

    Raises:
        ValueError: the dashboard has no panel of such a title.
    """
    text = (GRAFANA / f"{dashboard}.json").read_text(encoding="utf-8")
    found = {p["title"]: p for p in json.loads(text)["panels"] if p["type"] == "timeseries"}
    unknown = [name for name in only if name not in found]
    if unknown:
        raise ValueError(f"no panel {unknown[0]!r}; the panels are {', '.join(found)}")
    panels = [panel for name, panel in found.items() if not only or name in only]
    num_rows = math.ceil(len(panels) / NUM_COLUMNS)
    figure = Figure(figsize=(6 * NUM_COLUMNS, 2.7 * num_rows), layout="constrained", dpi=70)
    figure.suptitle(title)
    for place, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(num_rows, NUM_COLUMNS, place), panel, source)
    return figure


def _draw_panel(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for target in panel["targets"]:
        for labels, points in source.series(target["expr"]):
            lines.append((_legend(target["legendFormat"], labels), points))
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    if stacked:
        _stack(axes, lines, source)
    else:
        for name, points in lines:
            _plot(axes, name, points, source)
    axes.set_title(panel["title"], fontsize=10)
    axes.set_xlim(0, source.end - source.start)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif unit in UNITS:
        axes.yaxis.set_major_formatter(EngFormatter(UNITS[unit]))
    if panel["fieldConfig"]["defaults"].get("min") == 0:
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], axes.dataLim.y1) * 1.05 or 1)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=7, loc="best", ncols=2, framealpha=0.6)


def _plot(axes: Axes, name: str, points: Sequence[tuple[float, float]], source: Source) -> None:
    """A line that is broken where there were no points."""
    times: list[float] = []
    values: list[float] = []
    for t, value in points:
        if times and t - source.start - times[-1] > 1.5 * source.step_s:
            times.append(math.nan)
            values.append(math.nan)
        times.append(t - source.start)
        values.append(value)
    axes.plot(times, values, label=name)


def _stack(
    axes: Axes, lines: Sequence[tuple[str, list[tuple[float, float]]]], source: Source
) -> None:
    """Areas one upon the other; a missing or undefined point counts as 0."""
    if not lines:
        return
    values = [dict(points) for _, points in lines]
    present = {t for points in values for t in points}
    num_steps = int((source.end - source.start) / source.step_s) + 1
    times = [source.start + number * source.step_s for number in range(num_steps)]
    present |= {t for t in times if not any(abs(t - other) < source.step_s for other in present)}
    times = sorted(present)
    heights = [[_finite(points.get(t, 0.0)) for t in times] for points in values]
    axes.stackplot([t - source.start for t in times], heights, labels=[name for name, _ in lines])


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def main() -> None:
    """Draws into a file, by its suffix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="address, such as http://localhost:9090")
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--start", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--end", type=float, default=time.time())
    parser.add_argument("--dashboard", default="run", help="fleet, run or incidents")
    parser.add_argument("--only", nargs="*", default=(), help="titles of panels; default: all")
    parser.add_argument("--out", type=Path, required=True, help="file to write (.png or .svg)")
    given = parser.parse_args()
    source = Source(
        url=given.prometheus.rstrip("/"), run=given.run, start=given.start, end=given.end
    )
    draw(source, title=given.run, dashboard=given.dashboard, only=given.only).savefig(given.out)


if __name__ == "__main__":
    main()
