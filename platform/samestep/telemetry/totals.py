"""The values of all metrics as sums over a ledger's lines, and what the last lines show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from samestep.incidents.bundle import StateSource
from samestep.metric_names import HISTOGRAMS, STEP_SECONDS_BUCKETS, Metric, Metrics
from samestep.names import Activity, Event, IncidentKind, RestartCause, RunState, TimePart
from samestep.telemetry.accounting import NOTICED_LATE, TIMING, Accounting
from samestep.telemetry.budget import Spending
from samestep.telemetry.records import INHERITED, EventRecord, StepRecord
from samestep.telemetry.timesheet import AUDIT, SAVE, SNAPSHOT, SNAPSHOT_AT, seconds_of

Labels = tuple[str, ...]
COUNTED_FROM_THE_START: Final = (
    *(Metrics.STEPS, Metrics.SAMPLES, Metrics.LOSS_WEIGHT, Metrics.SKIPPED_STEPS),
    *(Metrics.SENT_BYTES, Metrics.ATTEMPTS, Metrics.REDONE_STEPS, Metrics.CHECKPOINTS),
    Metrics.CHECKPOINT_FAILURES,
)
MAX_USERS_METRICS: Final = 200
"""Names of the workload's metrics that are shown, of steps and of evaluations."""
RESTART_CAUSES: Final = (*map(str, RestartCause), *map(str, IncidentKind))
STATE_SOURCES: Final = tuple(str(s) for s in StateSource if s is not StateSource.LIVE)
"""Where an attempt's state may come from."""


@dataclass(kw_only=True)
class Distribution:
    """Values by bucket (each up to its bound, the last without one), and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        """Takes in a value."""
        self.counts[bisect_left(STEP_SECONDS_BUCKETS, value)] += 1
        self.total += value

    def copy(self) -> Distribution:
        """One that stands still."""
        return Distribution(counts=list(self.counts), total=self.total)


class Totals:
    """Adds lines up; for one thread at a time.

    Attributes:
        values: by metric and its labels (without the run).
        distributions: of the histograms.
        accounting: where the time went.
        spending: what the budget went to.
        attempt: the last one that began; 0 before the first.
        mode: its mode.
        numerics: names the numerics it runs under.
        num_steps: steps taken.
        finished: the run has ended, and nobody has gone on with it.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[Metric, Labels], float] = {}
        self.distributions = {metric: Distribution() for metric in HISTOGRAMS}
        self.accounting = Accounting()
        self.spending = Spending()
        self.attempt = 0
        self.mode = self.numerics = ""
        self.num_steps = 0
        self._started: tuple[int, int] | None = None
        self._ended: Mapping[str, Any] | None = None
        self.finished = False
        self._last_incident: str | None = None
        self._restarted: str | None = None
        self._num_recoveries = 0
        self._num_users: dict[Metric, int] = {}
        for metric in COUNTED_FROM_THE_START:
            self.values[metric, ()] = 0.0
        for kind in IncidentKind:
            self.values[Metrics.INCIDENTS, (str(kind),)] = 0.0
        self._show(Metrics.FAILED, 0)
        for cause in RESTART_CAUSES:
            self.values[Metrics.RESTARTS, (cause,)] = 0.0
        for source in STATE_SOURCES:
            self.values[Metrics.RESTORES, (source,)] = 0.0
        self._show_time()

    @property
    def num_incidents(self) -> int:
        """Of all kinds."""
        return int(sum(self.values[Metrics.INCIDENTS, (str(kind),)] for kind in IncidentKind))

    @property
    def present_attempt(self) -> int:
        """The attempt that is under way; 0 where none is."""
        return self.attempt if self.values.get((Metrics.WORKERS, ())) else 0

    def add(self, record: StepRecord | EventRecord) -> None:
        """Takes in a line of the ledger."""
        self.accounting.add(record)
        self.spending.add(record)
        self._show_time()
        if isinstance(record, EventRecord):
            self._add_event(record)
            return
        self.show(record)
        if record.step < self.num_steps:
            return  # written again under other numerics
        self.num_steps = record.step + 1
        if record.attempt == INHERITED:
            return
        self._count(Metrics.STEPS)
        self._count(Metrics.SAMPLES, record.samples)
        self._count(Metrics.LOSS_WEIGHT, sum(weight or 0.0 for weight in record.shard_weights))
        self._count(Metrics.SKIPPED_STEPS, int(record.skipped))
        self._count(Metrics.SENT_BYTES, record.timing.get("sent_bytes", 0.0))
        self._add_timing(record.timing)
        if self._started is not None:  # through with what was there when the attempt began
            start_step, known_steps = self._started
            self._count(Metrics.REDONE_STEPS, max(0, known_steps - start_step))
            self._started = None

    def show(self, record: StepRecord) -> None:
        """Shows the values of a step, without counting it."""
        self._show(Metrics.LOSS, record.loss)
        self._show(Metrics.GRAD_NORM, record.grad_norm)
        self._show(Metrics.EPOCH, record.epoch)
        self._show(Metrics.LAST_STEP, record.time)
        for group, rate in enumerate(record.lr):
            self._show(Metrics.LEARNING_RATE, rate, str(group))
        for name, value in record.metrics.items():
            self._show_users(Metrics.TRAIN, value, name)

    def _add_timing(self, timing: Mapping[str, float]) -> None:
        if "step_s" not in timing:
            return
        seconds = seconds_of(timing)
        self.distributions[Metrics.STEP_SECONDS].add(float(timing["step_s"]))
        self.distributions[Metrics.COMPUTE_SECONDS].add(seconds[Activity.TRAINING])
        self.distributions[Metrics.DATA_WAIT_SECONDS].add(seconds[Activity.DATA])
        self.distributions[Metrics.COMMUNICATION_SECONDS].add(seconds[Activity.COMMUNICATION])
        # What was kept is told by the step after it.
        for metric, name in (
            (Metrics.CHECKPOINT_SECONDS, SAVE),
            (Metrics.SNAPSHOT_SECONDS, SNAPSHOT),
            (Metrics.AUDIT_SECONDS, AUDIT),
        ):
            if name in timing:
                self.distributions[metric].add(float(timing[name]))
        self._show(Metrics.LAST_SNAPSHOT, timing.get(SNAPSHOT_AT))

    def _add_last_checkpoint(self, held_s: float) -> None:
        """There is no step behind it to tell."""
        if held_s > 0:
            self.distributions[Metrics.CHECKPOINT_SECONDS].add(held_s)

    def _add_event(self, record: EventRecord) -> None:
        fields = record.fields
        match record.event:
            case Event.ATTEMPT_STARTED:
                self._start_attempt(record)
            case Event.ATTEMPT_ENDED:
                self._count_restart()
                if self._started is not None:
                    self._count(Metrics.REDONE_STEPS, fields.get("redone", 0))
                    self._started = None
                self._ended = fields
                self._show(Metrics.WORKERS, 0)
            case Event.CHECKPOINT_COMMITTED:
                self._count(Metrics.CHECKPOINTS)
                self._show(Metrics.LAST_CHECKPOINT, record.time)
                self._show(Metrics.LAST_CHECKPOINT_BYTES, fields.get("bytes"))
            case Event.CHECKPOINT_FAILED:
                self._count(Metrics.CHECKPOINT_FAILURES)
            case Event.EVALUATION:
                for name, value in fields.get("metrics", {}).items():
                    self._show_users(Metrics.EVALUATION, value, name)
            case Event.INCIDENT:
                self._last_incident = str(fields.get("kind", ""))
                self._count(Metrics.INCIDENTS, 1, self._last_incident)
                self._show(Metrics.LAST_INCIDENT, record.time, self._last_incident)
            case Event.RECOVERED:
                self._add_recovery(fields)
            case Event.ROLLED_BACK:
                self.num_steps = min(self.num_steps, record.step)
            case Event.FINISHED:
                self.finished = True
                self._show(Metrics.FAILED, fields.get("status") == RunState.FAILED)
                timing = fields.get(TIMING)
                if isinstance(timing, Mapping):
                    self._add_last_checkpoint(seconds_of(timing)[Activity.CHECKPOINT])
            case _:
                pass

    def _start_attempt(self, record: EventRecord) -> None:
        fields = record.fields
        if self.attempt:
            self._restarted = self._why_restarted()
            # Where no fault is known, it shows a moment later whether the run was resized.
            if self._restarted != RestartCause.WORKER_LOST:
                self._count_restart()
        self._count(Metrics.ATTEMPTS)
        source = str(fields.get("source", ""))
        if source in STATE_SOURCES:
            self._count(Metrics.RESTORES, 1, source)
        self._show(Metrics.WORKERS, fields.get("world_size", 0))
        self._show(Metrics.ATTEMPT_STARTED, record.time)
        self._show(Metrics.PLANNED_STEPS, fields.get("total_steps"))
        self.attempt, self.mode = record.attempt, str(fields.get("mode", ""))
        self.numerics = str(fields.get("numerics_id", ""))
        start_step = int(fields.get("start_step", record.step))
        self._started = start_step, int(fields.get("known_steps", start_step))
        self._ended, self.finished, self._last_incident = None, False, None
        self._show(Metrics.FAILED, 0)
        for seconds in self.accounting.recoveries[self._num_recoveries :]:
            self.distributions[Metrics.RECOVERY_SECONDS].add(seconds)
        self._num_recoveries = len(self.accounting.recoveries)

    def _count_restart(self) -> None:
        if self._restarted is not None:
            self._count(Metrics.RESTARTS, 1, self._restarted)
            self._restarted = None

    def _add_recovery(self, fields: Mapping[str, Any]) -> None:
        planned = bool(fields.get("planned"))
        if planned and self._restarted is not None:
            self._restarted = str(RestartCause.RESIZED)
        self._count_restart()
        standstill = (
            Metrics.PLANNED_STANDSTILL_SECONDS if planned else Metrics.FAULT_STANDSTILL_SECONDS
        )
        self.distributions[standstill].add(float(fields.get("again_s", 0.0)))
        detected_s = fields.get("detected_s")
        if detected_s is not None:
            self.distributions[Metrics.DETECTION_SECONDS].add(float(detected_s))

    def _why_restarted(self) -> str:
        """A cause of the closed list; the first that applies."""
        if self.finished:
            return RestartCause.RESUMED
        if self._last_incident in RESTART_CAUSES:
            return str(self._last_incident)
        reason = str((self._ended or {}).get("reason", ""))
        if reason in RESTART_CAUSES:
            return reason
        died = self._ended is None or (reason == "died" and bool(self._ended.get(NOTICED_LATE)))
        return RestartCause.DRIVER_LOST if died else RestartCause.WORKER_LOST

    def _show_time(self) -> None:
        for part in TimePart:
            self.values[Metrics.TIME, (str(part),)] = self.accounting.seconds[part]

    def _count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        self.values[metric, labels] = self.values.get((metric, labels), 0.0) + amount

    def _show_users(self, metric: Metric, value: float, name: str) -> None:
        """One of the workload's: names that it makes up as it goes are series for ever."""
        if (metric, (name,)) not in self.values:
            if self._num_users.get(metric, 0) >= MAX_USERS_METRICS:
                return
            self._num_users[metric] = self._num_users.get(metric, 0) + 1
        self._show(metric, value, name)

    def _show(self, metric: Metric, value: float | None, *labels: str) -> None:
        if value is not None:
            self.values[metric, labels] = float(value)
