"""MLflow's client behind a few calls: the one place where a tracking server is spoken to.

Nothing global of MLflow is used (no active run, no tracking URI of the process), so that several
runs in one process don't mix. MLflow is imported with the first call, which takes seconds.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from samestep.errors import SamestepError
from samestep.names import TAG_PACKAGE, Env, Tag
from samestep.scratch import scratch_folder
from samestep.telemetry.datasets import DatasetInfo
from samestep.telemetry.tracking_file import without_password
from samestep.telemetry.tracking_names import MAX_TAG, batches

WEB: Final = ("http://", "https://")
SERVERS: Final = (*WEB, "databricks")
TIMEOUT_S: Final = 10
PROBE_TIMEOUT_S: Final = 5.0
MAX_RETRIES: Final = 1
MAX_METRICS: Final = 1000
MAX_PARAMS: Final = 100
MAX_DATASET_NAME: Final = 500
CONTEXT_TAG: Final = "mlflow.data.context"
ENDED: Final = ("FINISHED", "FAILED", "KILLED")

_loading = threading.Lock()


class TrackingError(SamestepError):
    """MLflow can't be reached, or refused something."""


class NoSuchRunError(TrackingError):
    """MLflow has not got the run."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a metric; the same point sent twice is stored once.

    Attributes:
        name: as MLflow takes it.
        value: may be NaN or infinite.
        step: number of the step.
        time_ms: milliseconds since the epoch.
    """

    name: str
    value: float
    step: int
    time_ms: int


class MlflowRun:
    """A run on a tracking server.

    Args:
        uri: tracking URI.
        experiment: name; made where there is none.
        artifact_root: where a new experiment keeps artifacts; None: where the server says.
        key: a text that names this run alone, to find it by when its id got lost.
        name: shown by MLflow.
        run_id: by which it is looked for first.
        make: make the experiment and the run where they are not there.

    Attributes:
        run_id: of the run.
        status: RUNNING, FINISHED, FAILED or KILLED.
        start_ms: when it began, in milliseconds since the epoch.
        params: parameters it has.

    Raises:
        TrackingError: here and in every method: the server is away or refuses.
        NoSuchRunError: the run is not there, and not to be made.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        artifact_root: str | None,
        key: str,
        name: str,
        run_id: str | None = None,
        make: bool = True,
    ) -> None:
        self._is_server = uri.startswith(SERVERS)
        try:
            require_answer(uri)
            self._mlflow = load_mlflow()
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
            if not make and self._client.get_experiment_by_name(experiment) is None:
                raise NoSuchRunError(f"there is no experiment {experiment!r}")
            self.experiment_id = self._experiment(experiment, artifact_root)
            found = self._there(run_id, key)
            if found is None and not make:
                raise NoSuchRunError(f"there is no run {key!r}")
            if found is None:
                found = self._client.create_run(
                    self.experiment_id, tags={str(Tag.KEY): key}, run_name=name
                )
        except Exception as error:
            raise _told(error) from error
        self.run_id: str = found.info.run_id
        self.status: str = found.info.status
        self.start_ms: int = int(found.info.start_time or 0)
        self.params: dict[str, str] = dict(found.data.params)

    def log_points(self, points: Sequence[Point]) -> None:
        """Stores values of metrics."""
        metric = self._mlflow.entities.Metric
        for batch in batches(points, MAX_METRICS):
            self._call(
                "log_batch",
                metrics=[metric(p.name, p.value, p.time_ms, p.step) for p in batch],
            )

    def log_params(self, params: Mapping[str, str]) -> None:
        """Stores parameters that the run has not got; those it has stay as they are."""
        param = self._mlflow.entities.Param
        missing = [param(k, v) for k, v in params.items() if k not in self.params]
        for batch in batches(missing, MAX_PARAMS):
            self._call("log_batch", params=list(batch))
        self.params = {**params, **self.params}

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags, over earlier values."""
        tag = self._mlflow.entities.RunTag
        for batch in batches(list(tags.items()), MAX_PARAMS):
            self._call("log_batch", tags=[tag(key, value[:MAX_TAG]) for key, value in batch])

    def set_status(self, status: str, time_ms: int) -> None:
        """Sets RUNNING, FINISHED, FAILED or KILLED."""
        if status in ENDED:  # not before it began there, which was when MLflow was loaded
            end_ms = max(time_ms, self.start_ms)
            self._call("set_terminated", status=status, end_time=end_ms)
        else:
            self._call("update_run", status=status)
        self.status = status

    def log_file(self, name: str, data: bytes) -> None:
        """Stores an artifact, over an earlier one of that name."""
        folder, _, file = name.rpartition("/")
        with scratch_folder("artifact") as temporary:
            path = temporary / file
            path.write_bytes(data)
            self._call("log_artifact", local_path=str(path), artifact_path=folder or None)

    def log_datasets(self, found: Sequence[DatasetInfo]) -> None:
        """Notes what the run works on; the same dataset told twice is noted once."""
        entities = self._mlflow.entities
        inputs = [
            entities.DatasetInput(
                dataset=entities.Dataset(
                    name=item.kind[-MAX_DATASET_NAME:],
                    digest=item.digest,
                    source_type="code",
                    source=json.dumps({"tags": {str(Tag.SOURCE_NAME): item.kind}}),
                    profile=json.dumps({"num_rows": item.size, "num_sampled": item.num_sampled}),
                ),
                tags=[entities.InputTag(key=CONTEXT_TAG, value=item.context)],
            )
            for item in found
        ]
        self._call("log_inputs", datasets=inputs)

    def create_model(self, name: str, step: int, *, digest: str) -> str:
        """Makes room for a model of this run; returns its id.

        The same package gets the same room again: whoever was not answered, or could not fill it,
        leaves no second model behind.
        """
        try:
            model_id = self._model(name, digest)
            if model_id is None:
                model = self._client.create_logged_model(
                    self.experiment_id,
                    name=name,
                    source_run_id=self.run_id,
                    tags={TAG_PACKAGE: digest},
                )
                model_id = str(model.model_id)
            outputs = self._client.get_run(self.run_id).outputs
            linked = outputs.model_outputs if outputs else []
            if model_id not in [output.model_id for output in linked]:
                output = self._mlflow.entities.LoggedModelOutput(model_id=model_id, step=step)
                self._client.log_outputs(self.run_id, models=[output])
        except Exception as error:
            raise _told(error) from error
        return model_id

    def fill_model(self, model_id: str, folder: Path) -> None:
        """Stores the files of a model, and says that it is ready."""
        try:
            self._client.log_model_artifacts(model_id, str(folder))
            self._client.finalize_logged_model(model_id, "READY")
        except Exception as error:
            raise _told(error) from error

    def register_model(self, model_id: str, *, name: str, alias: str) -> str:
        """Makes a model the next version of a registered one, which the alias names from now on.

        Returns:
            The version.
        """
        try:
            try:
                self._client.create_registered_model(name)
            except self._mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            # A database's registry would look the model up in MLflow's global store, not in ours.
            source = f"models:/{model_id}"
            if not self._is_server:
                source = self._client.get_logged_model(model_id).artifact_location
            version = self._client.create_model_version(
                name,
                source,
                run_id=self.run_id,
                model_id=model_id,
                await_creation_for=0,
            )
            self._client.set_registered_model_alias(name, alias, version.version)
        except Exception as error:
            raise _told(error) from error
        return str(version.version)

    def _call(self, method: str, **arguments: Any) -> None:
        try:
            getattr(self._client, method)(self.run_id, **arguments)
        except Exception as error:  # requests, SQLAlchemy, cloud SDKs: MLflow lets many through
            raise _told(error) from error

    def _experiment(self, name: str, artifact_root: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifact_root))
            except self._mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)  # another run made it
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"its experiment {name!r} is deleted; restore it, or set tracking.experiment to "
                "another name"
            )
        return str(found.experiment_id)

    def _there(self, run_id: str | None, key: str) -> Any:
        return (self._known(run_id) if run_id else None) or self._find(key)

    def _known(self, run_id: str) -> Any:
        try:
            found = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        here = found.info.experiment_id == self.experiment_id
        return found if here and found.info.lifecycle_stage == "active" else None

    def _model(self, name: str, digest: str) -> str | None:
        found = self._client.search_logged_models(
            [self.experiment_id],
            filter_string=f"source_run_id = '{self.run_id}' AND name = '{name}'",
        )
        return next((str(m.model_id) for m in found if m.tags.get(TAG_PACKAGE) == digest), None)

    def _find(self, key: str) -> Any:
        found = self._client.search_runs(
            [self.experiment_id], f"tags.`{Tag.KEY}` = '{key}'", max_results=1
        )
        return found[0] if found else None


def require_answer(uri: str) -> None:
    """Asks a server for any answer at all, within a few seconds and before MLflow is loaded.

    MLflow's own requests are patient; one that nobody answers would hold up the end of a run.
    Nothing is sent but the question, so certificates are not looked at.

    Raises:
        TrackingError: nobody answers.
    """
    if not uri.startswith(WEB):
        return
    parts = urlsplit(without_password(uri))
    url = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/health", query=""))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S, context=context):
            return
    except (urllib.error.HTTPError, ssl.SSLError):
        return  # somebody answers; what they say is for MLflow's client to deal with
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return
        raise TrackingError(f"no answer: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TrackingError(f"no answer: {str(error) or type(error).__name__}") from error


def load_mlflow() -> Any:
    """Imports MLflow: with short timeouts, quiet, and not reporting its use to anybody.

    Variables of the environment that set timeouts and retries keep precedence.
    """
    with _loading:
        before = os.environ.get(Env.MLFLOW_DISABLE_TELEMETRY)
        os.environ.setdefault(Env.MLFLOW_DISABLE_TELEMETRY, "true")
        try:
            import mlflow
            from mlflow import environment_variables as variables
        finally:
            if before is None:
                os.environ.pop(Env.MLFLOW_DISABLE_TELEMETRY, None)
        variables.MLFLOW_DISABLE_TELEMETRY.default = True
        variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
        variables.MLFLOW_HTTP_REQUEST_TIMEOUT.default = TIMEOUT_S
        variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = MAX_RETRIES
        for name in ("mlflow.store.db", "alembic", "urllib3.connectionpool"):
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.ERROR)
        return mlflow


def _told(error: Exception) -> TrackingError:
    """The first line of a reason; tracebacks and page-long texts of HTTP libraries are left out."""
    if isinstance(error, TrackingError):
        return error
    text = str(error).strip() or type(error).__name__
    return TrackingError(text.splitlines()[0][:300])
