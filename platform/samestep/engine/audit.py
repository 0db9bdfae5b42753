"""The audit: now and then one shard is computed again elsewhere, and its gradients are compared.

A machine that computes wrongly now and then (silent data corruption) raises nothing: its bits are
just others. Both workers digest the gradients as they enter the sums; where they differ, everybody
computes the shard once more, and the majority tells who was wrong. That is before the update, so
the state is clean and the step can be taken again.

Two shards that a worker adds up in place (an aligned pair) are audited together, because the second
one alone lies nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.exact.seeds import Purpose, stream_key
from samestep.exact.tree import shard_range
from samestep.spec import JobSpec

Digests = Mapping[str, str]
"""By parameter."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is audited at a step, the same on every worker.

    Attributes:
        step: the step.
        shard: the shard whose gradients are looked at.
        computed: that shard, after the one it is added to in place, if there is one.
        owner: (world rank, replica) that takes the shard as a part of the step.
        auditor: the same of the one that computes it again; the owner where it is alone.
    """

    step: int
    shard: int
    computed: tuple[int, ...]
    owner: tuple[int, int]
    auditor: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An audit that failed.

    Attributes:
        task: what was audited.
        parameter: the first whose gradient differs.
        digests: of its gradient: the owner's and the auditor's.
        repeats: of its gradient, by world rank, computed once more by everybody.
        culprit: world rank of the worker that was wrong; None where that can't be told.
        right: digest of its gradient as the worker found right computed it; None as with `culprit`.
        is_transient: it was right when it computed the shard once more.
    """

    task: Task
    parameter: str
    digests: tuple[str, str]
    repeats: tuple[str, ...]
    culprit: int | None
    right: str | None
    is_transient: bool

    def describe(self, hosts: Sequence[str]) -> str:
        """The finding in a sentence; `hosts` by world rank."""
        task, owner, auditor = self.task, self.task.owner[0], self.task.auditor[0]
        what = (
            f"the gradient of {self.parameter} in shard {task.shard} of step {task.step} is not "
            f"the same on worker {owner} ({self.digests[0]}) and, computed again, on worker "
            f"{auditor} ({self.digests[1]})"
        )
        if self.culprit is None:
            return f"{what}; computed once more it does not tell which of them was wrong"
        again = "right" if self.is_transient else "wrong"
        return (
            f"{what}; worker {self.culprit} on {hosts[self.culprit]} computed wrongly, and was "
            f"{again} when everybody computed it once more"
        )


def plan_audit(
    spec: JobSpec,
    step: int,
    sizes: Sequence[int],
    *,
    world_size: int,
    replicas: Sequence[range],
    pairs_in_place: bool,
) -> Task | None:
    """What is audited at a step; None: nothing.

    Args:
        spec: the job.
        step: the step.
        sizes: samples of each shard.
        world_size: number of workers.
        replicas: the shards of each replica of this process; several only where it is alone.
        pairs_in_place: the second shard of an aligned pair is added to the first in place.
    """
    every = spec.incidents.audit_every
    filled = [shard for shard, size in enumerate(sizes) if size]
    if not every or (step + 1) % every or not filled:
        return None
    key = stream_key(spec.seed, Purpose.AUDIT, step)
    shard = filled[int.from_bytes(key[:8], "little") % len(filled)]
    if world_size > 1:
        ranges = [shard_range(spec.shards, world_size, rank) for rank in range(world_size)]
        places = [(rank, 0) for rank in range(world_size)]
    else:
        ranges, places = list(replicas), [(0, number) for number in range(len(replicas))]
    owner = next(number for number, shards in enumerate(ranges) if shard in shards)
    others = [number for number in range(len(places)) if number != owner] or [owner]
    auditor = others[int.from_bytes(key[8:16], "little") % len(others)]
    is_second = pairs_in_place and shard % 2 == 1 and shard - 1 in ranges[owner]
    return Task(
        step=step,
        shard=shard,
        computed=(shard - 1, shard) if is_second else (shard,),
        owner=places[owner],
        auditor=places[auditor],
    )


def differing(owned: Digests, audited: Digests) -> str | None:
    """The first parameter whose digests differ; None where all agree."""
    return next((name for name in owned if owned[name] != audited.get(name)), None)


def judged(
    task: Task, parameter: str, owned: Digests, audited: Digests, repeats: Sequence[Digests]
) -> Finding:
    """Who was wrong, by what most of the workers get when all compute the shard once more.

    Args:
        task: what was audited.
        parameter: the first whose gradient differs.
        owned: digests of the owner, as the gradients entered the step's sums.
        audited: of the auditor.
        repeats: by world rank.
    """
    given = [repeat[parameter] for repeat in repeats]
    first, second = owned[parameter], audited[parameter]
    votes = Counter([*given, second, first])
    right, most = votes.most_common(1)[0]
    tied = sum(1 for count in votes.values() if count == most) > 1
    culprit = None
    if not tied and right in (first, second):
        culprit = task.auditor[0] if right == first else task.owner[0]
    return Finding(
        task=task,
        parameter=parameter,
        digests=(first, second),
        repeats=tuple(given),
        culprit=culprit,
        right=None if culprit is None else right,
        is_transient=culprit is not None and given[culprit] == right,
    )
