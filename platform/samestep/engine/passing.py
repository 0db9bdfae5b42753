"""A step whose batch is left out: nothing is loaded and nothing computed, the workers only meet."""

from __future__ import annotations

import math

from samestep.engine.exchange import Traffic
from samestep.engine.peers import Peers
from samestep.engine.step import Reduced


def pass_over(peers: Peers, *, shards: int, flag: int, delivered: int) -> Reduced:
    """What such a step comes to, once all workers are at it.

    Args:
        peers: the workers, which stay in step and learn of each other's flags.
        shards: of a step.
        flag: what this worker asks for; the largest of all counts.
        delivered: records of the attempt that worker 0 knows to be in the ledger.
    """
    told = peers.gather([flag, delivered])()
    return absent(shards, flag=max(int(each[0]) for each in told), delivered=int(told[0][1]))


def absent(shards: int, *, flag: int = 0, delivered: int = 0) -> Reduced:
    """A step of so many shards, none of which is there: there is nothing to update by."""
    return Reduced(
        loss=math.nan,
        shard_losses=[None] * shards,
        shard_weights=[0.0] * shards,
        metrics={},
        flag=flag,
        delivered=delivered,
        parameters=[],
        traffic=Traffic(),
    )
