"""When a group forms: the workers compare their numerics, layout, weights and one real shard.

The canary catches what the fingerprint does not name: every worker computes the same shard, and
the bits of its loss and gradients must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from samestep.engine.feed import TakeApart
from samestep.engine.peers import Peers
from samestep.engine.shard import ShardResult
from samestep.engine.step import StepEngine
from samestep.errors import (
    DivergenceError,
    PeerLostError,
    RunConflictError,
    SamestepError,
    UserCodeError,
    WorkloadError,
)
from samestep.exact.digest import ids_digest
from samestep.exact.numerics import differences
from samestep.exact.order import Order, ShardPlan
from samestep.faults.progress import Phase
from samestep.spec import JobSpec

BATCH_NORM_MESSAGE = "Expected more than 1 value per channel"


@dataclass(frozen=True, kw_only=True)
class Formed:
    """What forming the group found.

    Attributes:
        canary: the first replica's result of shard 0 of step 0.
        digest: of its loss and gradients, on the first replica.
        differing: lines that name how the workers differ; empty unless that was allowed.
    """

    canary: ShardResult
    digest: str
    differing: list[str] = field(default_factory=list)


def compare_fingerprints(spec: JobSpec, peers: Peers, numerics: dict[str, Any]) -> list[str]:
    """Compares every worker's fingerprint with worker 0's.

    Raises:
        RunConflictError: they differ and `numerics.mixed` is `refuse`.
    """
    lines = []
    everyone = peers.gather(numerics)()
    for rank, other in enumerate(everyone):
        lines += [f"worker {rank}: {line}" for line in differences(other, everyone[0])]
    return _allowed(spec, lines, "the workers' numerics differ")


def compare_canary(
    spec: JobSpec,
    engine: StepEngine,
    peers: Peers,
    order: Order,
    take: TakeApart,
    state: str,
    *,
    is_new: bool = True,
) -> Formed:
    """Computes shard 0 of step 0 everywhere and compares its digest, the layout and the state.

    Args:
        spec: the job.
        engine: this worker's.
        peers: the other workers.
        order: of the run.
        take: loads a batch out of order.
        state: digest of this worker's whole state, as restored or initialised.
        is_new: no group of these has trained before: a shard of the smallest size is tried too.

    Raises:
        DivergenceError: states, layouts or samples differ, which no setting allows.
        RunConflictError: the canaries differ and `numerics.mixed` is `refuse`.
    """
    plan = order.shards_of(0)[0]
    message: dict[str, Any] = {
        "layout": engine.layout_digest,
        "state": state,
        "samples": ids_digest(order.step_ids(0)),
    }
    failure: SamestepError | None = None
    result = None
    try:
        found = engine.probe(plan, take)
        message["canary"] = [digest for digest, _ in found]
        result = found[0][1]
        if is_new:
            _probe_smallest(engine, order, take, plan)
    except SamestepError as error:
        failure = _with_advice(error, order, spec)
        message["error"] = str(failure)
    engine.progress.at(Phase.EXCHANGE, step=0)
    everyone = peers.gather(message)()
    if failure is not None:
        raise failure
    for rank, other in enumerate(everyone):
        if "error" in other:
            # It tells the recorder itself; what the others add would only hide where it was.
            raise PeerLostError(f"worker {rank} could not compute the canary: {other['error']}")
    for what in ("layout", "state", "samples"):
        odd = [rank for rank, other in enumerate(everyone) if other[what] != everyone[0][what]]
        if odd:
            raise DivergenceError(
                f"the {what} of worker {', '.join(map(str, odd))} differs from worker 0's when "
                "the group formed: model(), optimizer(), data() or order() does not do the same in "
                "every process (it may depend on time, hash order or the environment)"
            )
    digests = [(rank, digest) for rank, other in enumerate(everyone) for digest in other["canary"]]
    lines = [
        f"worker {rank}: canary {digest} against {digests[0][1]}"
        for rank, digest in digests
        if digest != digests[0][1]
    ]
    assert result is not None
    differing = _allowed(spec, lines, "the same shard gives other bits on different workers")
    return Formed(canary=result, digest=digests[0][1], differing=differing)


def nominal_weight(given: float | None, canary: ShardResult, num_samples: float) -> float:
    """The weight of a full shard, by which every shard's leaf is scaled.

    Args:
        given: kept with the run or set in the spec; None: the weight of shard 0 of step 0 where
            the workload gives weights of its own, else the number of samples.
        canary: result of that shard.
        num_samples: samples of a full shard.

    Raises:
        RunConflictError: that shard has no weight to go by.
    """
    if given is None:
        given = canary.weight if canary.own_weight else num_samples
    if given > 0:
        return given
    raise RunConflictError(
        "shard 0 of step 0 has weight 0, so it can't tell the weight of a full shard: set "
        "nominal_weight in the job file"
    )


def _probe_smallest(engine: StepEngine, order: Order, take: TakeApart, plan: ShardPlan) -> None:
    """Computes a shard of the smallest size of the epoch, where it is another size."""
    smallest = min(order.shard_sizes())
    if smallest < len(plan.ids):
        engine.probe(
            ShardPlan(
                step=plan.step,
                epoch=plan.epoch,
                shard=plan.shard,
                positions=plan.positions[:smallest],
                ids=plan.ids[:smallest],
            ),
            take,
        )


def _with_advice(error: SamestepError, order: Order, spec: JobSpec) -> SamestepError:
    if isinstance(error, UserCodeError) and BATCH_NORM_MESSAGE in str(error):
        smallest = min(order.shard_sizes())
        return WorkloadError(
            f"the data gives shards of {smallest} sample(s) ({order.epoch_size} samples, "
            f"batch_size {spec.batch_size}, shards {spec.shards}), and BatchNorm can't normalise "
            "a single value per channel: set drop_last: true, another batch_size or fewer "
            f"shards, or use GroupNorm\n{error}"
        )
    return error


def _allowed(spec: JobSpec, lines: list[str], what: str) -> list[str]:
    if lines and spec.numerics.mixed == "refuse":
        raise RunConflictError(
            f"{what}, so the bits would depend on which worker takes which shard:\n  "
            + "\n  ".join(lines)
            + "\nplace the workers on nodes of one kind, pin numerics.cpu_capability to the "
            "lowest, or set numerics.mixed: allow"
        )
    return lines
