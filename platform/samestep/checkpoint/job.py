"""A piece of work of a writer: files made out of an image's bytes, hashed on the way to storage.

Plain data, so that it can go to another process; it knows no torch, which that process would
load for nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from samestep.checkpoint.storage import Storage

CHUNK_BYTES: Final = 1 << 20
SHARE: Final = 0.03
"""Of its time that a thread of a writer computes while it rests: the training beside it needs the
processors' caches and memory, whatever the priorities."""
LEAST_S: Final = 0.0005
"""Shorter work is not rested after."""
THREAD_DIGEST: Final = "samestep-digest"

Segment = tuple[int, int]
"""Offset in the image and size, in bytes."""


@dataclass(frozen=True, kw_only=True)
class FileJob:
    """A file to be written: `head` (a character a byte), then segments of the image."""

    name: str
    head: str
    segments: list[Segment] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DigestJob:
    """What the SHA-256 of a whole state goes over: headers and segments in turn, then `tail`."""

    items: list[tuple[str, int, int]]
    tail: str


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """What a writer does at once.

    Attributes:
        folder_uri: where the files go.
        image: path of the image; None where the writer is given the bytes.
        files: what to write.
        digest: what to hash beside; None: nothing.
        patience_s: for so long it may rest, to leave the machine to the training.
    """

    folder_uri: str
    image: str | None
    files: list[FileJob]
    digest: DigestJob | None = None
    patience_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WriteJob:
        """Inverse of `to_json`."""
        digest = data["digest"]
        return cls(
            folder_uri=data["folder_uri"],
            image=data["image"],
            files=[FileJob(**file) for file in data["files"]],
            digest=DigestJob(**digest) if digest is not None else None,
            patience_s=data["patience_s"],
        )


@dataclass(frozen=True, kw_only=True)
class Written:
    """What came of a job.

    Attributes:
        files: by name, `num_bytes` and `sha256` (hex) of what was handed to storage.
        digest: SHA-256 (hex) of the whole state; None where none was asked for.
        num_rests: how often the work rested, to leave the machine to the training.
    """

    files: dict[str, dict[str, Any]]
    digest: str | None = None
    num_rests: int = 0


class _Pace:
    """Rests for one thread, between pieces of its work.

    Args:
        hurried: when set, no rests any more; None: none at all.
        patience_s: nor any after so many seconds.

    Attributes:
        num_rests: rests so far.
    """

    def __init__(self, hurried: threading.Event | None, patience_s: float) -> None:
        self._hurried = hurried
        self._until_s = time.monotonic() + patience_s
        self._computed_s = time.thread_time()  # waiting for storage is rest as well
        self.num_rests = 0

    def rest(self) -> None:
        """To be called after each piece."""
        left_s = self._until_s - time.monotonic()
        if self._hurried is None or self._hurried.is_set() or left_s <= 0:
            return
        spent_s = time.thread_time() - self._computed_s
        if spent_s > LEAST_S:
            self.num_rests += 1
            self._hurried.wait(min(spent_s * (1 / SHARE - 1), left_s))
            self._computed_s = time.thread_time()


def perform(
    job: WriteJob,
    data: memoryview,
    folder: Storage | None = None,
    *,
    hurried: threading.Event | None = None,
) -> Written:
    """Writes the files and hashes.

    Args:
        job: what to do.
        data: the image's bytes; they must not change meanwhile.
        folder: where the files go, if not to the job's URI.
        hurried: when set, the job's patience is over; None: it has none.

    Raises:
        StorageError: a file can't be written; those before it may be there.
    """
    folder = folder or Storage.at(job.folder_uri)
    found: list[str] = []
    beside, paces = None, [_Pace(hurried, job.patience_s)]
    if job.digest is not None:
        wanted = job.digest

        def hash_it() -> None:
            paces.append(_Pace(hurried, job.patience_s))
            found.append(_digest(wanted, data, paces[1]))

        beside = threading.Thread(
            target=hash_it,
            name=THREAD_DIGEST,
            daemon=True,
        )
        beside.start()
    try:
        files = {file.name: _write(folder, file, data, paces[0]) for file in job.files}
    except BaseException:
        if hurried is not None:
            hurried.set()  # what is hashed beside is of no use any more
        raise
    finally:
        if beside is not None:
            beside.join()  # it computes, and waits for nothing but its rests
    return Written(
        files=files,
        digest=found[0] if found else None,
        num_rests=sum(pace.num_rests for pace in paces),
    )


def _write(folder: Storage, file: FileJob, data: memoryview, pace: _Pace) -> dict[str, Any]:
    digest, num_bytes = hashlib.sha256(), 0

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal num_bytes
        for chunk in _chunks(file.head.encode("latin-1"), file.segments, data):
            digest.update(chunk)
            num_bytes += len(chunk)
            yield chunk
            pace.rest()

    folder.write_chunks(file.name, chunks())
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _chunks(
    head: bytes, segments: Sequence[Segment], data: memoryview
) -> Iterator[bytes | memoryview]:
    yield head
    for start, size in segments:
        for at in range(start, start + size, CHUNK_BYTES):
            yield data[at : min(at + CHUNK_BYTES, start + size)]


def _digest(job: DigestJob, data: memoryview, pace: _Pace) -> str:
    digest = hashlib.sha256()
    for header, start, size in job.items:
        for chunk in _chunks(header.encode("ascii"), [(start, size)], data):
            digest.update(chunk)
            pace.rest()
    digest.update(job.tail.encode("utf-8"))
    return digest.hexdigest()
