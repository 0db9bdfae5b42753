"""The append-only record of a run: JSON lines in numbered segments.

`ledger/00000001.jsonl`, ... Each writer opens a segment of its own after the highest one, so a
line that a dying writer left half-written is always the last of its segment. On storage that
can't append, every append is a segment. The first line of a segment says its format. A step may
have two lines, when it was taken again under other numerics: the later one counts. A rollback takes
back the lines before it of all steps but the first so many: what comes behind it counts instead.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import LEDGER_DIR, LEDGER_SUFFIX, Event
from samestep.telemetry.records import EVENT, KINDS, STEP, EventRecord, StepRecord, malformed

FORMAT: Final = 1
HEADER: Final = "ledger"
MAX_SEGMENT_BYTES: Final = 32 * 2**20
"""A longer segment is followed by a new one: readers hold one at a time in memory."""

TAKEN_BACK: Final = (Event.EVALUATION, Event.CHECKPOINT_COMMITTED)
"""Events about a state: with its steps they are taken back by a rollback."""

RESTORE: Final = "restore the file from a copy, or start the run over under another name"

logger = logging.getLogger(__name__)


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One line of a segment, newline included."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def segments(run: Storage) -> list[str]:
    """Names of the segments inside the run directory, in order."""
    if not run.exists(LEDGER_DIR):
        return []
    found = []
    for name in run.list(LEDGER_DIR):
        stem = name.removesuffix(LEDGER_SUFFIX)
        if name.endswith(LEDGER_SUFFIX) and stem.isdigit():
            found.append((int(stem), f"{LEDGER_DIR}/{name}"))
    return [name for _, name in sorted(found)]


class LedgerWriter:
    """Appends to a run's ledger; not safe for threads: its recorder calls it under a lock.

    The segment is opened by the first append, so that looking at a run leaves no trace.
    """

    def __init__(self, run: Storage, *, run_name: str = "") -> None:
        self._run = run
        self._run_name = run_name
        self._segment: str | None = None
        self._segment_bytes = 0

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; they are flushed to the operating system (or stored) on return.

        Raises:
            StorageError: some of the lines, or a part of one, may have been written. The next
                append opens a new segment; read the ledger again before repeating anything.
        """
        if not records:
            return
        lines = b"".join(encode_line(record) for record in records)
        if not self._run.is_local:
            self._open(lines)
            return
        if self._segment is None or self._segment_bytes > MAX_SEGMENT_BYTES:
            self._segment, self._segment_bytes = self._open(b""), 0
        try:
            self._run.append(self._segment, lines)
        except BaseException:
            self._segment = None
            raise
        self._segment_bytes += len(lines)

    def _open(self, lines: bytes) -> str:
        existing = segments(self._run)
        number = int(_stem(existing[-1])) + 1 if existing else 1
        while True:
            name = f"{LEDGER_DIR}/{number:08d}{LEDGER_SUFFIX}"
            header = {"type": HEADER, "format": FORMAT, "run": self._run_name, "segment": number}
            if self._run.create_exclusive(name, encode_line(header) + lines):
                return name
            number += 1


def read_ledger(
    run: Storage,
    from_step: int = 0,
    *,
    on_torn: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the lines in the order of writing, headers left out, those taken back included.

    Args:
        run: the run directory.
        from_step: leave out the lines of earlier steps, but for rollbacks.
        on_torn: told of each segment whose last line is cut off; default: a log line.

    Raises:
        StorageError: a segment has another format version, is damaged before its last line, or
            leaves out a step; names the file and the line.
    """
    report = on_torn or _log_torn
    num_steps = 0
    for name in segments(run):
        for number, record in _segment_lines(run, name, report):
            if record["type"] == STEP:
                if record["step"] > num_steps:
                    raise StorageError(
                        f"{run.uri}/{name} is damaged before line {number}: it has step "
                        f"{record['step']}, but no line has step {num_steps}; {RESTORE}"
                    )
                num_steps = max(num_steps, record["step"] + 1)
            stay = stays_after(record)
            if stay is not None:
                num_steps = min(num_steps, stay)
            if stay is not None or record["step"] >= from_step:
                yield record


def lines_around(run: Storage, incident_id: str, *, from_step: int) -> list[dict[str, Any]]:
    """The lines from a step on, in the order of writing, as they were at an incident.

    For looking at the end of a long ledger while it is written: it is read from its end. A line
    that is not whole is passed over; so is what followed once the run had gone back behind the
    incident, and steps that had been taken back before it.
    """
    found: list[dict[str, Any]] = []
    stay: int | None = None
    is_before = False
    for line in from_the_end(run):
        left = stays_after(line)
        if left is not None and not is_before:
            found.clear()
        elif left is not None:
            stay = left if stay is None else min(stay, left)
        if line["type"] == STEP and stay is not None and line["step"] >= stay:
            continue
        if line["step"] >= from_step:
            found.append(line)
        elif line["type"] == STEP and is_before:
            break
        is_before = is_before or _is_of(line, incident_id)
    return found[::-1]


def _is_of(line: Mapping[str, Any], incident_id: str) -> bool:
    is_one = line["type"] == EVENT and line["event"] == Event.INCIDENT
    return is_one and bool(line["fields"].get("id") == incident_id)


def from_the_end(run: Storage) -> Iterator[dict[str, Any]]:
    """The lines that are whole, the last one first: for looking at the end of a long ledger."""
    for name in reversed(segments(run)):
        content = run.read(name)
        end = content.rfind(b"\n") + 1
        while end > 0:
            start = content.rfind(b"\n", 0, end - 1) + 1
            try:
                line = json.loads(content[start:end])
            except ValueError:
                line = {}
            if line.get("type") in KINDS and not malformed(line):
                yield line
            end = start


def stays_after(line: Mapping[str, Any]) -> int | None:
    """How many steps are left by a line that is a rollback; None for any other line."""
    if line["type"] == EVENT and line["event"] == Event.ROLLED_BACK:
        return int(line["step"])
    return None


def steps(run: Storage, from_step: int = 0) -> dict[int, StepRecord]:
    """The step records by step, each in its last version, in order of steps."""
    found: dict[int, dict[str, Any]] = {}
    for data in read_ledger(run, from_step):
        if data["type"] == STEP:
            found[int(data["step"])] = data
        stay = stays_after(data)
        if stay is not None:
            found = {step: line for step, line in found.items() if step < stay}
    return {step: StepRecord.from_json(found[step]) for step in sorted(found)}


def events(run: Storage, kind: Event | None = None) -> list[EventRecord]:
    """The event records in the order of writing; only those of one kind if it is given.

    Evaluations and checkpoints of steps that were taken back are left out.
    """
    found: list[EventRecord] = []
    for data in read_ledger(run):
        if data["type"] != EVENT:
            continue
        stay = stays_after(data)
        if stay is not None:
            found = [each for each in found if each.event not in TAKEN_BACK or each.step <= stay]
        if kind is None or data["event"] == kind:
            found.append(EventRecord.from_json(data))
    return found


def _segment_lines(
    run: Storage, name: str, report: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    content = run.read(name)
    lines = io.BytesIO(content)
    for number, line in enumerate(lines, start=1):
        last = lines.tell() == len(content)
        if last and not line.endswith(b"\n"):
            report(f"{run.uri}/{name}: its last line ({len(line)} bytes) was cut off")
            return
        try:
            data = json.loads(line)
            kind = data["type"]
        except (ValueError, KeyError, TypeError) as error:
            if last and number > 1:
                report(f"{run.uri}/{name}: its last line ({len(line)} bytes) is not whole")
                return
            raise StorageError(
                f"{run.uri}/{name} is damaged at line {number} ({error!r}); {RESTORE}"
            ) from error
        if number == 1:
            check_header(f"{run.uri}/{name}", data)
            continue
        if kind not in KINDS:
            raise StorageError(f"{run.uri}/{name}: line {number} is of an unknown type {kind!r}")
        problem = malformed(data)
        if problem:
            raise StorageError(
                f"{run.uri}/{name} is damaged at line {number} ({problem}); {RESTORE}"
            )
        yield number, data


def check_header(name: str, data: Mapping[str, Any]) -> None:
    """Looks at the first line of a segment.

    Raises:
        StorageError: it is none, or of another format version.
    """
    version = data.get("format")
    if data["type"] != HEADER or version != FORMAT:
        raise StorageError(
            f"{name} has ledger format {version!r}; this samestep reads format {FORMAT}: use the "
            "version that wrote it"
        )


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(LEDGER_SUFFIX)


def _log_torn(text: str) -> None:
    logger.warning("%s; the lines before it are used", text)
