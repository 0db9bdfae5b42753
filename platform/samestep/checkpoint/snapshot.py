"""A state in a node's shared memory that outlives the workers which put it there.

An image holds the tensors; a header beside it, written when the image is complete and taken away
before it is overwritten, holds everything else and a digest. No header, no snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from samestep.checkpoint.image import Image, Plan, Slot
from samestep.checkpoint.layout import Layout
from samestep.checkpoint.shared_memory import folder_of
from samestep.checkpoint.state import State, unflatten
from samestep.checkpoint.strict_json import parse_json
from samestep.errors import CheckpointError, StorageError
from samestep.exact.digest import layout_header

logger = logging.getLogger(__name__)

FORMAT: Final = 1
NUM_IMAGES: Final = 3
"""Most images of a run on a node: one that a checkpoint is written from, and two for snapshots, of
which one is whole while the other is filled."""
HEADER_SUFFIX: Final = ".json"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A snapshot that verified.

    Attributes:
        state: in new tensors on the CPU.
        records: ledger records of the steps before it which the recorder had not acknowledged.
        attempt: that it was taken in.
    """

    attempt: int
    state: State
    records: list[dict[str, Any]]


def image_path(folder: Path, attempt: int, name: str) -> Path:
    """The file of an image.

    It carries the attempt: a worker that was cut off may go on writing into those of its own.
    """
    return folder / f"{attempt:06d}-{name}"


def write_header(
    image: Image,
    plan: Plan,
    *,
    step: int,
    values_json: str,
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Makes a complete image a snapshot.

    Raises:
        StorageError: there is no room for the header.
    """
    assert image.path is not None, "a private image outlives nobody"
    header = {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "num_bytes": plan.num_bytes,
        "digest": image_digest(image, plan),
        "slots": {name: asdict(slot) for name, slot in plan.slots.items()},
        "values": values_json,
        "records": [dict(record) for record in records],
    }
    path = _header_of(image.path)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(header), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"can't write {path} in shared memory: {error.strerror}") from error


def drop_header(path: Path) -> None:
    """An image is about to be overwritten: it is no snapshot from now on."""
    _header_of(path).unlink(missing_ok=True)


def newest(run_uri: str) -> int | None:
    """Steps taken before the newest snapshot of a run on this node; not verified."""
    found = _headers(run_uri)
    return max(found) if found else None


def steps(run_uri: str) -> list[int]:
    """Of all snapshots of a run on this node, the newest first; not verified."""
    return sorted(_headers(run_uri), reverse=True)


def load(run_uri: str, step: int) -> Loaded:
    """The snapshot after `step` steps, verified by its digest.

    Raises:
        CheckpointError: there is none, or its image is not what its header says.
    """
    path = _headers(run_uri).get(step)
    if path is None:
        raise CheckpointError(f"no snapshot of step {step} in {folder_of(run_uri)}")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        image = Image.existing(path.with_suffix(""))
        slots = {name: _slot(data) for name, data in header["slots"].items()}
        plan = Plan(slots=slots, num_bytes=int(header["num_bytes"]))
        if len(image.data) < plan.num_bytes or image_digest(image, plan) != header["digest"]:
            raise CheckpointError("its image does not fit its digest")
        tensors = {name: image.tensor(slot) for name, slot in slots.items()}
        state = unflatten(step, tensors, parse_json(header["values"]))
        attempt = int(path.name.partition("-")[0])
        return Loaded(attempt=attempt, state=state, records=list(header["records"]))
    except (OSError, StorageError, CheckpointError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the snapshot {path} can't be used: {error}") from error


def begin_attempt(run_uri: str, attempt: int) -> None:
    """Gives back what a run holds on this node, but for the newest snapshot of another attempt.

    What bears this attempt's number already is of a run of that name which was started over.
    """
    for path in folder_of(run_uri).glob(f"{attempt:06d}-*"):
        path.unlink(missing_ok=True)
    step = newest(run_uri)
    kept = _headers(run_uri)[step] if step is not None else None
    for path in _of_others(run_uri, attempt):
        if kept is None or path not in (kept, kept.with_suffix("")):
            path.unlink(missing_ok=True)


def drop_others(run_uri: str, attempt: int) -> None:
    """Gives back what earlier attempts hold on this node: there is a newer snapshot."""
    for path in _of_others(run_uri, attempt):
        path.unlink(missing_ok=True)


def image_digest(image: Image, plan: Plan) -> str:
    """What `live_digest` gives for the tensors in an image, whoever put them there."""
    digest = xxhash.xxh3_128()
    for name, slot in plan.slots.items():
        digest.update(layout_header(name, slot.layout.dtype, slot.layout.shape).encode("ascii"))
        image.feed(digest, slot.offset, slot.num_bytes)
    return digest.hexdigest()


def _header_of(path: Path) -> Path:
    return path.with_name(path.name + HEADER_SUFFIX)


def _headers(run_uri: str) -> dict[int, Path]:
    """Headers by step; of one step the latest attempt's."""
    found: dict[int, Path] = {}
    for path in sorted(folder_of(run_uri).glob(f"*{HEADER_SUFFIX}")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] == FORMAT:
                found[int(data["step"])] = path
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the snapshot's header %s can't be read: %r", path, error)
    return found


def _of_others(run_uri: str, attempt: int) -> list[Path]:
    own = f"{attempt:06d}-"
    return [path for path in folder_of(run_uri).glob("*") if not path.name.startswith(own)]


def _slot(data: Mapping[str, Any]) -> Slot:
    layout = data["layout"]
    return Slot(
        layout=Layout(
            dtype=layout["dtype"],
            shape=tuple(layout["shape"]),
            strides=tuple(layout["strides"]),
        ),
        offset=int(data["offset"]),
        num_bytes=int(data["num_bytes"]),
        can_cut=bool(data["can_cut"]),
    )
