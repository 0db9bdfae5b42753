"""Dashboards and rules against the table of metrics, against Grafana's schema, and themselves."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from samestep.metric_names import METRICS, series_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
NAMES = ("fleet", "run", "incidents")
RULES = yaml.safe_load((FOLDER / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDS = [rule for group in RULES["groups"] for rule in group["rules"] if "record" in rule]
KNOWN = {name for metric in METRICS for name in series_of(metric)}
# A selector by a pattern over names stands for these.
PATTERNS = {
    "samestep_(last_step|attempt_started)_timestamp_seconds": (
        "samestep_last_step_timestamp_seconds",
        "samestep_attempt_started_timestamp_seconds",
    )
}


def dashboard(name: str) -> dict[str, Any]:
    found = json.loads((FOLDER / "grafana" / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for name in NAMES:
        for panel in panels(name):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
        for annotation in dashboard(name)["annotations"]["list"]:
            yield f"{name}: {annotation['name']}", annotation["expr"]
        for variable in dashboard(name)["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{name}: variable {variable['name']}", variable["query"]
    for rule in (*ALERTS, *RECORDS):
        yield rule.get("alert") or rule["record"], rule["expr"]


def used_in(expression: str) -> set[str]:
    for pattern, names in PATTERNS.items():
        expression = expression.replace(pattern, " ".join(names))
    return set(re.findall(r"\b(?:\w+:)*samestep_\w+(?::\w+)*", expression))


def test_the_files_are_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    made = runpy.run_path(str(FOLDER / "build.py"))["render"]()
    for module in ("panels", "expressions", "fleet", "one_run", "incidents"):
        monkeypatch.delitem(sys.modules, module)
    assert set(made) == {f"{name}.json" for name in NAMES}
    for name, text in made.items():
        present = (FOLDER / "grafana" / name).read_text(encoding="utf-8")
        assert present == text, "run: python dashboards/build.py"


def test_every_metric_that_is_used_exists() -> None:
    known = KNOWN | {rule["record"] for rule in RECORDS}
    unknown = {place: used_in(text) - known for place, text in expressions()}
    assert {place: names for place, names in unknown.items() if names} == {}


def test_every_metric_is_used() -> None:
    used = {name for _, text in expressions() for name in used_in(text)}
    unused = [metric.name for metric in METRICS if not used & set(series_of(metric))]
    assert unused == []


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_follows_grafanas_schema(name: str) -> None:
    schemas = os.environ.get("SAMESTEP_TEST_SCHEMAS")
    if not schemas:
        pytest.skip("SAMESTEP_TEST_SCHEMAS does not name a folder with grafana/ in it")
    path = Path(schemas, "grafana", "dashboard.jsonschema.json")
    jsonschema.validate(dashboard(name), json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", NAMES)
def test_panels_are_told_apart_explained_and_do_not_overlap(name: str) -> None:
    found = dashboard(name)["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels(name):
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"], panel["title"]
            assert 'cluster=~"$cluster"' in target["expr"], panel["title"]


def test_the_pod_monitor_is_one_that_prometheus_operator_takes() -> None:
    schemas = os.environ.get("SAMESTEP_TEST_SCHEMAS")
    if not schemas:
        pytest.skip("SAMESTEP_TEST_SCHEMAS does not name a folder with prometheus-operator/ in it")
    path = Path(schemas, "prometheus-operator", "monitoring.coreos.com_podmonitors.yaml")
    (version,) = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    manifest = ROOT / "deploy" / "prometheus" / "podmonitor.yaml"
    found = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    jsonschema.validate(found, schema)
    ports = [endpoint["port"] for endpoint in found["spec"]["podMetricsEndpoints"]]
    declared = re.findall(r"name: ([\w-]+), containerPort", manifest.read_text(encoding="utf-8"))
    assert ports == declared


def strict(schema: Any) -> Any:
    """The schema of a resource, with fields refused that an API server would drop silently."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made:
        made.setdefault("additionalProperties", "x-kubernetes-preserve-unknown-fields" in made)
    if "x-kubernetes-int-or-string" in made:
        made.pop("type", None)
    return made


def test_dashboards_lead_to_each_other_by_names_that_exist() -> None:
    uids = {dashboard(name)["uid"] for name in NAMES} | {"rayTrainDashboard"}
    linked = {
        uid for name in NAMES for uid in re.findall(r'"/d/([\w-]+)', json.dumps(dashboard(name)))
    }
    assert linked <= uids


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_bad_it_is_what_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"Samestep[A-Z]\w+", alert["alert"])
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["for"]
    told = alert["annotations"]
    assert "{{" not in told["summary"]
    assert "{{" in told["description"]
    assert told["runbook_url"] == f"dashboards/RUNBOOK.md#{alert['alert'].lower()}"
    runbook = (FOLDER / "RUNBOOK.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {alert['alert']}\n(.*?)(?=^## |\Z)", runbook, re.DOTALL | re.M)
    assert section is not None
    assert "* Look at: " in section[1]
    assert "* Do: " in section[1]


def test_the_runbook_has_no_section_without_an_alert() -> None:
    runbook = (FOLDER / "RUNBOOK.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\w+)", runbook, re.MULTILINE))
    assert sections == {alert["alert"] for alert in ALERTS}


def test_the_folders_page_leads_to_files() -> None:
    for page in ("README.md", "RUNBOOK.md"):
        text = (FOLDER / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert [link for link in links if not (FOLDER / link).exists()] == []
