"""Which copies into a node's image are through: a number for each of its workers, in shared memory.

Read and written by threads that wait for nobody's step, so that no worker needs to talk about it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from samestep.checkpoint.image import Image

POLL_S: Final = 0.002
_ITEM_BYTES: Final = 8


class Marks:
    """The last copy that each worker of a node has finished; 0: none.

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

    def set(self, local_rank: int, number: int) -> None:
        """The worker has finished the copy of that number, and all before it."""
        self._numbers[local_rank] = number

    def wait(self, number: int, given_up: threading.Event) -> bool:
        """Waits until every worker has finished that copy; False when it was given up before."""
        while int(self._numbers.min()) < number:
            if given_up.wait(POLL_S):
                return False
        return True
