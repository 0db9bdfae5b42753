"""All workers hold the same state: shown by digests, before anything of it is kept."""

from __future__ import annotations

from samestep.checkpoint.state import State
from samestep.engine.peers import Peers
from samestep.errors import DivergenceError
from samestep.exact.digest import live_digest
from samestep.spec import JobSpec


def agreed_digest(spec: JobSpec, peers: Peers, state: State) -> str:
    """Digest of a live state, equal on all workers (of the exact reduction).

    Every worker digests all of it: if each saw only the part that it writes, two that differ
    would never be compared.

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
        common = max(sorted(set(everyone)), key=everyone.count)
        odd = [str(rank) for rank, other in enumerate(everyone) if other != common]
        raise DivergenceError(
            f"the state after {state.step} steps differs between workers; odd ones out: "
            f"worker {', '.join(odd)} (digests {everyone}). Nothing of it is committed: "
            "either something outside the contract changed the model (samestep check names "
            "suspects) or a machine computes wrongly"
        )
    return digest
