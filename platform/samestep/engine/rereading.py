"""Samples of steps read once more, in a process of their own, beside the training.

Reading seeds the global generators, and a dataset may hold open files, whose position a fork would
share: so it happens in a forked process that first gets positions of its own, and lets go of what
else it inherited. It ends by itself after a while, whatever it hangs in, and when its parent does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from samestep.engine.feed import Fetcher
from samestep.exact.order import ShardPlan
from samestep.incidents.bundle import sample_file
from samestep.incidents.samples import StepSamples
from samestep.scratch import make_scratch_folder

READ_S: Final = 30.0
NICE: Final = 5
ENDS_S: Final = 2.0
_END_FILE: Final = "end.json"

PlansOf = Callable[[int], Sequence[ShardPlan]]


class Rereading:
    """Reads the samples of some steps into a folder of its own; must be made by who trains.

    That is when no other thread reads, draws or computes: what a fork copies is at rest.

    Args:
        fetcher: of the attempt's feed.
        plans_of: the shards of a step; called in the new process only.
        steps: in the order of their importance.
        max_bytes: of all samples together.
        redact: takes secrets out of what errors tell.
        limit_s: how long it may take.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        plans_of: PlansOf,
        steps: Sequence[int],
        *,
        max_bytes: int,
        redact: Callable[[str], str],
        limit_s: float = READ_S,
    ) -> None:
        self.steps = list(steps)
        self._limit_s = limit_s
        self._folder = make_scratch_folder("samples")
        parent = os.getpid()

        def read() -> None:
            code = 1
            try:
                _alone(limit_s)
                _read(fetcher, plans_of, self.steps, self._folder, max_bytes, redact, parent)
                code = 0
            except Exception as error:  # of the user's code, or no room: told by the bundle
                _end(self._folder, f"reading them again raised {type(error).__name__}: {error}")
            finally:
                os._exit(code)  # nothing of the parent's is finished or flushed here

        self._process = multiprocessing.get_context("fork").Process(target=read, daemon=True)
        # The child must not collect what it inherited, see `feed`; who trains can't wait for a
        # collection either.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._process.start()
        except BaseException:
            self.close()
            raise
        finally:
            if collects:
                gc.enable()

    def finish(self) -> tuple[dict[int, list[Path]], str]:
        """Waits until all is read, or the time is over.

        Returns:
            The files of each step that was read, and what is not there for which reason.
        """
        self._process.join(self._limit_s)
        end = self._folder / _END_FILE
        told = json.loads(end.read_text(encoding="utf-8")) if end.exists() else None
        why = self._why() if told is None else str(told)
        found: dict[int, list[Path]] = {}
        for step in self.steps:
            # The JSON is written last: without it the rest is not whole.
            pair = [self._folder / sample_file(step, kind) for kind in ("json", "safetensors")]
            if pair[0].exists():
                found[step] = [path for path in pair if path.exists()]
        return found, why

    def _why(self) -> str:
        code = self._process.exitcode
        if code is None or code == -signal.SIGALRM:
            return f"reading the samples again took more than {self._limit_s:g} s"
        return f"the process that read the samples again ended with {code}"

    def close(self) -> None:
        """Ends the process, and removes what it wrote."""
        if self._process.pid is not None:
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join(ENDS_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _alone(limit_s: float) -> None:
    """Makes the forked process independent of the one it comes from."""
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(kind, signal.SIG_DFL)
    signal.alarm(int(limit_s) + 1)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):  # what the dataset prints was printed before
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            _detach(int(name), nothing)


def _detach(handle: int, nothing: int) -> None:
    if handle <= 2 or handle == nothing:
        return
    mode = os.fstat(handle).st_mode
    if stat.S_ISSOCK(mode):
        # The other side must see it closed when the parent goes.
        os.dup2(nothing, handle)
    elif stat.S_ISREG(mode):
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            return
        position = os.lseek(handle, 0, os.SEEK_CUR)
        own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
        os.lseek(own, position, os.SEEK_SET)
        os.dup2(own, handle)
        os.close(own)


def _read(
    fetcher: Fetcher,
    plans_of: PlansOf,
    steps: Sequence[int],
    folder: Path,
    max_bytes: int,
    redact: Callable[[str], str],
    parent: int,
) -> None:
    left_bytes, why = max_bytes, ""
    for step in steps:
        plans = plans_of(step)
        taken = []
        for plan in plans:
            if os.getppid() != parent:
                return
            fetched = fetcher[plan] if plan.ids else None
            error = fetched.error if fetched is not None else None
            taken.append((plan, fetched.batch if fetched is not None else None, error or ""))
        samples = StepSamples.of(taken)
        if samples.num_bytes > left_bytes:
            why = f"those of step {step} would take more than incidents.bundle.max_bytes leaves"
            samples = samples.without_batches(why)
        files = samples.to_files(redact)
        size = sum(map(len, files.values()))
        for name, data in sorted(files.items(), reverse=True):  # safetensors, then JSON
            path = folder / f".{name}"
            path.write_bytes(data)
            path.rename(folder / name)
        left_bytes -= size
        if left_bytes <= 0:
            break
    _end(folder, why)


def _end(folder: Path, why: str) -> None:
    """Written last: what is missing, and why."""
    (folder / f".{_END_FILE}").write_text(json.dumps(why), encoding="utf-8")
    (folder / f".{_END_FILE}").rename(folder / _END_FILE)
