"""The ledger read as a queue: from a position on, line by line, while it is being written.

The ledger is the only copy of what waits to be delivered. A position names a line for good, since
a ledger only grows, and so tells across processes what was delivered and what was not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import LEDGER_DIR, LEDGER_SUFFIX
from samestep.telemetry.ledger import check_header, segments
from samestep.telemetry.records import STEP, EventRecord, StepRecord

CHUNK_BYTES: Final = 2**20

logger = logging.getLogger(__name__)

Record = StepRecord | EventRecord


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """A place between two lines of a ledger.

    Attributes:
        segment: number of the segment; 0 is the beginning.
        offset_bytes: bytes of it that are behind.
        num_lines: lines behind it in all segments, headers left out.
    """

    segment: int = 0
    offset_bytes: int = 0
    num_lines: int = field(default=0, compare=False)


START: Final = Position()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A record, and the position right after it."""

    record: Record
    position: Position


class Spool:
    """Reads a run's ledger onwards from a position; for one thread.

    Args:
        run: the run directory.
        position: where to begin.
        chunk_bytes: how much is read at a time.
    """

    def __init__(
        self, run: Storage, position: Position = START, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._run = run
        self._position = position
        self._chunk_bytes = chunk_bytes

    @property
    def position(self) -> Position:
        """Where the next line is read."""
        return self._position

    def seek(self, position: Position) -> None:
        """Goes on from another place."""
        self._position = position

    def read(self, max_lines: int) -> list[Line]:
        """The next lines, fewer only where the ledger ends; stays where it is.

        A line that a dying writer left unfinished is passed over once a later segment exists.

        Raises:
            StorageError: the ledger can't be read or is damaged.
        """
        # Listed before anything is read: a segment with a successor has got all of its lines.
        numbers = [_number(name) for name in segments(self._run)]
        lines: list[Line] = []
        position = self._position
        for number in numbers:
            if number < position.segment:
                continue
            if number > position.segment:
                num_lines = self._position.num_lines + len(lines)
                position = Position(segment=number, num_lines=num_lines)
            lines += self._of_segment(position, number == numbers[-1], max_lines - len(lines))
            if len(lines) == max_lines:
                break
        return lines

    def _of_segment(self, position: Position, is_last: bool, max_lines: int) -> list[Line]:
        name = f"{LEDGER_DIR}/{position.segment:08d}{LEDGER_SUFFIX}"
        place = f"{self._run.uri}/{name}"
        lines: list[Line] = []
        for text, behind_bytes, is_end in self._texts(name, position.offset_bytes):
            data = _parse(text)
            if data is None:
                if not is_end:
                    raise StorageError(
                        f"{place} is damaged before byte {behind_bytes}; restore the file from a "
                        "copy"
                    )
                if not is_last:
                    logger.warning("%s: its last line was cut off and is left out", place)
                break
            if behind_bytes == len(text) + 1:
                check_header(place, data)
            else:
                behind = Position(
                    segment=position.segment,
                    offset_bytes=behind_bytes,
                    num_lines=position.num_lines + len(lines) + 1,
                )
                lines.append(Line(record=_record(data), position=behind))
            if len(lines) == max_lines:
                break
        return lines

    def _texts(self, name: str, offset: int) -> Iterator[tuple[bytes, int, bool]]:
        """Whole lines, the bytes behind each, and whether the file ends there for now."""
        size = self._chunk_bytes
        while True:
            chunk = self._run.read_part(name, offset, size)
            at_end = len(chunk) < size
            whole, newline, rest = chunk.rpartition(b"\n")
            if newline:
                texts = whole.split(b"\n")
                for number, text in enumerate(texts, 1):
                    offset += len(text) + 1
                    is_end = at_end and not rest and number == len(texts)
                    yield text, offset, is_end
            elif not at_end:
                size *= 2  # a line that is longer than the chunk
            if at_end:
                return


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "type" in data else None


def _record(data: Mapping[str, Any]) -> Record:
    if data["type"] == STEP:
        return StepRecord.from_json(data)
    return EventRecord.from_json(data)


def _number(name: str) -> int:
    return int(name.rpartition("/")[2].removesuffix(LEDGER_SUFFIX))
