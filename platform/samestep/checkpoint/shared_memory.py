"""Where images of states lie in a node's shared memory: named by run, and found by nobody else."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.errors import StorageError
from samestep.names import SHARED_MEMORY_PREFIX, Env

DEFAULT: Final = Path("/dev/shm")
STALE_S: Final = 24 * 3600.0
"""What a run left behind and did not touch for this long is taken away by the next start."""


def base_folder() -> Path:
    """The node's shared memory: $SAMESTEP_SHARED_MEMORY, else /dev/shm, else the temporary folder.

    A folder on a disk works as well; copies into it are slower when the system writes them out.
    """
    given = os.environ.get(Env.SAMESTEP_SHARED_MEMORY)
    if given:
        return Path(given)
    return DEFAULT if DEFAULT.is_dir() else Path(tempfile.gettempdir())


def identity() -> str:
    """Equal in two processes if and only if they share their shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        boot = os.uname().nodename
    base = base_folder()
    return f"{boot} {os.stat(base).st_dev} {base}"


def folder_of(run_uri: str) -> Path:
    """The folder of a run's images on this node; it need not exist."""
    digest = hashlib.sha256(f"{os.getuid()} {run_uri}".encode()).hexdigest()[:16]
    name = run_uri.partition("?")[0].rstrip("/").rpartition("/")[2]
    return base_folder() / f"{SHARED_MEMORY_PREFIX}{name}-{digest}"


def make_folder(run_uri: str) -> Path:
    """The folder, made if need be; what other runs left long ago is taken away on the way.

    Raises:
        StorageError: it can't be made.
    """
    folder = folder_of(run_uri)
    try:
        ensure(folder)
        with suppress(FileNotFoundError):  # taken away by a worker that failed just now
            os.utime(folder)
    except OSError as error:
        raise StorageError(
            f"can't make {folder} in shared memory: {error.strerror}; give this user the right to "
            f"write there, or set {Env.SAMESTEP_SHARED_MEMORY} to another folder"
        ) from error
    _sweep(folder)
    return folder


def ensure(folder: Path) -> None:
    """Makes a folder that another process may make, or take away, at the same time.

    `Path.mkdir` with `exist_ok` raises where the folder that was there is gone when it looks.

    Raises:
        OSError: it can't be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.is_file():
            raise


def remove(run_uri: str) -> None:
    """Takes away all that a run has in this node's shared memory; harmless where there is none."""
    shutil.rmtree(folder_of(run_uri), ignore_errors=True)


def free_bytes(run_uri: str) -> int:
    """Room for a run's images: what is free, and what the run holds already."""
    found = os.statvfs(base_folder())
    held = sum(about.st_blocks * 512 for about in _files(folder_of(run_uri)))
    return found.f_bavail * found.f_frsize + held


def _files(folder: Path) -> list[os.stat_result]:
    """What is known of each file; another worker may take some away at the same time."""
    found = []
    try:
        for item in folder.iterdir():
            with suppress(FileNotFoundError):
                found.append(item.stat())
    except OSError:
        return []
    return [about for about in found if stat.S_ISREG(about.st_mode)]


def _sweep(own: Path) -> None:
    """Removes this user's folders of other runs that nothing was written into for a long time."""
    for folder in own.parent.glob(f"{SHARED_MEMORY_PREFIX}*"):
        try:
            about = folder.stat()
        except OSError:
            continue
        times = [about.st_mtime, *(inner.st_mtime for inner in _files(folder))]
        if folder != own and about.st_uid == os.getuid() and time.time() - max(times) > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)
