"""Panels and dashboards as few words, and the JSON that Grafana reads (classic, version 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

COLUMNS: Final = 24
SCHEMA_VERSION: Final = 39
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
TAG: Final = "samestep"


@dataclass(frozen=True, kw_only=True)
class Query:
    """A PromQL expression and what its series are called; `instant` for its last value only."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: short.
        about: what it tells, and what to make of it.
        queries: in the order of drawing.
        kind: Grafana's name of the visualization.
        unit: Grafana's name of the unit; one for the whole panel.
        width: of 24 columns.
        height: in rows of 30 pixels.
        stacked: the series add up.
        lowest: where the axis begins; None: by the data.
        thresholds: (value from which on, color), the first one's value unused.
        links: (title, URL) of values.
        transformations: Grafana's, for tables.
        legend: shown below, as a table with the last value.
    """

    title: str
    about: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    stacked: bool = False
    lowest: float | None = 0
    thresholds: Sequence[tuple[float, str]] = ()
    links: Sequence[tuple[str, str]] = ()
    transformations: Sequence[Mapping[str, Any]] = ()
    legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Moments drawn across all panels: where the expression has a value above 0."""

    name: str
    expr: str
    color: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard; `one_run` where its variable `run` takes a single one."""

    uid: str
    title: str
    about: str
    rows: Sequence[Row]
    one_run: bool = True
    annotations: Sequence[Annotation] = ()
    variables: Sequence[Mapping[str, Any]] = ()
    links: Sequence[tuple[str, str]] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": [TAG],
            "timezone": "browser",
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "schemaVersion": SCHEMA_VERSION,
            "time": {"from": "now-3h", "to": "now"},
            "templating": {"list": [*_variables(self.one_run), *map(dict, self.variables)]},
            "annotations": {"list": [_annotation(item) for item in self.annotations]},
            "links": [_link(title, url) for title, url in self.links],
            "panels": list(_placed(self.rows)),
        }


def series(title: str, about: str, queries: Mapping[str, str], **options: Any) -> Panel:
    """Lines over time, each by what it is called."""
    found = [Query(expr=expr, legend=legend) for legend, expr in queries.items()]
    return Panel(title=title, about=about, queries=found, **options)


def table(title: str, about: str, *exprs: str, **options: Any) -> Panel:
    """The last values, a row for each set of labels."""
    found = [Query(expr=expr, instant=True) for expr in exprs]
    return Panel(title=title, about=about, queries=found, kind="table", lowest=None, **options)


def without(*columns: str) -> Mapping[str, Any]:
    """A table without some of its columns."""
    return {"id": "organize", "options": {"excludeByName": dict.fromkeys(columns, True)}}


def stat(title: str, about: str, expr: str, **options: Any) -> Panel:
    """A single number, the last value."""
    defaults: dict[str, Any] = {"kind": "stat", "width": 4, "height": 4, "legend": False}
    queries = [Query(expr=expr, legend=options.pop("name", ""), instant=True)]
    return Panel(title=title, about=about, queries=queries, **{**defaults, **options})


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Panels with ids and places: rows one below the other, panels side by side as they fit."""
    found: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        left, top, height = 0, top + 1, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, height = 0, top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            found.append({"id": len(found) + 1, "gridPos": place, **_panel(panel)})
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.lowest is not None:
        defaults["min"] = panel.lowest
    if panel.thresholds:
        (_, first), *others = panel.thresholds
        steps = [{"value": None, "color": first}, *({"value": v, "color": c} for v, c in others)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.links:
        defaults["links"] = [_link(title, url, new_tab=True) for title, url in panel.links]
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": stacking,
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "targets": [_target(query, number) for number, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "transformations": [dict(item) for item in panel.transformations],
    }


def _options(panel: Panel) -> dict[str, Any]:
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        graph = "area" if panel.thresholds else "none"
        text = "value_and_name" if panel.queries[0].legend else "auto"
        return {"reduceOptions": last, "colorMode": "value", "graphMode": graph, "textMode": text}
    if panel.kind == "piechart":
        legend = {"displayMode": "table", "placement": "right", "values": ["percent", "value"]}
        return {"reduceOptions": last, "pieType": "donut", "legend": legend}
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    legend = {
        "displayMode": "table" if panel.legend else "hidden",
        "placement": "bottom",
        "calcs": ["lastNotNull"] if panel.legend else [],
        "showLegend": panel.legend,
    }
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _target(query: Query, number: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": query.instant,
        "range": not query.instant,
        "format": "table" if query.instant and not query.legend else "time_series",
    }


def _annotation(item: Annotation) -> dict[str, Any]:
    return {
        "name": item.name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": item.color,
        "expr": item.expr,
        "titleFormat": item.title,
        "step": "15s",
    }


def _link(title: str, url: str, *, new_tab: bool = False) -> dict[str, Any]:
    return {
        "title": title,
        "type": "link",
        "url": url,
        "icon": "external link",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "targetBlank": new_tab,
        "includeVars": False,
        "keepTime": True,
    }


def _variables(one_run: bool) -> list[dict[str, Any]]:
    source: dict[str, Any] = {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
    }
    cluster = _labels("cluster", "Cluster", "label_values(samestep_run_info, cluster)", all_=True)
    runs = 'label_values(samestep_run_info{cluster=~"$cluster"}, run)'
    return [source, cluster, _labels("run", "Run", runs, all_=not one_run)]


def _labels(name: str, label: str, query: str, *, all_: bool) -> dict[str, Any]:
    """A variable of a label's values; "all" also takes in series that lack the label."""
    made: dict[str, Any] = {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "includeAll": all_,
        "multi": all_,
    }
    if all_:
        made |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return made
