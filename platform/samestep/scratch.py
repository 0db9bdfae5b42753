"""Temporary folders that do not outlive their process for long, even where it is killed.

A folder's name tells whose it is; whoever makes one takes those away whose process is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"samestep-[a-z]+-(\d+)\.(\d+)\.(\d+)-")


def make_scratch_folder(kind: str) -> Path:
    """Makes a folder below the system's temporary one (TMPDIR); its maker removes it.

    Args:
        kind: a word of small letters that tells people what it is for.
    """
    sweep()
    pid = os.getpid()
    prefix = f"samestep-{kind}-{_namespace()}.{pid}.{_started(pid)}-"
    return Path(tempfile.mkdtemp(prefix=prefix))


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """The same for the time of a block."""
    folder = make_scratch_folder(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Removes folders of this machine's processes that were killed before they could."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            found = _NAME.match(entry.name)
            if found and _is_gone(*map(int, found.groups())):
                shutil.rmtree(entry.path, ignore_errors=True)  # another user's stays


def _is_gone(namespace: int, pid: int, started: int) -> bool:
    # Containers may share the folder: the numbers of their processes say nothing here.
    return namespace == _namespace() and _started(pid) != started


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return 0


def _started(pid: int) -> int:
    """When a process was started: tells it from another of the same number.

    In ticks since the machine was, which no change of the clock moves. 0: there is no such process,
    or this is not Linux.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
