"""Takes a run's packed models to MLflow, and one of them into its registry."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError
from samestep.names import BEST_MODEL_DIR, MODEL_DIR
from samestep.telemetry.sink import RunInfo
from samestep.telemetry.tracking_file import Tracked

MODEL_FILE: Final = "MLmodel"
"""Written last: a folder without it is no packed model."""

logger = logging.getLogger(__name__)


class ModelStore(Protocol):
    """What an upload needs of `mlflow_client.MlflowRun`."""

    def create_model(self, name: str, step: int) -> str:
        """Makes room for a model; returns its id."""

    def fill_model(self, model_id: str, folder: Path) -> None:
        """Stores a model's files."""

    def register_model(self, model_id: str, *, name: str, alias: str) -> str:
        """Makes it a version of a registered model; returns which."""


class ModelUpload:
    """The models of a run: the final one, and the best one where that is another.

    Args:
        info: the run.
        warn: told why MLflow does not take a model.
    """

    def __init__(self, info: RunInfo, *, warn: Callable[[SamestepError], None]) -> None:
        self._info = info
        self._run: Storage = info.run
        self._warn = warn

    def deliver(
        self, store: ModelStore, tracked: Tracked, keep: Callable[[Tracked], None]
    ) -> Tracked:
        """Stores what is packed and not there yet, and registers what the job asks for.

        Args:
            store: the run in MLflow.
            tracked: what is there.
            keep: notes what is there from then on, so that nothing is made twice.

        Returns:
            What is there now.
        """
        before = tracked
        final_id, files = self._delivered(store, MODEL_DIR, tracked.model_id, tracked)
        tracked = replace(tracked, model_id=final_id, files=files)
        best_id, files = self._delivered(store, BEST_MODEL_DIR, tracked.best_model_id, tracked)
        tracked = replace(tracked, best_model_id=best_id, files=files)
        chosen = best_id or final_id
        name = self._info.spec.tracking.registered_model
        if chosen is not None and name is not None and chosen != tracked.registered:
            self._register(store, chosen, name)
            tracked = replace(tracked, registered=chosen)
        if tracked != before:
            keep(tracked)
        return tracked

    def _delivered(
        self, store: ModelStore, folder: str, model_id: str | None, tracked: Tracked
    ) -> tuple[str | None, dict[str, str]]:
        """Id in MLflow of the model that is packed in a folder, and what is there then."""
        names = self._run.walk(folder)
        files = {name: digest for name, digest in tracked.files.items() if name != folder}
        if f"{folder}/{MODEL_FILE}" not in names:
            return None, files
        digest = hashlib.sha256(self._run.read(f"{folder}/{MODEL_FILE}")).hexdigest()
        if tracked.files.get(folder) == digest:
            return model_id, tracked.files
        try:
            with tempfile.TemporaryDirectory(prefix="samestep-") as temporary:
                for name in names:
                    path = Path(temporary, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._run.read(name))
                made = store.create_model(folder, tracked.next_step)
                store.fill_model(made, Path(temporary, folder))
        except SamestepError as error:
            self._warn(error)
            return None, files
        return made, {**files, folder: digest}

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
