"""Which sinks a run has, from its spec and from what its launcher sees.

A plan is made where the user's environment and folders are, is plain data that can be sent to
another process, and makes the sinks where the recorder lives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import samestep
from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.names import (
    MLFLOW_ENV_PREFIX,
    MLFLOW_EXPERIMENT,
    TRACKING_ARTIFACTS_DIR,
    TRACKING_DATABASE,
    Env,
    Tag,
)
from samestep.spec import JobSpec
from samestep.telemetry import provenance
from samestep.telemetry.programs import program
from samestep.telemetry.sink import Sink
from samestep.telemetry.tracking_file import without_password

if TYPE_CHECKING:
    from samestep.telemetry.recorder import Recorder

SCHEMES: Final = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_SQLITE = "sqlite:///"


@dataclass(frozen=True, kw_only=True)
class SinkPlan:
    """What a recorder's process needs to make a run's sinks.

    Attributes:
        tracking_uri: where MLflow is; None where tracking is off or has no place.
        experiment: name of the MLflow experiment.
        artifact_root: of a new experiment; None: where the server says.
        required: refuse the start without MLflow.
        hint: a command that shows the run in MLflow.
        metrics: (host, port) of the metrics page; None where it is off.
        pushgateway: URL of the Pushgateway that gets the last values; None: none.
        about: facts for tags.
        environment: MLflow's variables (they may hold passwords), and the id of the Ray job.
        notes: what the user should know.
    """

    tracking_uri: str | None
    experiment: str
    artifact_root: str | None
    required: bool
    hint: str
    metrics: tuple[str, int] | None
    pushgateway: str | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: Sequence[str] = ()

    def make(self) -> list[Sink]:
        """The sinks; imports what they need, MLflow excepted."""
        sinks: list[Sink] = []
        tracking = None
        if self.tracking_uri is not None:
            from samestep.telemetry.mlflow_sink import MlflowSink

            tracking = MlflowSink(
                self.tracking_uri,
                experiment=self.experiment,
                artifact_root=self.artifact_root,
                required=self.required,
                hint=self.hint,
            )
            sinks.append(tracking)
        if self.metrics is not None:
            from samestep.telemetry.prometheus_sink import PrometheusSink

            host, port = self.metrics
            status = tracking.status if tracking is not None else lambda: None
            sinks.append(
                PrometheusSink(host=host, port=port, gateway=self.pushgateway, tracking=status)
            )
        return sinks


def plan_sinks(
    spec: JobSpec,
    run_uri: str,
    *,
    workload_folder: Path,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> SinkPlan:
    """Settles where a run can be watched.

    Args:
        spec: the job.
        run_uri: the run directory.
        workload_folder: whose git revision is noted.
        environ: the user's environment.
        folder: what a relative SQLite path starts from; default: the working directory.

    Raises:
        InputError: a tracking URI that MLflow does not take, or none where one is required.
    """
    run = Storage.at(run_uri)
    storage = replace(run, root=run.root.rpartition("/")[0])
    uri, is_default = _tracking_uri(spec, storage, environ, folder or Path.cwd())
    notes = []
    if spec.tracking.enabled and uri is None:
        advice = (
            f"storage {storage.uri} is remote, and no MLflow server is named: set tracking.uri or "
            f"{Env.MLFLOW_TRACKING_URI}"
        )
        if spec.tracking.required:
            raise InputError(f"tracking.required is true, but {advice}")
        notes.append(
            f"not tracked in MLflow: {advice}; the records wait in the ledger, and the next start "
            "of the run with one delivers them"
        )
    about = provenance.facts(workload_folder)
    environment = {k: v for k, v in environ.items() if k.startswith(MLFLOW_ENV_PREFIX)}
    if Tag.JOB_ID in about:
        environment[Env.SAMESTEP_JOB_ID] = about[Tag.JOB_ID]
    root = f"file://{storage.root}/{TRACKING_ARTIFACTS_DIR}" if is_default else None
    return SinkPlan(
        tracking_uri=uri,
        experiment=(
            spec.tracking.experiment or environ.get(Env.MLFLOW_EXPERIMENT_NAME) or MLFLOW_EXPERIMENT
        ),
        artifact_root=root,
        required=spec.tracking.required,
        hint=f"{program('mlflow')} ui --backend-store-uri {uri}" if is_default else "",
        metrics=(spec.metrics.host, spec.metrics.port) if spec.metrics.enabled else None,
        pushgateway=spec.metrics.pushgateway,
        about={
            **about,
            str(Tag.VERSION): samestep.__version__,
            str(Tag.RUN_DIRECTORY): run.uri,
        },
        environment=environment,
        notes=notes,
    )


def _tracking_uri(
    spec: JobSpec, storage: Storage, environ: Mapping[str, str], folder: Path
) -> tuple[str | None, bool]:
    """The URI, and whether it is the default beside the runs."""
    if not spec.tracking.enabled:
        return None, False
    given = spec.tracking.uri or environ.get(Env.MLFLOW_TRACKING_URI)
    if given:
        source = "tracking.uri" if spec.tracking.uri else str(Env.MLFLOW_TRACKING_URI)
        return _checked(given, source, folder), False
    if not storage.is_local:
        return None, False
    return f"{_SQLITE}{storage.root}/{TRACKING_DATABASE}", True


def _checked(uri: str, source: str, folder: Path) -> str:
    scheme = re.split(r"[+:]", uri, maxsplit=1)[0]
    if scheme not in SCHEMES or (":" not in uri and scheme != "databricks"):
        raise InputError(
            f"{source} {without_password(uri)!r} is no tracking URI that MLflow can keep runs in; "
            f"give one that starts with {', '.join(SCHEMES)}: http://HOST:PORT for a server, "
            "sqlite:////FOLDER/mlflow.db for a file"
        )
    path = uri.removeprefix(_SQLITE)
    if uri.startswith(_SQLITE) and path and not path.startswith(("/", ":")):
        # The recorder may work in another folder than the user.
        return f"{_SQLITE}{folder.resolve() / path}"
    return uri


def open_recorder(
    plan: SinkPlan, run_uri: str, *, run: str, spec_yaml: str, returning: bool = False
) -> Recorder:
    """A run's recorder with its sinks, in the process that it is to live in.

    Raises:
        InputError: a sink refuses the start; and as `Recorder` does.
    """
    from samestep.telemetry.recorder import Recorder

    recorder = Recorder(
        run_uri,
        run=run,
        spec_yaml=spec_yaml,
        sinks=plan.make(),
        about=plan.about,
        returning=returning,
    )
    for note in plan.notes:
        recorder.say(note)
    return recorder


def deliver_rest(plan: SinkPlan, run_uri: str, *, run: str, spec_yaml: str) -> list[str]:
    """Delivers to MLflow what a run that is over could not; takes no time where nothing waits.

    That is lines of the ledger, and artifacts that were refused.

    Returns:
        Lines for people: nothing where there was nothing to do.

    Raises:
        RunInUseError: the run is alive; it delivers by itself.
    """
    if plan.tracking_uri is None:
        return list(plan.notes)
    from samestep.telemetry.spool import START, Spool
    from samestep.telemetry.tracking_file import read_tracked

    storage = Storage.at(run_uri)
    tracked = read_tracked(storage)
    lacks_artifacts = tracked is not None and (tracked.lacks_files or tracked.lacks_end)
    if not lacks_artifacts and not Spool(storage, tracked.position if tracked else START).read(1):
        return []
    recorder = open_recorder(replace(plan, metrics=None), run_uri, run=run, spec_yaml=spec_yaml)
    try:
        recorder.drain()
        return [item["text"] for item in recorder.status()["messages"]]
    finally:
        recorder.close()
