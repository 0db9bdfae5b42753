"""Carries an audit out within a step (see `audit`): beside the shards, in the buffers there are."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from samestep.engine.audit import Digests, Task, differing, judged, plan_audit
from samestep.errors import CorruptionError
from samestep.exact.order import ShardPlan

if TYPE_CHECKING:
    from samestep.engine.step import StepEngine, TakeBatch


def plan(engine: StepEngine, step: int, plans: list[ShardPlan]) -> Task | None:
    """What is audited at a step; whoever owns it takes digests when it gets there."""
    rank = engine.peers.world_rank
    task = plan_audit(
        engine.spec,
        step,
        [len(shard.ids) for shard in plans],
        world_size=engine.peers.world_size,
        replicas=[replica.shards for replica in engine.replicas],
        pairs_in_place=engine.pairs_in_place,
    )
    for number, replica in enumerate(engine.replicas):
        is_owner = task is not None and task.owner == (rank, number)
        replica.buckets.watch(replica.shards.index(task.shard) if task and is_owner else None)
    return task


def compute_apart(
    engine: StepEngine, task: Task, plans: list[ShardPlan], take: TakeBatch
) -> Digests:
    """Computes the audited gradients beside the step, in the active buffers; no trace is left.

    To be called while these hold nothing that is needed.
    """
    replica = engine.replicas[task.auditor[1]]
    replica.buckets.start_step()
    replica.keeper.start_step()
    try:
        for number, shard in enumerate(task.computed):
            replica.buckets.start_apart(on_top=number > 0)
            result = engine.forward(replica, plans[shard], take, {})
            if result.weight > 0:
                engine.backward(replica, result, task.step, shard, dry=True)
            replica.buckets.end_apart()
        return replica.buckets.leaf_digests()
    finally:
        replica.keeper.rewind()


def compare(
    engine: StepEngine,
    task: Task,
    audited: Digests,
    plans: list[ShardPlan],
    take: TakeBatch,
    *,
    computed_s: float,
) -> float:
    """Compares the audited gradients; the exchange of the step is over, its update is not.

    Args:
        engine: the step's.
        task: what is audited.
        audited: digests of the auditor; empty elsewhere.
        plans: of all shards.
        take: loads a batch beside the order.
        computed_s: seconds that this worker took to compute the shard apart.

    Returns:
        Seconds that the audit took: the auditor's to compute, and these.

    Raises:
        CorruptionError: they differ; tells which worker was wrong, where that can be told.
    """
    began_s = time.perf_counter()
    owned: Digests = {}
    if task.owner[0] == engine.peers.world_rank:
        owned = engine.replicas[task.owner[1]].buckets.seen
    everyone = engine.peers.gather([owned, audited, os.uname().nodename, computed_s])()
    owned, audited = everyone[task.owner[0]][0], everyone[task.auditor[0]][1]
    parameter = differing(owned, audited)
    if parameter is None:
        return float(everyone[task.auditor[0]][3]) + time.perf_counter() - began_s
    for replica in engine.replicas:
        replica.keeper.undo_step()  # the step will not be applied
    again = compute_apart(engine, task, plans, take)
    finding = judged(task, parameter, owned, audited, engine.peers.gather(again)())
    hosts = [host for _, _, host, _ in everyone]
    raise CorruptionError(
        finding.describe(hosts),
        {
            "culprit": finding.culprit,
            "host": "" if finding.culprit is None else hosts[finding.culprit],
            "parameter": finding.parameter,
            "shard": task.shard,
            "computed": list(task.computed),
            "owner": task.owner[0],
            "auditor": task.auditor[0],
            "digests": list(finding.digests),
            "repeats": list(finding.repeats),
            "right": finding.right,
            "hosts": hosts,
            "transient": finding.is_transient,
            "policy": engine.spec.incidents.audit,
        },
    )
