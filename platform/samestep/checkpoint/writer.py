"""Who writes a checkpoint behind the training: a process of its own, or this one where it is small.

The process shares nothing with the trainer but the image: not its interpreter lock, and not its
priority; and it takes its time, until the trainer waits for it. It takes one job a line on its
standard input, answers one line each, and ends when the trainer closes that input or dies.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Protocol

from samestep.checkpoint.job import WriteJob, Written, perform
from samestep.errors import SamestepError, StorageError

PARENT_POLL_S: Final = 0.5
END_S: Final = 5.0
# What the writer takes longer is nobody's time, what it takes away is: its imports, too, run at the
# lowest priority. Not idle (SCHED_IDLE): beside busy loader processes it would never be through.
_START: Final = (
    "import json, os, sys; os.nice(19); sys.path[:] = json.loads(sys.argv[1]); "
    "from samestep.checkpoint.writer import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class Writer(Protocol):
    """Carries out one job at a time."""

    def write(self, job: WriteJob, data: memoryview, timeout_s: float) -> Written:
        """Blocks until the files are written.

        Raises:
            StorageError: they can't be, or not in time.
        """

    def hurry(self) -> None:
        """Training waits for the job that is under way, or about to be; never raises."""

    def abort(self) -> None:
        """Makes the job under way fail, as far as that can be done; never raises."""

    def close(self) -> None:
        """Ends it, in the middle of a job if need be; never raises."""


class InlineWriter:
    """Writes in the calling thread: for states too small to be worth a process."""

    def write(self, job: WriteJob, data: memoryview, timeout_s: float) -> Written:
        """As `Writer.write`; storage's own timeouts are the only ones."""
        return perform(job, data)

    def hurry(self) -> None:
        """It does already."""

    def abort(self) -> None:
        """A thread can't be made to stop."""

    def close(self) -> None:
        """There is nothing to end."""


class ProcessWriter:
    """Writes in a process that is started at the first job and kept.

    A job that fails or takes too long fails alone: the next one gets a new process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._urgent = threading.Event()
        # A pipe of its own: that of the jobs blocks while the process does not read.
        self._urge: int | None = None

    def start(self) -> None:
        """Starts the process, and does not wait for it."""
        with self._lock:
            if self._closed:
                raise StorageError("the writer is closed: the worker is ending")
            if self._process is None or self._process.poll() is not None:
                self._reap()
                heard, self._urge = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    self._process = _spawn(heard)
                finally:
                    os.close(heard)

    def write(self, job: WriteJob, data: memoryview, timeout_s: float) -> Written:
        """As `Writer.write`; the job must name its image."""
        assert job.image is not None, "a writer process maps the image by its path"
        deadline = time.monotonic() + timeout_s
        self.start()
        process = self._process
        if process is None:
            raise StorageError("the writer is closed: the worker is ending")
        assert process.stdin is not None
        assert process.stdout is not None
        if self._urgent.is_set():
            self.hurry()
        try:
            process.stdin.write(json.dumps(job.to_json()).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(_line(process.stdout.fileno(), deadline))
        except TimeoutError:
            self._end(process)
            raise StorageError(
                f"{job.folder_uri}: the files were not written within {timeout_s:g} s; the "
                "storage hangs or is too slow: save less often, or choose another storage"
            ) from None
        except (OSError, ValueError) as error:
            status = self._end(process)
            raise StorageError(
                f"{job.folder_uri}: the writer process ended in the middle of it (status {status})"
            ) from error
        finally:
            self._urgent.clear()
        if "error" in answer:
            raise StorageError(answer["error"])
        return Written(**answer)

    def hurry(self) -> None:
        """As `Writer.hurry`."""
        self._urgent.set()
        with self._lock, suppress(OSError):  # of a full pipe, too: it is hurried then
            if self._urge is not None:
                os.write(self._urge, b"!")

    def abort(self) -> None:
        """Kills the process; the next job gets a new one."""
        self._end()

    def close(self) -> None:
        """Kills the process; a file in the middle of being written never becomes real."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self, of_job: subprocess.Popen[bytes] | None = None) -> int | None:
        with self._lock:
            if of_job not in (None, self._process):  # killed before; a later job has another
                return of_job.poll()
            if self._process is not None:
                with suppress(OSError):
                    self._process.kill()
            return self._reap()

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        urge, self._urge = self._urge, None
        if urge is not None:
            os.close(urge)
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)  # one that hangs in the system (NFS) is reaped when it returns
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        return process.returncode


def _spawn(urge: int) -> subprocess.Popen[bytes]:
    # The trainer's search path as it is now: what Ray or a notebook added is in it.
    arguments = [json.dumps(sys.path), str(os.getpid()), str(urge)]
    return subprocess.Popen(
        [sys.executable, "-c", _START, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[urge],
        # Signals meant for the trainer (Ctrl-C) must not end a save of its last state. A session of
        # its own would do as well, but where the kernel shares time among sessions (autogroup) its
        # priority would count among its own alone.
        process_group=0,
    )


def _line(handle: int, deadline: float) -> bytes:
    """A line from a pipe.

    Raises:
        TimeoutError: it did not come in time.
        ValueError: the other side closed the pipe.
    """
    found = bytearray()
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    while not found.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if poller.poll(left_s * 1000):
            data = os.read(handle, 1 << 16)
            if not data:
                raise ValueError("the pipe is closed")
            found += data
    return bytes(found)


def serve(parent_pid: int, urge: int) -> None:
    """What the process does: jobs from standard input, until the trainer is gone.

    Args:
        parent_pid: the trainer.
        urge: descriptor of a pipe; what arrives there hurries the job under way.
    """
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    hurried = threading.Event()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def listen() -> None:
        # Ends the process even in the middle of a write: nobody would commit it. The parent is
        # looked for as well, because its other children may hold the pipe open.
        given, rest = sys.stdin.fileno(), b""
        poller = select.poll()
        poller.register(given, select.POLLIN)
        poller.register(urge, select.POLLIN)
        while os.getppid() == parent_pid:
            ready = {handle for handle, _ in poller.poll(PARENT_POLL_S * 1000)}
            if urge in ready:
                hurried.set()
                if not os.read(urge, 1 << 10):
                    break
            if given not in ready:
                continue
            data = os.read(given, 1 << 20)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                jobs.put(line)
        os._exit(0)

    threading.Thread(target=listen, name="samestep-listen", daemon=True).start()
    while True:
        answer = _answer(jobs.get(), hurried)
        hurried.clear()  # before the answer: the next job may be hurried as soon as that is there
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answer(line: bytes, hurried: threading.Event) -> dict[str, Any]:
    try:
        job = WriteJob.from_json(json.loads(line))
        assert job.image is not None
        with open(job.image, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return asdict(perform(job, memoryview(mapped), hurried=hurried))
    except SamestepError as error:
        return {"error": str(error)}
    except Exception as error:  # told to the trainer, which goes on without this checkpoint
        return {"error": f"the writer failed: {type(error).__name__}: {error}"}
