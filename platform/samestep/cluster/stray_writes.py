"""Notices files that a workload writes by a relative path where that loses or mixes them.

All workers of a machine share a working directory, and that of a submitted job is thrown away: a
plain script's habit would overwrite another worker's file, or lose it, without a word. Only
Python's own ways to open a file are seen (torch.save to a path opens its file outside of Python).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT

logger = logging.getLogger(__name__)
_hooked = False


def warn_of_stray_writes(*, world_rank: int, world_size: int, is_copied: bool) -> None:
    """Warns from now on in this process and those it forks, once for each file.

    For a worker's process only: Python can't take an audit hook back.

    Args:
        world_rank: of this worker.
        world_size: number of workers; a single one shares its working directory with nobody.
        is_copied: the working directory is a copy that Ray throws away.
    """
    reasons = []
    if world_size > 1:
        reasons.append("every worker writes to the same file")
    if is_copied:
        reasons.append("the working directory of a submitted job is thrown away")
    if not reasons:
        return
    global _hooked
    if _hooked:  # a process may work for several attempts
        return
    _hooked = True
    why, seen = " and ".join(reasons), set[str]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str):
            return
        path, _, flags = args
        if not flags & _WRITING or os.path.isabs(path) or path in seen or "__pycache__" in path:
            return
        seen.add(path)
        logger.warning(
            "world_rank=%d writes %r by a relative path (in %s), where %s: write to "
            "self.output_folder, which is this worker's own and is kept with the run",
            *(world_rank, path, os.getcwd(), why),
        )

    sys.addaudithook(hook)
