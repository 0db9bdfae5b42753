"""What became of the copies into a node's image: a number of each worker, in shared memory.

Read and written by threads that wait for nobody's step, so that no worker needs to talk about it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from samestep.checkpoint.image import Image
from samestep.errors import CheckpointError

GIVEN_UP: Final = "it took too long and was given up"
POLL_S: Final = 0.002
_ITEM_BYTES: Final = 8


class Marks:
    """The last copy that each worker of a node is through with; 0: none; negative: it failed.

    Args:
        path: of the file, the same for all of them and for nobody else.
        local_size: workers on the node.

    Raises:
        StorageError: shared memory is full.
    """

    def __init__(self, path: Path, local_size: int) -> None:
        self.path = path
        memory = Image.shared(path, local_size * _ITEM_BYTES).data
        self._numbers: Any = memory.view(np.int64)

    def set(self, local_rank: int, number: int, *, failed: bool = False) -> None:
        """The worker is through with the copy of that number, and all before it."""
        self._numbers[local_rank] = -number if failed else number

    def wait(self, number: int, given_up: threading.Event) -> None:
        """Returns when every worker has copied.

        Raises:
            CheckpointError: one of them failed, or it was given up before.
        """
        while int(np.abs(self._numbers).min()) < number:
            if given_up.wait(POLL_S):
                raise CheckpointError(GIVEN_UP)
        failed = np.flatnonzero(self._numbers == -number).tolist()
        if failed:
            raise CheckpointError(f"the copy of worker {failed[0]} of this node failed")
