"""What a group does when it forms, before its first step.

Objects made anew are brought to where the state was taken; the workers show that they compute the
same; and an evaluation is tried, so that its errors come before a step was paid for.
"""

from __future__ import annotations

import torch

from samestep.checkpoint.state import State, collect, state_sha256
from samestep.engine.appraisal import require_metrics
from samestep.engine.canary import compare_canary, nominal_weight
from samestep.engine.feed import TakeApart
from samestep.engine.offers import Source
from samestep.engine.peers import Peers
from samestep.engine.resume import Resumption, Saved
from samestep.engine.setup import Built, before_step
from samestep.engine.step import Replica, StepEngine
from samestep.engine.survivor import Stage
from samestep.errors import WorkloadError
from samestep.exact.digest import live_digest
from samestep.spec import JobSpec


def re_enact(
    spec: JobSpec,
    built: Built,
    saved: Saved,
    resumption: Resumption,
    replicas: list[Replica],
) -> None:
    """Calls `before_step` as it had been called when the state was taken.

    Objects made anew need what it does beside changing the model. Of a state that was taken
    after the call, the tensors have its changes already: they are put back.
    """
    rest, is_new = saved.rest, resumption.built() is None
    settled = rest.stage is Stage.SETTLED
    if settled and (saved.step == built.end_step or (rest.begun and not is_new)):
        return
    if not settled and not is_new:
        return
    step = saved.step if settled else saved.step - 1
    before_step(spec, built.workload, replicas, step)
    if rest.begun or not settled:
        resumption.restore_again(built)


def compare_group(
    spec: JobSpec,
    *,
    built: Built,
    saved: Saved,
    engine: StepEngine,
    peers: Peers,
    take: TakeApart,
) -> list[str]:
    """Compares state, layout and one shard, and gives the engine the weight of a full shard.

    Args:
        spec: the job.
        built: the objects of the run, restored.
        saved: what they were restored from.
        engine: this worker's.
        peers: the other workers.
        take: loads a batch out of order.

    Returns:
        Lines that name how the workers differ; empty unless the spec allows it.

    Raises:
        DivergenceError: states, layouts or samples differ.
        PeerLostError: another worker could not compute the shard.
        RunConflictError: the workers compute other bits and `numerics.mixed` is `refuse`; or the
            shard has no weight to go by.
        UserCodeError: the workload raised.
        WorkloadError: the model's state grew in its forward.
    """
    whole = collect(built.parts, step=saved.step, extras={})
    digest = live_digest(whole.tensors)
    from_survivor = saved.source is Source.SURVIVOR
    if from_survivor:  # what was handed over is compared to the last value
        digest += state_sha256(State(step=saved.step, tensors={}, values=whole.values))
    formed = compare_canary(
        spec, engine, peers, built.order, take, digest, is_new=not from_survivor
    )
    now = collect(built.parts, step=saved.step, extras={})
    grown = now.tensors.keys() - whole.tensors.keys()
    if grown:
        raise WorkloadError(
            f"the model's state gets {', '.join(sorted(grown))} in its first forward, so a "
            "fresh model could not take a checkpoint of it: register buffers in model(), with "
            "their shapes"
        )
    engine.nominal_weight = nominal_weight(
        saved.nominal_weight or spec.nominal_weight, formed.canary, engine.nominal_weight
    )
    return formed.differing


def try_evaluation(
    spec: JobSpec, *, built: Built, saved: Saved, peers: Peers, device: torch.device
) -> None:
    """Evaluates one batch: what is wrong with evaluate() shows before a step.

    Not where there is no evaluation, the run is at its end, or a survivor's group has tried it.

    Raises:
        UserCodeError: evaluate() raised.
        WorkloadError: a metric that something hangs on is not there.
    """
    is_new = saved.source is not Source.SURVIVOR
    if built.evaluation is None or saved.step >= built.end_step or not is_new:
        return
    metrics = built.evaluation.run(
        built.parts.model, peers, step=saved.step, device=device, max_batches=1
    )
    require_metrics(spec, built.schedule, metrics)
