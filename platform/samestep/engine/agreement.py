"""All workers hold the same state: shown by digests, before anything of it is kept."""

from __future__ import annotations

from samestep.checkpoint.state import State
from samestep.engine.peers import Peers
from samestep.errors import DivergenceError
from samestep.exact.digest import divergence_text, live_digest
from samestep.spec import JobSpec


def agreed_digest(spec: JobSpec, peers: Peers, state: State) -> str:
    """Digest of a live state, equal on all workers (of the exact reduction).

    Raises:
        DivergenceError: names the odd ones out.
    """
    digest = live_digest(state.tensors)
    if spec.reduction == "fast":
        # Stock DDP lets buffers differ between workers until worker 0's go round at the next
        # forward; worker 0's are those that a checkpoint should hold.
        peers.gather("")()
        return digest
    everyone = peers.gather(digest)()
    if len(set(everyone)) > 1:
        raise DivergenceError(divergence_text(state.step, everyone))
    return digest
