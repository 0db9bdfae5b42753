"""How the workers of an attempt find each other: through a store that the controller holds.

Ray's own set-up has the store in worker 0 and waits in the thread that answers the controller: a
worker that dies in between leaves the others waiting, deaf. Here they wait in their training
threads, and the controller frees them by closing the store.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from samestep.cluster import process
from samestep.cluster.sockets import open_sockets, silence_ends
from samestep.errors import PeerLostError
from samestep.names import THREAD_IMPORT

if TYPE_CHECKING:
    import torch.distributed as dist

FORM_S: Final = 15.0
"""How long the workers of a group wait for each other while it forms."""


def make_ready() -> None:
    """Imports what a meeting needs, beside whatever else happens: that takes seconds."""
    threading.Thread(
        target=importlib.import_module,
        args=("torch.distributed",),
        name=THREAD_IMPORT,
        daemon=True,
    ).start()


class Meeting:
    """The controller's side.

    Args:
        address: of this node, as the workers reach it.
    """

    def __init__(self, address: str) -> None:
        import torch.distributed as dist

        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=FORM_S),
        )
        self.place = {"address": address, "port": int(self._store.port)}

    def close(self) -> None:
        """Ends the store; whoever waits in it gets an error at once."""
        self._store = None


@contextmanager
def formed_group(
    backend: str, *, world_rank: int, world_size: int, timeout_s: float
) -> Iterator[dist.ProcessGroup]:
    """Forms torch's default process group; lets go of it at the end.

    Raises:
        PeerLostError: the group did not form.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # of an attempt whose end failed
        dist.destroy_process_group()
    # Part of the group's name, on which all must agree; a group that did not form left it raised.
    dist.distributed_c10d._world.group_count = 0
    place = process.meeting()
    others = open_sockets()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place["address"],
            place["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=FORM_S),
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=world_rank,
            world_size=world_size,
            timeout=timedelta(seconds=FORM_S),
        )
    except (RuntimeError, ValueError) as error:  # what torch makes of a store or peer that is gone
        raise PeerLostError(f"the group of {world_size} did not form: {error}") from None
    try:
        world = dist.distributed_c10d._get_default_group()
        limit_group(world, timeout_s)
        with silence_ends(but=others):
            yield world
    finally:
        del store
        if dist.is_initialized():
            dist.destroy_process_group()


def limit_group(group: Any, timeout_s: float) -> None:
    """Gives a group that has formed the timeout of the steps."""
    from samestep.engine.exchange import backend_of

    for device in group._device_types:
        backend_of(group, device)._set_default_timeout(timedelta(seconds=timeout_s))


def set_environment(context: Any) -> None:
    """The variables that torchrun sets, for workloads that look at them."""
    os.environ.update(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "NODE_RANK": str(context.get_node_rank()),
        }
    )
