"""A run's metrics at one moment, as Prometheus' client library has them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from samestep.metric_names import (
    DEVICE,
    HOST,
    LABEL_RUN,
    STEP_SECONDS_BUCKETS,
    Metric,
    Metrics,
    MetricType,
)
from samestep.names import TAG_VERSION_PREFIX, Tag
from samestep.telemetry import provenance
from samestep.telemetry.ranks import Ranks
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.totals import Distribution, Labels, Totals

Values = dict[tuple[Metric, Labels], float]


@dataclass(kw_only=True, eq=False)
class Page(Collector):
    """Turns what is known into families for a scrape.

    Attributes:
        info: the run.
        tracking: status of the MLflow sink, None where there is none.
        clock: seconds since the epoch.
        totals: sums over the ledger; whoever adds to them holds `lock`.
        ranks: the present workers; likewise.
    """

    info: RunInfo
    tracking: Callable[[], Mapping[str, Any] | None]
    clock: Callable[[], float] = time.time
    totals: Totals = field(default_factory=Totals)
    ranks: Ranks = field(default_factory=Ranks)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._versions = {
            tag.removeprefix(TAG_VERSION_PREFIX): value
            for tag, value in provenance.versions().items()
        }

    def collect(self) -> Iterator[Family]:
        """All series at one moment."""
        tracking = (self.tracking() or {}).get("mlflow") or {}
        with self.lock:
            values = dict(self.totals.values)
            distributions = {m: d.copy() for m, d in self.totals.distributions.items()}
            self._add_run(values, str(tracking.get("run_id") or ""))
            self._add_ranks(values)
            if tracking:
                if tracking["up"] is not None:
                    values[Metrics.TRACKING_UP, ()] = float(tracking["up"])
                waiting = max(0, self.totals.num_steps - int(tracking["num_steps"]))
                values[Metrics.TRACKING_WAITING, ()] = float(waiting)
        for sink, num_lines in self.info.waiting().items():
            values[Metrics.SINK_WAITING, (sink,)] = float(num_lines)
        yield from self._families(values)
        for metric, distribution in distributions.items():
            yield self._histogram(metric, distribution)

    def _add_run(self, values: Values, tracking_id: str) -> None:
        totals, info = self.totals, self.info
        goodput = totals.accounting.goodput(self.clock())
        if goodput is not None:
            values[Metrics.GOODPUT, ()] = goodput
        for limit, use in totals.spending.uses(info.spec.budget, self.clock()).items():
            values[Metrics.BUDGET_USED, (limit,)] = use.ratio
        workers = info.spec.workers
        # The last values may lie in a Pushgateway for long: a run that has ended wants nothing.
        values[Metrics.WORKERS_WANTED, ()] = 0.0 if totals.finished else float(workers.max)
        values[Metrics.WORKERS_MIN, ()] = 0.0 if totals.finished else float(workers.min)
        labels = (
            str(totals.attempt),
            totals.mode,
            totals.numerics,
            tracking_id,
            info.about.get(Tag.JOB_ID, ""),
        )
        values[Metrics.RUN_INFO, labels] = 1.0
        version = info.about.get(Tag.VERSION, self._versions.get("samestep", ""))
        others = [self._versions.get(name, "") for name in ("python", "torch", "ray")]
        values[Metrics.BUILD_INFO, (version, *others)] = 1.0

    def _add_ranks(self, values: Values) -> None:
        ranks = self.ranks
        for report in ranks.present():
            rank = str(report.world_rank)
            held = [(HOST, report.host_bytes, report.host_limit_bytes)]
            if report.device_limit_bytes:
                held.append((DEVICE, report.device_bytes, report.device_limit_bytes))
            for memory, num_bytes, limit_bytes in held:
                values[Metrics.WORKER_MEMORY, (rank, memory)] = float(num_bytes)
                values[Metrics.WORKER_MEMORY_LIMIT, (rank, memory)] = float(limit_bytes)
        for world_rank, seconds in ranks.step_seconds().items():
            values[Metrics.WORKER_STEP_SECONDS, (str(world_rank),)] = seconds
        straggler = ranks.straggler()
        if straggler is not None:
            values[Metrics.STRAGGLER, ()] = straggler.ratio
            values[Metrics.SLOWEST, ()] = float(straggler.world_rank)
        values[Metrics.DROPPED, ()] = float(ranks.num_dropped)

    def _families(self, values: Values) -> Iterable[Family]:
        found: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for (metric, labels), value in values.items():
            if metric not in found:
                make = (
                    CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
                )
                found[metric] = make(metric.name, metric.help, labels=(LABEL_RUN, *metric.labels))
            found[metric].add_metric((self.info.name, *labels), value)
        return found.values()

    def _histogram(self, metric: Metric, distribution: Distribution) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=(LABEL_RUN,))
        total, buckets = 0, []
        for bound, count in zip(
            (*STEP_SECONDS_BUCKETS, math.inf), distribution.counts, strict=True
        ):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        family.add_metric((self.info.name,), buckets, distribution.total)
        return family
