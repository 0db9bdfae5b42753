"""A replay in a process of its own, for steps that may end their process or never end at all.

The process writes down where it is; this one watches, asks for its stacks when it stands still, and
ends it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.errors import CannotReplayError
from samestep.faults.progress import Phase, Position, Progress
from samestep.names import Env
from samestep.scratch import scratch_folder

START_S: Final = 600.0
"""How long it may take until the first step is begun."""
STACKS_S: Final = 10.0
_POLL_S: Final = 0.2
_STACKS: Final = ".stacks"
_TOLD: Final = "= "
_OVER: Final = "over"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the process ended.

    Attributes:
        status: of the command, where it came to its end; None where a step ended the process, or
            stood still.
        how: a step ended it, as a predicate; empty where it stood still, or came to its end.
        position: the last one that it wrote down; None where it took no step.
        stacks: of its threads, where it stood still.
        told: what it said, see `NotedProgress.say`.
    """

    status: int | None
    how: str = ""
    position: Position | None = None
    stacks: str = ""
    told: tuple[Mapping[str, Any], ...] = ()


class NotedProgress(Progress):
    """Progress that another process can see.

    Args:
        path: a file; beside it the stacks are written when SIGUSR1 asks for them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._notes = path.open("w", encoding="ascii")
        self._stacks = path.with_suffix(_STACKS).open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def at(self, phase: Phase, *, step: int, shard: int = -1) -> None:
        """Marks a new position, and writes it down."""
        super().at(phase, step=step, shard=shard)
        self._note(f"{step} {phase} {shard}")

    def say(self, data: Mapping[str, Any]) -> None:
        """Tells who watches something that JSON can hold."""
        self._note(_TOLD + json.dumps(data))

    def over(self) -> None:
        """From here on an end is the command's own, and no longer a step's doing."""
        self._note(_OVER)

    def _note(self, line: str) -> None:
        self._notes.write(line + "\n")
        self._notes.flush()


def progress_here() -> Progress:
    """That of this process: noted where another one watches it."""
    path = os.environ.get(Env.SAMESTEP_REPLAY_NOTES)
    return NotedProgress(Path(path)) if path else Progress()


def is_apart() -> bool:
    """Whether another process watches this one."""
    return Env.SAMESTEP_REPLAY_NOTES in os.environ


def run_apart(arguments: Sequence[str], *, still_s: float) -> Ended:
    """Runs a command of samestep in a process of its own, and watches it.

    Args:
        arguments: of the command line.
        still_s: seconds without progress after which it counts as standing still.

    Raises:
        CannotReplayError: it does not come to its first step.
    """
    with scratch_folder("replay") as folder:
        notes = folder / "notes"
        own = {Env.SAMESTEP_REPLAY_NOTES: str(notes), "TMPDIR": str(folder)}  # it may be killed
        environment: Mapping[str, str] = {**os.environ, **own}
        # -P: what lies in the working directory must not shadow anything.
        command = [sys.executable, "-P", "-m", "samestep", *arguments]
        process = subprocess.Popen(command, env=environment)
        try:
            return _watch(process, notes, still_s)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _watch(process: subprocess.Popen[bytes], notes: Path, still_s: float) -> Ended:
    seen, since = "", time.monotonic()
    while True:
        try:
            status = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            status = None
        text = notes.read_text(encoding="ascii") if notes.exists() else ""
        if status is not None:
            return _ended(status, text)
        if text != seen:
            seen, since = text, time.monotonic()
        waited_s = time.monotonic() - since
        if not seen and waited_s > START_S:
            raise CannotReplayError(
                f"the replay did not come to its first step within {START_S:.0f} s: the workload "
                "takes too long to build, or stands still before it"
            )
        if seen and waited_s > still_s:
            stacks = _stacks(process, notes)
            return Ended(status=None, position=_position(seen), stacks=stacks, told=_told(seen))


def _ended(status: int, text: str) -> Ended:
    position = _position(text)
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    elif position is None or _OVER in text.splitlines():
        return Ended(status=status, position=position)
    else:  # os._exit, or a library's exit(): no status of this command's
        how = f"ended itself with status {status}"
    return Ended(status=None, how=how, position=position, told=_told(text))


def _told(text: str) -> tuple[Mapping[str, Any], ...]:
    whole = text.rpartition("\n")[0].splitlines()
    return tuple(json.loads(line.removeprefix(_TOLD)) for line in whole if line.startswith(_TOLD))


def _stacks(process: subprocess.Popen[bytes], notes: Path) -> str:
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    text = before = ""
    while time.monotonic() < deadline:
        before, text = text, notes.with_suffix(_STACKS).read_text(encoding="utf-8")
        if text and text == before:  # it is through with writing
            break
        time.sleep(_POLL_S)
    return text


def _position(text: str) -> Position | None:
    lines = [line.split() for line in text.splitlines() if not line.startswith(_TOLD)]
    whole = [line for line in lines if len(line) == 3]
    if not whole:
        return None
    step, phase, shard = whole[-1]
    return Position(step=int(step), phase=Phase(phase), shard=int(shard))
