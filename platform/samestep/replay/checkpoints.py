"""The checkpoints of a run as they lie on storage, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from samestep import names
from samestep.checkpoint.committed import CheckpointInfo, best_of, list_checkpoints
from samestep.checkpoint.manifest import step_name
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.verified import verify_folder
from samestep.errors import CheckpointError
from samestep.telemetry.lease import holder

Status = Literal["whole", "damaged", "unfinished", "being written", "set aside"]


@dataclass(frozen=True, kw_only=True)
class CheckpointLine:
    """One checkpoint of a listing.

    Attributes:
        step: steps taken before it; None where the name of its folder does not tell.
        status: whole: its manifest is there (and, when verified, fits every byte); unfinished: it
            has none, and nobody writes it any more; being written: a live run may; set aside:
            a resume found it damaged and kept it as evidence.
        is_latest: the newest whole one.
        is_best: the best by what the run ranks by.
        num_bytes: size of its files.
        created_s: Unix time; None where there is no manifest that can be read.
        uri: its folder.
        reason: what is wrong with a damaged one.
    """

    step: int | None
    status: Status
    num_bytes: int
    created_s: float | None
    uri: str
    is_latest: bool = False
    is_best: bool = False
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def checkpoint_lines(run: Storage, *, verify: bool) -> list[CheckpointLine]:
    """All checkpoints of a run by step, then those that were set aside.

    Args:
        run: the run directory.
        verify: hash every file of the whole ones, and compare.

    Raises:
        StorageError: storage can't be read.
    """
    present = holder(run)
    is_alive = present is not None and present.alive
    found = list_checkpoints(run)
    newest = max((info.step for info in found if info.whole), default=-1)
    lines = []
    for info in found:
        line = _line(info, is_written=is_alive and info.step > newest)
        lines.append(_verified(run, line) if verify and line.status == "whole" else line)
    whole = [line.step for line in lines if line.status == "whole"]
    best = best_of([info for info in found if info.step in whole])
    lines = [
        replace(
            line,
            is_latest=line.status == "whole" and line.step == whole[-1],
            is_best=best is not None and line.step == best.step,
        )
        for line in lines
    ]
    return [*lines, *_set_aside(run)]


def _line(info: CheckpointInfo, *, is_written: bool) -> CheckpointLine:
    status: Status = "being written" if is_written else "unfinished"
    reason = ""
    if info.whole:
        status = "whole" if info.created_s is not None else "damaged"
        reason = "" if info.created_s is not None else f"{names.MANIFEST_FILE} can't be read"
    return CheckpointLine(
        step=info.step,
        status=status,
        num_bytes=info.num_bytes,
        created_s=info.created_s,
        uri=info.uri,
        reason=reason,
    )


def _verified(run: Storage, line: CheckpointLine) -> CheckpointLine:
    assert line.step is not None, "only those set aside may have a name without a step"
    folder = run.child(names.CHECKPOINTS_DIR).child(step_name(line.step))
    try:
        verify_folder(folder, line.step)
    except CheckpointError as error:
        return replace(line, status="damaged", reason=str(error))
    return line


def _set_aside(run: Storage) -> Iterator[CheckpointLine]:
    aside = run.child(names.CHECKPOINTS_DIR).child(names.DAMAGED_DIR)
    for name in aside.list():
        text = name.removeprefix(names.CHECKPOINT_PREFIX).partition("-")[0]
        yield CheckpointLine(
            step=int(text) if text.isdigit() else None,
            status="set aside",
            num_bytes=aside.size_bytes(name),
            created_s=None,
            uri=aside.child(name).uri,
        )
