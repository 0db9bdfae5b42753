"""What a worker prints and logs, kept with the run.

`<run>/logs/attempt-00001/worker-0.log` gets every line of the worker's `sys.stdout` and
`sys.stderr`, and the records of Python's logging. The streams go on to where they went before.
Where storage is an object store the file is a temporary one, and is copied there when the attempt
ends: of a worker that is killed nothing is left then. Losing a line never stops a training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, cast

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import ATTEMPT_PREFIX, LOG_SUFFIX, LOGS_DIR, OUTPUTS_DIR, WORKER_PREFIX
from samestep.scratch import scratch_folder

# Kept of a file that goes to an object store, which takes it in one piece.
MAX_UPLOAD_BYTES: Final = 64 << 20
# A line without an end (a progress bar) is written out at this length.
MAX_LINE: Final = 1 << 16
STAMP: Final = "%Y-%m-%d %H:%M:%S"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerFiles:
    """What a worker may write beside the run's own files.

    Attributes:
        output_folder: for files of the workload's own; made by whoever needs it.
        note: adds a line to this worker's log alone, not to what it prints.
    """

    output_folder: Path
    note: Callable[[str], None]


def log_name(attempt: int, world_rank: int) -> str:
    """Name of a worker's log inside the run directory."""
    return f"{LOGS_DIR}/{ATTEMPT_PREFIX}{attempt:05d}/{WORKER_PREFIX}{world_rank}{LOG_SUFFIX}"


def output_name(world_rank: int) -> str:
    """Name of the folder for a worker's own files inside the run directory."""
    return f"{OUTPUTS_DIR}/{WORKER_PREFIX}{world_rank}"


@contextmanager
def worker_files(run: Storage, *, attempt: int, world_rank: int) -> Iterator[WorkerFiles]:
    """Keeps what this process prints and logs meanwhile, and the files of its output folder.

    Args:
        run: the run directory.
        attempt: the attempt that is about to begin; a restart that fails before it begins one
            writes to the same file.
        world_rank: of this worker.
    """
    names = log_name(attempt, world_rank), output_name(world_rank)
    here = run.local_path
    if here is not None:
        with _copied_to(here / names[0]) as note:
            yield WorkerFiles(output_folder=here / names[1], note=note)
        return
    with scratch_folder("worker") as folder:
        log, outputs = folder / "log", folder / "outputs"
        try:
            with _copied_to(log) as note:
                yield WorkerFiles(output_folder=outputs, note=note)
        finally:
            _upload(run, log, names[0])
            for path in sorted(outputs.rglob("*")):
                if path.is_file():
                    _upload(run, path, f"{names[1]}/{path.relative_to(outputs).as_posix()}")


class LineFile:
    """Appends whole lines to a file, from any thread and from forked processes alike.

    A half-written line is kept by process and thread, so no lock is needed that a fork could
    copy while it is held; a write of whole lines to a file opened for appending stays in one piece.
    """

    def __init__(self, path: Path) -> None:
        self._partial: dict[tuple[int, int], str] = {}
        self._logged: dict[tuple[int, int], str] = {}
        self._printed: dict[tuple[int, int], str] = {}
        self._failed = False
        self._handle = -1
        with self._tolerant():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def stream(self, text: str) -> None:
        """Takes what a stream was given, unless it is a record of logging that is in already."""
        key = _writer()
        if self._logged.get(key, "") and self._logged[key] in text:
            return
        self._logged.pop(key, None)
        self._printed[key] = text
        self._take(key, text)

    def record(self, message: str, line: str) -> None:
        """Takes a record of logging: its message, and the line that tells it.

        Its handlers may print it too: with ours among the root's, most do so afterwards.
        """
        key = _writer()
        if message and message in self._printed.get(key, ""):
            return
        self._logged[key] = message
        self._take(key, line + "\n")

    def note(self, line: str) -> None:
        """Takes a line that is shown nowhere else."""
        self._take(_writer(), f"{time.strftime(STAMP)} {line}\n")

    def _take(self, key: tuple[int, int], text: str) -> None:
        text = self._partial.pop(key, "") + text
        end = len(text) if len(text) > MAX_LINE else text.rfind("\n") + 1
        if end < len(text):
            self._partial[key] = text[end:]
        if end:
            self._put(text[:end])

    def close(self) -> None:
        """Writes this process's half lines and closes the file; later writes are ignored."""
        mine = [text for (pid, _), text in self._partial.items() if pid == os.getpid()]
        self._partial.clear()
        for text in mine:
            self._put(text + "\n")
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _put(self, text: str) -> None:
        if self._handle >= 0:
            with self._tolerant():
                os.write(self._handle, text.encode("utf-8", "backslashreplace"))

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                stream = sys.__stderr__
                if stream is not None:
                    with contextlib.suppress(OSError, ValueError):
                        stream.write(f"samestep: this worker's log is incomplete: {error}\n")


class Tee:
    """A text stream that copies what passes through it; everything else is the inner stream's."""

    def __init__(self, inner: TextIO, file: LineFile) -> None:
        self.inner = inner
        self._file: LineFile | None = file

    def write(self, text: str) -> int:
        """Writes to both."""
        if self._file is not None:
            self._file.stream(text)
        return self.inner.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each to both."""
        for line in lines:
            self.write(line)

    def detach(self) -> None:
        """Copies no more; whoever kept this stream can go on writing to it."""
        self._file = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class LogCopy(logging.Handler):
    """Puts the records that reach the root logger into the file.

    As the only handler it also does what Python does without any: warnings go to stderr.
    """

    def __init__(self, file: LineFile, stderr: TextIO) -> None:
        super().__init__()
        self._file = file
        self._fallback = logging.StreamHandler(stderr)
        self._fallback.setLevel(logging.WARNING)
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt=STAMP)
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        try:
            self._file.record(record.getMessage(), self.format(record))
            if record.levelno >= self._fallback.level and self._is_only(record.name):
                self._fallback.handle(record)
        except Exception:  # as every handler does: a bad format string is no reason to stop
            self.handleError(record)

    def _is_only(self, name: str) -> bool:
        current: logging.Logger | None = logging.getLogger(name)
        while current is not None:
            if any(handler is not self for handler in current.handlers):
                return False
            current = current.parent if current.propagate else None
        return True


@contextmanager
def _copied_to(path: Path) -> Iterator[Callable[[str], None]]:
    file = LineFile(path)
    file.note(f"process {os.getpid()} on {os.uname().nodename}")
    before = sys.stdout, sys.stderr
    tees = Tee(sys.stdout, file), Tee(sys.stderr, file)
    handler = LogCopy(file, sys.stderr)
    root = logging.getLogger()
    root.handlers.insert(0, handler)  # before those that print
    sys.stdout, sys.stderr = cast(TextIO, tees[0]), cast(TextIO, tees[1])
    try:
        yield file.note
    finally:
        if cast(Any, sys.stdout) is tees[0]:
            sys.stdout = before[0]
        if cast(Any, sys.stderr) is tees[1]:
            sys.stderr = before[1]
        root.removeHandler(handler)
        handler.close()
        for tee in tees:
            tee.detach()
        file.close()


def _writer() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _upload(run: Storage, path: Path, name: str) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - MAX_UPLOAD_BYTES))
            data = file.read()
        if len(data) < size and name.startswith(LOGS_DIR):
            data = f"--- the first {size - len(data)} bytes were left out\n".encode() + data
        elif len(data) < size:
            logger.warning(
                "%s is not kept: %d bytes, more than the %d that are copied to %s; write it to "
                "storage from the workload",
                *(path.name, size, MAX_UPLOAD_BYTES, run.uri),
            )
            return
        run.write(name, data)
    except (OSError, StorageError) as error:
        logger.warning("%s of this worker could not be kept: %s", name, error)
