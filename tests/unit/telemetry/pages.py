"""A run's page as Prometheus gets it."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from samestep.metric_names import Metric
from samestep.spec import parse_spec
from samestep.telemetry.prometheus_sink import PrometheusSink
from samestep.telemetry.recorder import Recorder

SPEC = parse_spec({"workload": "a:B", "batch_size": 8, "shards": 2, "max_steps": 100})
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Open = Callable[..., tuple[Recorder, PrometheusSink]]


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, metric: Metric, /, **labels: str) -> float:
    return samples[metric.name, tuple(sorted({"run": "r", **labels}.items()))]
