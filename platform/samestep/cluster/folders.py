"""Where the command stood, as its workers find it: the same relative paths mean the same files.

A worker on the command's own machine, or on one that shares its file system, goes to the very
folder. A submitted job has a copy of the working directory on each node, which Ray unpacks and
starts the workers in; its absolute path may be another one on every node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.cluster.stray_writes import warn_of_stray_writes
from samestep.telemetry.link import Patient
from samestep.telemetry.logs import WorkerFiles, worker_files


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Folders of a command, to be sent to its workers.

    Attributes:
        working: the command's working directory; None where Ray gives each worker its own copy.
        search: for the workload's module, each as (absolute path, path relative to the working
            directory or None where it lies outside).
    """

    working: str | None
    search: tuple[tuple[str, str | None], ...]

    @classmethod
    def of_command(cls, search: Sequence[Path], *, is_copied: bool) -> Folders:
        """Those of this process.

        Args:
            search: folders for the workload's module.
            is_copied: Ray gives each worker a copy of the working directory.
        """
        here = Path.cwd()
        pairs = [
            (str(path), str(path.relative_to(here)) if path.is_relative_to(here) else None)
            for path in search
        ]
        return cls(working=None if is_copied else str(here), search=tuple(pairs))

    def enter(self) -> list[Path]:
        """Makes them this process's own: its working directory, where there is such a one here.

        Returns:
            Where to look for the workload's module on this machine.
        """
        if self.working is not None:
            if os.path.isdir(self.working):
                os.chdir(self.working)
            return [Path(path) for path, _ in self.search]
        here = Path.cwd()
        copies = [(path, here / relative if relative else None) for path, relative in self.search]
        return [copy if copy and copy.is_dir() else Path(path) for path, copy in copies]


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where a worker works on its machine.

    Attributes:
        search: where to look for the workload's module.
        files: what it may write beside the run's own.
    """

    search: list[Path]
    files: WorkerFiles


@contextmanager
def at_desk(config: Mapping[str, Any], *, world_rank: int, world_size: int) -> Iterator[Desk]:
    """What every worker process of Ray does around its work: its folders, its log.

    Args:
        config: `folders` (of the command), `run_uri`, `target` (the recorder).
        world_rank: of this worker.
        world_size: number of workers.
    """
    folders: Folders = config["folders"]
    search = folders.enter()
    warn_of_stray_writes(
        world_rank=world_rank, world_size=world_size, is_copied=folders.working is None
    )
    # The present one is the attempt before: the next begins when all workers have met.
    attempt = int(Patient(config["target"]).call("status")["attempt"]) + 1
    run = Storage.at(config["run_uri"])
    with worker_files(run, attempt=attempt, world_rank=world_rank) as files:
        yield Desk(search=search, files=files)
