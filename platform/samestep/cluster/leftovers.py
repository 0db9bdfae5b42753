"""What a run that is over leaves in the shared memory of nodes that are not in its last group.

A node's own workers give its copies back when they end. A node that the group had left before, or
whose workers were killed, still holds what was copied there.
"""

from __future__ import annotations

import logging
from typing import Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samestep.checkpoint import shared_memory

WAIT_S: Final = 10.0
"""For nodes that do not answer: what they hold is then removed by the next start there."""

logger = logging.getLogger(__name__)


def forget_on_all_nodes(run_uri: str) -> None:
    """Removes a run's copies from the shared memory of all other nodes, as far as they answer."""
    own = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    remove = ray.remote(shared_memory.remove)
    try:
        removals = [
            remove.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote(run_uri)
            for node_id in others
        ]
        if removals:
            _, late = ray.wait(removals, num_returns=len(removals), timeout=WAIT_S)
            for removal in late:
                ray.cancel(removal, force=True)
    except RayError as error:
        logger.debug("shared memory of other nodes: %r", error)
