"""Which workers share a node, which is to say its shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from samestep.checkpoint import shared_memory
from samestep.checkpoint.image import Plan
from samestep.checkpoint.snapshot import NUM_IMAGES
from samestep.checkpoint.state import Parts, collect, flatten
from samestep.engine.peers import Peers
from samestep.errors import StorageError
from samestep.names import Env


@dataclass(frozen=True, kw_only=True)
class Node:
    """A worker's place among those of its node.

    Attributes:
        local_rank: counted from 0 in order of world ranks.
        local_size: workers on the node.
    """

    local_rank: int
    local_size: int

    @classmethod
    def of(cls, peers: Peers) -> Node:
        """Found out by talking: every worker must call it."""
        everyone = peers.gather(shared_memory.identity())()
        mine = everyone[peers.world_rank]
        here = [rank for rank, other in enumerate(everyone) if other == mine]
        return cls(local_rank=here.index(peers.world_rank), local_size=len(here))


def require_room(parts: Parts, peers: Peers, run_uri: str, *, snapshots: bool) -> None:
    """Refuses, before the first step, a state that does not fit into a node's shared memory.

    Every worker must call it. What the optimizer will hold is estimated where it holds nothing yet.

    Raises:
        StorageError: names a worker on such a node, what is needed and what there is.
    """
    tensors, _ = flatten(collect(parts, step=0, extras={}))
    state_bytes = Plan.of(tensors).num_bytes + _missing_bytes(parts.optimizer)
    needed_bytes = state_bytes * (NUM_IMAGES if snapshots else 1)
    here_bytes = shared_memory.free_bytes(run_uri)
    lacking = here_bytes if here_bytes < needed_bytes else None
    for rank, found in enumerate(peers.gather(lacking)()):
        if found is not None:
            raise StorageError(
                f"the node of worker {rank} has {found / 1e6:,.1f} MB of shared memory left in "
                f"{shared_memory.base_folder()}; {needed_bytes / 1e6:,.1f} MB are needed for "
                f"{NUM_IMAGES if snapshots else 1} copies of the state ({state_bytes / 1e6:,.1f} MB"
                " each). Give the node more (of a container: --shm-size, or an emptyDir of medium "
                "Memory)"
                + (
                    ", set checkpoint.snapshot_every: 0 to need one copy alone,"
                    if snapshots
                    else ""
                )
                + f" or set {Env.SAMESTEP_SHARED_MEMORY} to a folder that has room, if on a disk"
            )


def _missing_bytes(optimizer: Optimizer) -> int:
    """What an optimizer without state will hold, judged by its settings; for two moments if odd."""
    if optimizer.state:
        return 0
    total = 0
    for group in optimizer.param_groups:
        num_moments = 2 + bool(group.get("amsgrad"))
        if "centered" in group:  # RMSprop, whose `momentum` comes beside its average of squares
            num_moments = 1 + bool(group["centered"]) + bool(group["momentum"])
        elif "betas" not in group and "momentum" in group:
            num_moments = int(group["momentum"] != 0)
        sizes = (p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
        total += num_moments * sum(sizes)
    return total
