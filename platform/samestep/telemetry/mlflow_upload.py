"""Takes a run's files and packed models to MLflow, and one of the models into its registry.

Metrics never wait for them: what MLflow does not take is told once, noted in `mlflow.json` and
offered again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError
from samestep.names import (
    BEST_MODEL_DIR,
    INCIDENT_FILE,
    INCIDENTS_DIR,
    LEDGER_ARTIFACT,
    LEDGER_DIR,
    MODEL_DIR,
    NUMERICS_FILE,
    PARAMS_ARTIFACT,
    REQUIREMENTS_ARTIFACT,
    SPEC_FILE,
)
from samestep.scratch import scratch_folder
from samestep.spec import dump_spec
from samestep.telemetry import provenance
from samestep.telemetry.ledger import segments
from samestep.telemetry.mlflow_delivery import ENDED
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.tracking_file import Tracked
from samestep.telemetry.tracking_names import flatten

MODEL_FILE: Final = "MLmodel"
"""Written last: a folder without it is no packed model."""
MAX_LEDGER_BYTES: Final = 256 << 20
"""A longer one stays where it is: packing and sending it would hold up the end of a run."""
GZIP: Final = 31
"""zlib's word for a gzip file; without a time in it, so that equal ledgers are equal files."""
LEVEL: Final = 3
RETRY_S: Final = 60.0
"""Least time between a refusal and the next offer while nothing new is due."""
MAX_SHARE: Final = 0.1
"""Of the time, for offers that are refused: one may take minutes, and metrics wait behind it."""

logger = logging.getLogger(__name__)


class FileStore(Protocol):
    """What the upload of files needs of `mlflow_client.MlflowRun`."""

    def log_file(self, name: str, data: bytes) -> None:
        """Stores an artifact."""


class ModelStore(Protocol):
    """What the upload of models needs of it."""

    def create_model(self, name: str, step: int, *, digest: str) -> str:
        """Makes room for a model, once for each package; returns its id."""

    def fill_model(self, model_id: str, folder: Path) -> None:
        """Stores a model's files."""

    def register_model(self, model_id: str, *, name: str, alias: str) -> str:
        """Makes it a version of a registered model; returns which."""


class Refusals:
    """Tells once that MLflow takes no artifacts."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._is_told = False

    def tell(self, error: SamestepError) -> None:
        """Says why, the first time."""
        if not self._is_told:
            self._info.say(
                f"MLflow does not take artifacts ({error}); metrics go on, and the artifacts are "
                "offered again, at the latest when the run is started again"
            )
            logger.info("run=%s MLflow does not take artifacts: %s", self._info.name, error)
        self._is_told = True


class FileUpload:
    """The files that tell what a run is, and what went wrong in it."""

    def __init__(self, info: RunInfo, refusals: Refusals) -> None:
        self._run: Storage = info.run
        self._spec = info.spec
        self._say = info.say
        self._refusals = refusals

    def deliver(self, store: FileStore, tracked: Tracked, *, ended: bool) -> Tracked:
        """Stores files that are new or changed; where that fails, warns once and goes on.

        Args:
            store: the run in MLflow.
            tracked: what is there.
            ended: the run has come to an end, and so has its ledger for now.

        Returns:
            What is there now, and whether something is lacking.
        """
        refused = False
        try:
            for name, data in [*self._files(), *(self._ledger() if ended else [])]:
                digest = hashlib.sha256(data).hexdigest()
                if tracked.files.get(name) != digest:
                    store.log_file(name, data)
                    tracked = replace(tracked, files={**tracked.files, name: digest})
        except SamestepError as error:
            self._refusals.tell(error)
            refused = True
        lacks_end = refused if ended else tracked.lacks_end
        return replace(tracked, lacks_files=refused, lacks_end=lacks_end)

    def _files(self) -> list[tuple[str, bytes]]:
        params = json.dumps(flatten(self._spec.model_dump(mode="json")), indent=1, sort_keys=True)
        found = [
            (SPEC_FILE, dump_spec(self._spec).encode()),
            (PARAMS_ARTIFACT, params.encode()),
            (REQUIREMENTS_ARTIFACT, provenance.requirements().encode()),
        ]
        names = [NUMERICS_FILE]
        names += [f"{INCIDENTS_DIR}/{i}/{INCIDENT_FILE}" for i in self._run.list(INCIDENTS_DIR)]
        return found + [(name, self._run.read(name)) for name in names if self._run.exists(name)]

    def _ledger(self) -> list[tuple[str, bytes]]:
        """The whole lines of all segments in one file, unless they are too many."""
        num_bytes = self._run.size_bytes(LEDGER_DIR)
        if num_bytes > MAX_LEDGER_BYTES:
            self._say(
                f"the ledger ({num_bytes / 1e6:.0f} MB) is too long to go to MLflow; it is in "
                f"{self._run.uri}/{LEDGER_DIR}"
            )
            return []
        packer, parts = zlib.compressobj(LEVEL, wbits=GZIP), []
        for name in segments(self._run):
            content = self._run.read(name)
            parts.append(packer.compress(content[: content.rfind(b"\n") + 1]))
        return [(LEDGER_ARTIFACT, b"".join(parts) + packer.flush())]


class ModelUpload:
    """The models of a run: the final one, and the best one where that is another."""

    def __init__(self, info: RunInfo, refusals: Refusals) -> None:
        self._info = info
        self._run: Storage = info.run
        self._refusals = refusals

    def deliver(
        self, store: ModelStore, tracked: Tracked, keep: Callable[[Tracked], None], *, step: int
    ) -> Tracked:
        """Stores what is packed and not there yet, and registers what the job asks for.

        Args:
            store: the run in MLflow.
            tracked: what is there.
            keep: notes what is there from then on, so that nothing is made twice.
            step: that the run ended at.

        Returns:
            What is there now, and whether something is lacking.
        """
        before = tracked
        files, refused = tracked.files, False
        ids = {MODEL_DIR: tracked.model_id, BEST_MODEL_DIR: tracked.best_model_id}
        for folder, known in ids.items():
            try:
                ids[folder], digest = self._delivered(store, folder, known, files, step)
            except SamestepError as error:
                self._refusals.tell(error)
                ids[folder], digest, refused = None, None, True
            files = {name: there for name, there in files.items() if name != folder}
            files |= {folder: digest} if digest else {}
        tracked = replace(
            tracked,
            files=files,
            model_id=ids[MODEL_DIR],
            best_model_id=ids[BEST_MODEL_DIR],
            lacks_end=tracked.lacks_end or refused,
        )
        chosen = tracked.best_model_id or tracked.model_id
        name = self._info.spec.tracking.registered_model
        # A model that was refused may be the one to choose.
        if chosen and name and chosen != tracked.registered and not refused:
            self._register(store, chosen, name)
            tracked = replace(tracked, registered=chosen)
        if tracked != before:
            keep(tracked)
        return tracked

    def _delivered(
        self,
        store: ModelStore,
        folder: str,
        model_id: str | None,
        files: Mapping[str, str],
        step: int,
    ) -> tuple[str | None, str | None]:
        """Id in MLflow of the model that is packed in a folder, and its digest."""
        names = self._run.walk(folder)
        if f"{folder}/{MODEL_FILE}" not in names:
            return None, None
        digest = hashlib.sha256(self._run.read(f"{folder}/{MODEL_FILE}")).hexdigest()
        if files.get(folder) == digest:
            return model_id, digest
        with scratch_folder("model") as temporary:
            for name in names:
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._run.read(name))
            made = store.create_model(folder, step, digest=digest)
            store.fill_model(made, temporary / folder)
        return made, digest

    def _register(self, store: ModelStore, model_id: str, name: str) -> None:
        """Tries it once: a registry that refuses now does so later."""
        alias = self._info.spec.tracking.alias
        try:
            version = store.register_model(model_id, name=name, alias=alias)
            self._info.say(
                f"MLflow: the model is version {version} of {name}, models:/{name}@{alias}"
            )
        except SamestepError as error:
            self._info.say(
                f"MLflow does not register the model as {name!r} ({error}); it is kept with the "
                "run. Set tracking.registered_model to another name, or to null"
            )
            logger.info("run=%s the model is not registered: %s", self._info.name, error)


class ArtifactStore(FileStore, ModelStore, Protocol):
    """What the upload of artifacts needs of it."""


class Upload:
    """All artifacts of a run, and when those that MLflow refused are offered again.

    Args:
        info: the run.
        clock: seconds since the epoch.
    """

    def __init__(self, info: RunInfo, clock: Callable[[], float]) -> None:
        refusals = Refusals(info)
        self._files = FileUpload(info, refusals)
        self._models = ModelUpload(info, refusals)
        self._clock = clock
        self._refused_s, self._pause_s = -math.inf, RETRY_S

    def is_overdue(self, tracked: Tracked) -> bool:
        """Whether artifacts are lacking, and to be offered now although nothing new is due."""
        # Once the run goes on, its ledger and its models wait for its next end.
        lacks = tracked.lacks_files or (tracked.lacks_end and tracked.status in ENDED)
        return lacks and not 0 <= self._clock() - self._refused_s < self._pause_s

    def deliver(
        self,
        store: ArtifactStore,
        tracked: Tracked,
        keep: Callable[[Tracked], None],
        *,
        end_step: int | None,
    ) -> Tracked:
        """Stores what is new, changed or lacking.

        Args:
            store: the run in MLflow.
            tracked: what is there.
            keep: as `ModelUpload.deliver` says.
            end_step: that the run ended at; None: it goes on.

        Returns:
            What is there now, and whether something is lacking.
        """
        started_s = self._clock()
        tracked = self._files.deliver(store, tracked, ended=end_step is not None)
        if end_step is not None:
            tracked = self._models.deliver(store, tracked, keep, step=end_step)
        if tracked.lacks_files or (end_step is not None and tracked.lacks_end):
            self._refused_s = self._clock()
            self._pause_s = max(RETRY_S, (self._refused_s - started_s) / MAX_SHARE)
        return tracked
