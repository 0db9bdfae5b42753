"""Ledger records that wait for the recorder, in order: what memory can't hold lies in files.

The files are anonymous, in the node's temporary folder: whatever ends the process, they are gone.
Putting a record in waits for nobody; no record is ever dropped.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import IO, Any, Final

from samestep.errors import RecorderError

IN_MEMORY: Final = 10_000
MAX_BYTES: Final = 1 << 30
CHUNK_BYTES: Final = 16 << 20

Waiting = Mapping[str, Any] | bytes
"""A record; from a file as its line, decoded by whoever wants it."""


class RecordQueue:
    """First in, first out; not for several threads at a time.

    The oldest records are in memory, newer ones in chunks of a bounded size, each a file that is
    taken back whole when all before it have gone, and then removed.

    Args:
        in_memory: records that are kept in memory; as many as a chunk holds come back at a time.
        max_bytes: what the files may hold; None: the disk alone is a limit.
        chunk_bytes: size of a file.
    """

    def __init__(
        self,
        *,
        in_memory: int = IN_MEMORY,
        max_bytes: int | None = MAX_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._in_memory = in_memory
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._head: deque[Waiting] = deque()
        self._chunks: deque[IO[bytes]] = deque()
        self._num_spooled = self._spooled_bytes = 0
        # Files close with the queue: whoever still reads it is the last that needs them.
        weakref.finalize(self, _close, self._chunks)

    def __len__(self) -> int:
        return len(self._head) + self._num_spooled

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """All records in order; nothing may be put in or dropped meanwhile."""
        yield from map(decoded, self._head)
        for chunk in self._chunks:
            yield from map(decoded, _lines(chunk))

    @property
    def spooled_bytes(self) -> int:
        """What lies in files."""
        return self._spooled_bytes

    def append(self, record: Mapping[str, Any]) -> None:
        """Puts a record in.

        Raises:
            RecorderError: there is no room for it on the disk; it is not in.
        """
        if not self._chunks and len(self._head) < self._in_memory:
            self._head.append(record)
            return
        line = json.dumps(record).encode("ascii") + b"\n"
        if self._max_bytes is not None and self._spooled_bytes + len(line) > self._max_bytes:
            raise self._full(f"more than {self._max_bytes} bytes are not kept")
        try:
            if not self._chunks or self._chunks[-1].tell() >= self._chunk_bytes:
                self._chunks.append(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
            _write(self._chunks[-1], line)
        except OSError as error:
            raise self._full(str(error)) from error
        self._num_spooled += 1
        self._spooled_bytes += len(line)

    def oldest(self, size: int) -> list[Waiting]:
        """The oldest records, at most `size` and at least one where there is any; they stay in."""
        return list(islice(self._head, size))

    def drop(self, size: int) -> None:
        """Lets the oldest `size` records go, or all where there are fewer."""
        while size > 0 and self._head:
            self._head.popleft()
            size -= 1
            if not self._head and self._chunks:
                self._take_back()

    def clear(self) -> None:
        """Lets all records go."""
        self._head.clear()
        _close(self._chunks)
        self._num_spooled = self._spooled_bytes = 0

    def _take_back(self) -> None:
        with self._chunks.popleft() as chunk:
            self._head.extend(_lines(chunk))
            self._num_spooled -= len(self._head)
            self._spooled_bytes -= chunk.tell()

    def _full(self, why: str) -> RecorderError:
        return RecorderError(
            f"{len(self)} records wait for the recorder, {self._spooled_bytes} bytes of them in "
            f"{tempfile.gettempdir()}: {why}"
        )


def decoded(waiting: Waiting) -> Mapping[str, Any]:
    """The record itself."""
    if isinstance(waiting, bytes):
        record: dict[str, Any] = json.loads(waiting)
        return record
    return waiting


def _write(chunk: IO[bytes], line: bytes) -> None:
    """Adds a line, or nothing of it."""
    size = chunk.tell()
    try:
        if chunk.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        chunk.truncate(size)
        chunk.seek(size)
        raise


def _lines(chunk: IO[bytes]) -> list[bytes]:
    """All lines of a chunk, which is at its end afterwards, as before."""
    chunk.seek(0)
    return chunk.read().splitlines()


def _close(chunks: deque[IO[bytes]]) -> None:
    while chunks:
        chunks.popleft().close()
