"""Writes docs/metrics.md from the code: `python -m samestep.cli.metricsdoc > docs/metrics.md`."""

from __future__ import annotations

from samestep.metric_names import METRICS, STEP_SECONDS_BUCKETS, Metric
from samestep.names import IncidentKind, RestartCause, TimePart
from samestep.telemetry.totals import STATE_SOURCES

HEAD = """# Every metric of a run

Made from the code by `python -m samestep.cli.metricsdoc`; a test compares them. A run serves them
on a page of its own while it lives: its address is told at the start, and
`<storage>/.prometheus/<run>.json` names it in the form of Prometheus' `file_sd_configs`. Every
metric has the label `run`, the name of the run; further labels are listed.

Counters and histograms are sums over the run's ledger: neither a restart of the workers nor one of
the recorder resets them. Series of workers that are gone are not served. With `metrics.pushgateway`
the last values go to a Pushgateway when the run ends.
"""
PARTS = {
    TimePart.KEPT: "forward, backward and update of steps that were new",
    TimePart.REDONE: "everything between the beginning of an attempt and its first new step",
    TimePart.STARTING: "from the start of worker 0's process (or the end before) to the attempt",
    TimePart.WAITING: "for resources: before worker 0's process was started",
    TimePart.DATA: "worker 0 waited for its batch",
    TimePart.COMMUNICATION: "worker 0 waited for other workers during a step",
    TimePart.CHECKPOINT: "a checkpoint held training up",
    TimePart.EVALUATION: "evaluation",
    TimePart.IDLE: "hooks between steps; a fault, and the time until it was noticed",
}


def render() -> str:
    """The page: a table of the metrics, and what the closed lists of labels mean."""
    bounds = f"{STEP_SECONDS_BUCKETS[0]:.6g} to {STEP_SECONDS_BUCKETS[-1]:.6g} seconds"
    causes = ", ".join(f"`{cause}`" for cause in (*RestartCause, *IncidentKind))
    kinds = ", ".join(f"`{kind}`" for kind in IncidentKind)
    sources = ", ".join(f"`{source}`" for source in STATE_SOURCES)
    lines = [
        HEAD,
        "| metric | type | unit | labels | |",
        "| --- | --- | --- | --- | --- |",
        *map(_row, METRICS),
        "",
        f"Histograms have buckets by powers of two from {bounds}.",
        "",
        "## Where the time goes",
        "",
        "`samestep_time_seconds_total` by `part`; the parts add up to the time in which the run "
        "was being run.",
        "",
        "| part | |",
        "| --- | --- |",
        *(f"| `{part}` | {PARTS[part]} |" for part in TimePart),
        "",
        "## Other labels",
        "",
        f"`kind` of incidents: {kinds}.",
        "",
        f"`cause` of restarts: {causes}.",
        "",
        f"`source` of states: {sources}.",
    ]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {metric.unit} | {labels} | {metric.help} |"


if __name__ == "__main__":
    print(render(), end="")
