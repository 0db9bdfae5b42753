"""The runs of a storage folder, a line each."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import SamestepError, StorageError
from samestep.names import SPEC_FILE
from samestep.replay.summary import plain, summarize

UNREADABLE: Final = "unreadable"
NUM_TRIES: Final = 5


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """A run at a glance.

    Attributes:
        name: of the run: that of its directory.
        uri: the run directory.
        status: as `samestep show` has it; or unreadable.
        alive: somebody holds its lease.
        steps: steps taken.
        total_steps: steps it was to take; None when it never said.
        loss: of the last step.
        evaluation: metrics of the last evaluation, empty without one.
        best: the best checkpoint: `step`, `metric`, `order` and `score`; None without a ranking.
        started_s: Unix time of its first attempt; None before that.
        num_bytes: size of all its files; None where they came and went too fast to tell.
        message: why it failed, or can't be read.
    """

    name: str
    uri: str
    status: str
    alive: bool = False
    steps: int = 0
    total_steps: int | None = None
    loss: float | None = None
    evaluation: dict[str, float]
    best: dict[str, Any] | None = None
    started_s: float | None = None
    num_bytes: int | None
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; a float that JSON can't hold becomes its name."""
        data = plain(asdict(self))
        assert isinstance(data, dict)
        return data


def list_runs(storage: Storage) -> list[RunLine]:
    """Every run directly inside a folder: in the order of starting, those that did not last.

    One that can't be read gets a line that says so, and does not keep the others from being seen.

    Raises:
        StorageError: the folder itself can't be read.
    """
    found = [_line(storage, name) for name in storage.list() if _is_run(storage, name)]
    return sorted(found, key=lambda line: (line.started_s or math.inf, line.name))


def _is_run(storage: Storage, name: str) -> bool:
    return storage.exists(f"{name}/{SPEC_FILE}")


def _line(storage: Storage, name: str) -> RunLine:
    run = storage.child(name)
    num_bytes = _size_bytes(run)
    try:
        summary = summarize(run)
    except SamestepError as error:
        message = (str(error).splitlines() or [""])[0]
        return RunLine(
            name=name,
            uri=run.uri,
            status=UNREADABLE,
            evaluation={},
            num_bytes=num_bytes,
            message=message,
        )
    return RunLine(
        name=name,
        uri=run.uri,
        status=summary.status,
        alive=summary.holder is not None,
        steps=summary.num_steps,
        total_steps=summary.total_steps,
        loss=summary.last.loss if summary.last else None,
        evaluation=dict((summary.evaluation or {}).get("metrics", {})),
        best=summary.best_as_json(),
        started_s=summary.attempts[0].started_at if summary.attempts else None,
        num_bytes=num_bytes,
        message=str((summary.result or {}).get("message") or ""),
    )


def _size_bytes(run: Storage) -> int | None:
    """A live run's files are replaced and deleted while they are counted."""
    for _ in range(NUM_TRIES):
        try:
            return run.size_bytes()
        except StorageError:
            continue
    return None
