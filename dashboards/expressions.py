"""PromQL that several panels share; `RUN` selects what the dashboard's variables say."""

from __future__ import annotations

from typing import Final

from panels import Annotation

RUN: Final = 'cluster=~"$cluster",run=~"$run"'
RATE: Final = "$__rate_interval"
TIME_PARTS: Final = (
    "Parts of the run's time, which add up to 1: kept and redone training, starting, waiting for "
    "resources, data, communication, checkpoint, evaluation, idle (a fault, and the time until it "
    "was noticed). What is told when an attempt begins or ends shows there."
)
CHECKPOINT_AGE: Final = "What a total loss of the workers and their nodes would cost."
MLFLOW_WAITS: Final = "They are in the ledger and are delivered when MLflow is back."


def by_run(metric: str) -> str:
    """A run's value, whatever other labels there are."""
    return f"max by (run) ({metric}{{{RUN}}})"


def age(metric: str) -> str:
    """Seconds since a moment."""
    return f"time() - {by_run(metric)}"


def rate(metric: str, by: str = "run") -> str:
    """Growth per second."""
    return f"sum by ({by}) (rate({metric}{{{RUN}}}[{RATE}]))"


def lately(metric: str, by: str, window: str) -> str:
    """Growth within a window, where there was some."""
    return f"sum by ({by}) (increase({metric}{{{RUN}}}[{window}])) > 0"


def so_far(metric: str, by: str) -> str:
    """The sum since each run began, where it is not 0."""
    return f"sum by ({by}) ({metric}{{{RUN}}}) > 0"


def mean(metric: str, window: str = RATE) -> str:
    """Mean of a histogram over the last moments."""
    total, count = (f"rate({metric}_{end}{{{RUN}}}[{window}])" for end in ("sum", "count"))
    return f"sum by (run) ({total}) / sum by (run) ({count})"


def mean_so_far(metric: str) -> str:
    """Mean of a histogram since each run began, once it has a value."""
    return f"{metric}_sum{{{RUN}}} / ({metric}_count{{{RUN}}} > 0)"


def quantile(metric: str, part: float, window: str = RATE) -> str:
    """Quantile of a histogram over the last moments."""
    buckets = f"sum by (le, run) (rate({metric}_bucket{{{RUN}}}[{window}]))"
    return f"histogram_quantile({part}, {buckets})"


def shares_of_time() -> str:
    """Where the time of the last moments went, by part."""
    growth = f"rate(samestep_time_seconds_total{{{RUN}}}[{RATE}])"
    return f"sum by (part) ({growth}) / ignoring (part) group_left sum ({growth})"


ATTEMPTS: Final = Annotation(
    name="Attempts",
    expr=f"changes(samestep_attempt_started_timestamp_seconds{{{RUN}}}[1m]) > 0",
    color="orange",
    title="{{run}}: an attempt begins",
)
RESIZES: Final = Annotation(
    name="Resizes",
    expr=f"changes(samestep_workers{{{RUN}}}[1m]) > 0",
    color="blue",
    title="{{run}}: the number of workers changes",
)
INCIDENTS: Final = Annotation(
    name="Incidents",
    expr=lately("samestep_incidents_total", "run, kind", "1m"),
    color="red",
    title="{{run}}: {{kind}}",
)
