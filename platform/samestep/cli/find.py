"""What a RUN argument means: a path or URI of a run directory, or a name under ./runs."""

from __future__ import annotations

from pathlib import Path

from samestep.checkpoint.storage import Storage
from samestep.cli.settle import remember
from samestep.errors import InputError
from samestep.names import MANIFEST_FILE, SPEC_FILE
from samestep.spec import RUN_NAME

RUNS = "runs"


def find_run(text: str) -> Storage:
    """The run directory that is meant.

    Raises:
        InputError: there is none; says where was looked, and which runs there are.
        StorageError: storage can't be reached.
    """
    return _find(text, (SPEC_FILE,), "run directory")


def find_run_or_checkpoint(text: str) -> Storage:
    """A run directory, or the folder of a checkpoint.

    Raises:
        InputError: there is neither.
        StorageError: storage can't be reached.
    """
    return _find(text, (SPEC_FILE, MANIFEST_FILE), "run directory or checkpoint")


def _find(text: str, marks: tuple[str, ...], what: str) -> Storage:
    places = [text]
    if RUN_NAME.fullmatch(text):
        places.append(f"{RUNS}/{text}")
    looked = []
    for place in places:
        storage = Storage.at(place)
        if any(storage.exists(mark) for mark in marks):
            remember(storage)
            return storage
        looked.append(storage.uri)
    raise InputError(
        f"no {what} {text!r}; looked in {', '.join(looked)}. Runs in ./{RUNS}: "
        + (", ".join(_names()) or "none")
    )


def _names() -> list[str]:
    return sorted(path.parent.name for path in Path(RUNS).glob(f"*/{SPEC_FILE}"))
