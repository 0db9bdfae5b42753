"""What lines of the ledger amount to in MLflow: points, tags, a status, inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from samestep.names import Event, RunState, Tag
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.mlflow_client import Point
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.spool import Line
from samestep.telemetry.tracking_file import Tracked
from samestep.telemetry.tracking_names import evaluation_metrics, step_metrics

RUNNING: Final = "RUNNING"
KILLED: Final = "KILLED"
STATUS: Final = {
    RunState.DONE: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.INTERRUPTED: KILLED,
    RunState.BUDGET_EXHAUSTED: KILLED,
}
ENDED: Final = frozenset(STATUS.values())
MAX_HISTORY: Final = 1000
DATASET_PREFIX: Final = "dataset/"
"""Before a dataset's context among the names of what was delivered."""


@dataclass(kw_only=True)
class Delivery:
    """Takes lines in, and sends nothing.

    Attributes:
        tracked: how far the run is delivered when all of this is.
        points: values of metrics.
        tags: of the run.
        datasets: inputs that were not delivered yet.
        status: of the run in MLflow; None: as it was.
        attempt_changed: artifacts may have changed.
    """

    tracked: Tracked
    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[DatasetInfo] = field(default_factory=list)
    status: str | None = None
    attempt_changed: bool = False

    def add(self, line: Line) -> None:
        """Takes in the next line."""
        record = line.record
        if isinstance(record, StepRecord):
            self._add_step(record)
        else:
            self._add_event(record)
        self.tracked = replace(self.tracked, position=line.position)

    def _add_step(self, record: StepRecord) -> None:
        tracked = self.tracked
        if record.step < tracked.next_step:
            return  # taken again under other numerics: the first values stay
        time_ms = tracked.time_ms if record.time is None else int(record.time * 1000)
        self.points += [
            Point(name=name, value=value, step=record.step, time_ms=time_ms)
            for name, value in step_metrics(record)
        ]
        self.tracked = replace(tracked, next_step=record.step + 1, time_ms=time_ms)

    def _add_event(self, record: EventRecord) -> None:
        fields, tags = record.fields, self.tags
        time_ms = int(record.time * 1000)
        match record.event:
            case Event.ATTEMPT_STARTED:
                self._start_attempt(record)
            case Event.CHECKPOINT_COMMITTED:
                tags[Tag.STATE_DIGEST] = str(fields.get("digest", ""))
            case Event.INCIDENT:
                num_incidents = self.tracked.num_incidents + 1
                self.tracked = replace(self.tracked, num_incidents=num_incidents)
                tags[Tag.INCIDENTS] = str(num_incidents)
                self.attempt_changed = True
            case Event.ROLLED_BACK:  # the steps behind it come again, with other values
                tags[Tag.BRANCH] = str(fields.get("branch", ""))
                self.tracked = replace(
                    self.tracked,
                    next_step=min(self.tracked.next_step, record.step),
                    next_evaluation=min(self.tracked.next_evaluation, record.step + 1),
                )
            case Event.FORKED:
                tags[Tag.PARENT] = f"{fields.get('parent', '')} after {record.step} steps"
                if fields.get("parent_run_id"):
                    tags[Tag.PARENT_RUN_ID] = str(fields["parent_run_id"])
            case Event.EVALUATION if record.step >= self.tracked.next_evaluation:
                self.points += [
                    Point(name=name, value=value, step=record.step, time_ms=time_ms)
                    for name, value in evaluation_metrics(fields.get("metrics", {}))
                ]
                self.tracked = replace(self.tracked, next_evaluation=record.step + 1)
            case Event.FINISHED:
                status = RunState(str(fields.get("status", RunState.FAILED)))
                tags[Tag.STATUS] = str(status)
                tags[Tag.MESSAGE] = str(fields.get("message", ""))
                if fields.get("digest"):
                    tags[Tag.STATE_DIGEST] = str(fields["digest"])
                self.status = STATUS.get(status, "FAILED")
            case _:
                pass
        self.tracked = replace(self.tracked, time_ms=time_ms)

    def _start_attempt(self, record: EventRecord) -> None:
        fields = record.fields
        self.tracked = replace(self.tracked, history=with_attempt(self.tracked.history, record))
        self.tags |= {
            str(Tag.ATTEMPT): str(record.attempt),
            str(Tag.MODE): str(fields.get("mode", "")),
            str(Tag.WORKERS): str(fields.get("world_size", "")),
            str(Tag.ATTEMPTS): self.tracked.history,
            str(Tag.NUMERICS): str(fields.get("numerics_id", "")),
            str(Tag.STATUS): str(RunState.RUNNING),
        }
        self.status, self.attempt_changed = RUNNING, True
        for data in fields.get("datasets", []):
            found = DatasetInfo.from_json(data)
            name = f"{DATASET_PREFIX}{found.context}"
            before = self.tracked.files.get(name)
            # One whose samples were not read this time tells nothing new.
            if before is None or (found.num_sampled and before != found.digest):
                self.datasets.append(found)
                files = {**self.tracked.files, name: found.digest}
                self.tracked = replace(self.tracked, files=files)


def with_attempt(history: str, started: EventRecord) -> str:
    """The history of a run's attempts with one more in it; of a long one the end stays.

    One entry stands for all attempts in a row with the same workers and mode: `1: ddp, 2 workers
    from step 0; 2: ddp, 3 workers from step 40`.
    """
    fields = started.fields
    workers = int(fields.get("world_size", 0))
    kind = f"{fields.get('mode', '')}, {workers} worker{'' if workers == 1 else 's'}"
    *before, last = history.split("; ")
    numbers, _, told = last.partition(": ")
    if told.rpartition(" from step ")[0] == kind:
        entry = f"{numbers.partition('-')[0]}-{started.attempt}: {told}"
    else:
        entry = f"{started.attempt}: {kind} from step {started.step}"
        before = [*before, last] if last else before
    text = "; ".join([*before, entry])
    while len(text) > MAX_HISTORY:
        text = "...; " + text.removeprefix("...; ").partition("; ")[2]
    return text
