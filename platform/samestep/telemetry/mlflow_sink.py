"""Delivers a run to MLflow: one MLflow run for all attempts, each point once.

What is delivered, and how far, is kept in `mlflow.json` after each delivery. Whoever dies between
a delivery and that note sends the same points again, with the same time: MLflow's databases store
equal points once. So the ledger, the position and the times in it give each step one point,
whatever happens to recorder, server or run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.incidents.redaction import Redaction
from samestep.names import (
    TAG_SPEC_PREFIX,
    THREAD_TRACKING_CHECK,
    Tag,
)
from samestep.telemetry import provenance
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.identity import read_result
from samestep.telemetry.mlflow_client import MlflowRun, Point
from samestep.telemetry.mlflow_delivery import ENDED, KILLED, RUNNING, Delivery
from samestep.telemetry.mlflow_upload import ArtifactStore, Upload
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.sink import RunInfo, StartOver
from samestep.telemetry.spool import START, Line, Position
from samestep.telemetry.system_metrics import SystemMetrics
from samestep.telemetry.tracking_file import (
    Tracked,
    tracked_for,
    without_password,
    write_tracked,
)
from samestep.telemetry.tracking_names import flatten, tracked_name, tracked_params

INTERVAL_S: Final = 3.0
REQUIRED_TIMEOUT_S: Final = 45.0

logger = logging.getLogger(__name__)


class TrackedRun(ArtifactStore, Protocol):
    """What a delivery needs of `mlflow_client.MlflowRun`."""

    run_id: str
    status: str
    start_ms: int
    params: dict[str, str]

    def log_points(self, points: Sequence[Point]) -> None:
        """Stores values of metrics."""

    def log_params(self, params: dict[str, str]) -> None:
        """Stores parameters that are missing."""

    def set_tags(self, tags: dict[str, str]) -> None:
        """Sets tags."""

    def set_status(self, status: str, time_ms: int) -> None:
        """Sets the status."""

    def log_datasets(self, found: Sequence[DatasetInfo]) -> None:
        """Stores inputs."""


Connect = Callable[..., TrackedRun]


class MlflowSink:
    """A sink of the recorder, see `sink.Sink`.

    Args:
        uri: tracking URI.
        experiment: name of the experiment.
        artifact_root: where a new experiment keeps artifacts; None: where the server says.
        required: refuse the start where MLflow can't be reached.
        hint: a command that shows the run, for people; may be empty.
        connect: makes the run in MLflow; tests give their own.
        interval_s: least time between two deliveries.
        clock: seconds since the epoch, for what is no part of the ledger.
    """

    name = "mlflow"

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        artifact_root: str | None = None,
        required: bool = False,
        hint: str = "",
        connect: Connect = MlflowRun,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval_s = interval_s
        self._uri = uri
        self._shown_uri = without_password(uri)
        self._experiment = experiment
        self._artifact_root = artifact_root
        self._required = required
        self._hint = hint
        self._connect = connect
        self._clock = clock
        self._client: TrackedRun | None = None
        self._up: bool | None = None  # until MLflow was first spoken to
        self._system = SystemMetrics()
        self._introduced = False

    def started(self, info: RunInfo) -> Position:
        """Reads how far the run was delivered; looks for the server only where it is required."""
        # Whoever may look at MLflow may not know the job's secrets.
        info = replace(info, spec=Redaction(info.spec).spec()[0])
        self._info = info
        self._run: Storage = info.run
        self._tracked = tracked_for(info.run, self._uri, self._experiment)
        self._upload = Upload(info, self._clock)
        if self._required and not info.returning:
            self._check()
        return self._tracked.position

    def take(self, lines: Sequence[Line], *, more: bool) -> None:
        """Delivers lines, and artifacts that were refused before, and notes it."""
        if not lines and not self._upload.is_overdue(self._tracked):
            return
        try:
            client = self._connected()
            delivery = Delivery(tracked=self._tracked)
            for line in lines:
                delivery.add(line)
            client.log_points(delivery.points)
            if delivery.tags:
                client.set_tags(delivery.tags)
            if delivery.datasets:
                client.log_datasets(delivery.datasets)
            self._deliver_artifacts(client, delivery)
            if delivery.status:
                delivery.tracked = self._set_status(client, delivery.status, delivery.tracked)
        except StartOver:
            raise
        except Exception:
            self._up, self._client = False, None
            raise
        self._up = True
        self._keep(delivery.tracked)

    def live(self, record: StepRecord) -> None:
        """Nothing: only what is in the ledger goes to MLflow."""

    def wants(self, report: WorkerReport) -> bool:
        """Those that tell of a node."""
        return report.node is not None

    def reports(self, found: Sequence[WorkerReport], num_dropped: int) -> None:
        """Shows how busy the nodes are; while MLflow is away it is not told later."""
        if self._client is None:
            return
        now_ms = int(self._clock() * 1000)
        points = self._system.points(found, now_ms=now_ms, start_ms=self._client.start_ms)
        if not points:
            return
        try:
            self._client.log_points(points)
        except Exception as error:  # the next records find out what it is, and tell
            logger.debug("run=%s system metrics dropped: %r", self._info.name, error)
            self._up, self._client = False, None

    def status(self) -> dict[str, Any]:
        """`mlflow`: where the run is, whether it takes what is delivered, and how far it is."""
        return {
            "mlflow": {
                "uri": self._shown_uri,
                "run_id": self._tracked.run_id,
                "up": self._up,
                "num_steps": self._tracked.next_step,
            }
        }

    def explain(self, error: BaseException) -> str:
        """What becomes of the records."""
        reason = str(error).replace(self._uri, self._shown_uri)
        return (
            f"MLflow at {self._shown_uri} does not take records ({reason}); training goes on, the "
            "records wait in the ledger and are delivered when it does"
        )

    def wait_until_seen(self) -> bool:
        """What is delivered lies there for good."""
        return True

    def close(self) -> None:
        """A run that was left without an end is marked as killed, until it goes on."""
        if self._client is not None and self._up and self._client.status == RUNNING:
            self._keep(self._set_status(self._client, KILLED, self._tracked))

    def abandon(self) -> None:
        """Nothing: the run in MLflow goes on, fed by another."""

    def _check(self) -> None:
        """Connects within a bounded time, whatever the server does."""
        failure: list[BaseException] = [TimeoutError(f"no answer in {REQUIRED_TIMEOUT_S:.0f} s")]

        def connect() -> None:
            try:
                self._connected()
                failure.clear()
            except StartOver:
                failure.clear()
            except Exception as error:  # told by the thread that waits
                failure[:] = [error]

        thread = threading.Thread(target=connect, name=THREAD_TRACKING_CHECK, daemon=True)
        thread.start()
        thread.join(REQUIRED_TIMEOUT_S)
        if failure:
            reason = str(failure[0]).replace(self._uri, self._shown_uri)
            raise InputError(
                f"tracking.required is true, and MLflow at {self._shown_uri} can't be used: "
                f"{reason}; start the server, correct tracking.uri or MLFLOW_TRACKING_URI, or set "
                "tracking.required to false: training then goes on without it"
            )

    def _connected(self) -> TrackedRun:
        if self._client is not None:
            return self._client
        info = self._info
        if self._tracked.run_id is None:  # it is RUNNING from the moment it is made
            self._keep(replace(self._tracked, status=RUNNING))
        tracked = self._tracked
        client = self._connect(
            self._uri,
            experiment=self._experiment,
            artifact_root=self._artifact_root,
            key=tracked.key,
            name=info.name,
            run_id=tracked.run_id,
        )
        params = flatten(info.spec.model_dump(mode="json"))
        client.log_params(tracked_params(params))
        client.set_tags(self._first_tags(params, client.params))
        if client.run_id != tracked.run_id:
            # Another run than the one that was delivered to: that one was deleted, or its id was
            # lost before it could be written down.
            is_other = tracked.run_id is not None
            self._keep(
                Tracked(
                    key=tracked.key,
                    uri=tracked.uri,
                    experiment=tracked.experiment,
                    run_id=client.run_id,
                    status=RUNNING,
                )
            )
            if is_other:
                info.say(f"MLflow has not got run {tracked.run_id} any more; it is made again")
            if tracked.position != START:
                self._client = client
                raise StartOver
        self._keep(self._upload.deliver(client, self._tracked, self._keep_models, end_step=None))
        if info.returning and client.status in ENDED and read_result(self._run) is None:
            # Somebody took the run for dead while its recorder was being started again.
            self._keep(self._set_status(client, RUNNING, self._tracked))
        if not self._introduced:
            hint = f"; see it with: {self._hint}" if self._hint else ""
            info.say(f"MLflow: run {client.run_id} at {self._shown_uri}{hint}")
            self._introduced = True
        self._client = client
        return client

    def _deliver_artifacts(self, client: TrackedRun, delivery: Delivery) -> None:
        before = self._tracked
        is_overdue = self._upload.is_overdue(before)
        if not (is_overdue or delivery.attempt_changed or delivery.status):
            return
        end_step = None
        if delivery.status in ENDED:
            end_step = delivery.tracked.next_step
        elif is_overdue and before.status in ENDED:  # lines that follow are of a run that goes on
            end_step = before.next_step
        delivery.tracked = self._upload.deliver(
            client, delivery.tracked, self._keep_models, end_step=end_step
        )

    def _set_status(self, client: TrackedRun, status: str, tracked: Tracked) -> Tracked:
        """Sets a run's status in MLflow; RUNNING is written down before, an end after."""
        if status == RUNNING:
            self._keep(replace(self._tracked, status=RUNNING))
        if status != client.status:
            client.set_status(status, tracked.time_ms)
        return replace(tracked, status=status)

    def _first_tags(self, params: dict[str, str], there: dict[str, str]) -> dict[str, str]:
        info = self._info
        tags = {
            str(Tag.RUN): info.name,
            str(Tag.RUN_DIRECTORY): info.run.uri,
            str(Tag.SOURCE_NAME): info.spec.workload,
            str(Tag.SOURCE_TYPE): "JOB",
            **provenance.versions(),
            **info.about,
        }
        for path, value in tracked_params(params).items():
            if there.get(path, value) != value:  # parameters can't change in MLflow
                tags[tracked_name(f"{TAG_SPEC_PREFIX}{path}")] = value
        return tags

    def _keep_models(self, made: Tracked) -> None:
        """Notes models that are there, before the lines that told of the end are through."""
        self._keep(
            replace(
                self._tracked,
                files=made.files,
                model_id=made.model_id,
                best_model_id=made.best_model_id,
                registered=made.registered,
            )
        )

    def _keep(self, tracked: Tracked) -> None:
        if tracked != self._tracked:
            write_tracked(self._run, tracked)
            self._tracked = tracked
