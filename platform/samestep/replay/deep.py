"""Looking closer at a step, after its verdict: where the first odd value comes from.

A pass of its own over each shard, from the state before the step, so that the verdict can't change.
"Odd" is a value that is not finite; where all are finite, a tensor that is far larger than the same
one in the steps before, or, where those are not here, in the other shards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from samestep.errors import SamestepError
from samestep.exact.order import ShardPlan
from samestep.replay.alone import Alone, Sample, take_alone
from samestep.replay.bench import Place
from samestep.replay.shown import Shown, show_sample
from samestep.replay.source import Source
from samestep.replay.taking import Taker
from samestep.replay.trace import Kind, Seen, ShardTrace, Stats, trace_shard, weights_of
from samestep.replay.verdict import Replayed

STEPS_BEFORE: Final = 4
"""Steps before it that a step is compared with, where their data is here."""
FACTOR: Final = 8.0
"""A tensor stands out when it is so many times as large (root mean square) as usual."""
MAX_SHOWN: Final = 8
_FORWARD: Final = (Kind.INPUT, Kind.OUTPUT, Kind.LOSS)


@dataclass(frozen=True, kw_only=True)
class First:
    """The first tensor that is odd.

    Attributes:
        seen: the tensor.
        shard: that it belongs to; -1 for a weight, which belongs to none.
        why: in words.
    """

    seen: Seen
    shard: int
    why: str

    def __str__(self) -> str:
        where = f" in shard {self.shard}" if self.shard >= 0 else " before the step"
        return f"{self.seen}{where}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Deep:
    """What a closer look found.

    Attributes:
        first: the first odd tensor, in the order of parameters, forward, backward, buffers; None:
            none is.
        traces: of the step's shards.
        before: of the same shard in the steps before, oldest first; empty where they are not here.
        weights: parameters and buffers before the step.
        alone: samples taken alone.
        shown: the first of those that do it, for people to look at.
        notes: what could not be done, and why.
    """

    first: First | None
    traces: tuple[ShardTrace, ...]
    before: tuple[ShardTrace, ...]
    weights: tuple[Seen, ...]
    alone: Alone
    shown: tuple[Shown, ...] = ()
    notes: tuple[str, ...] = ()


def look_closer(taker: Taker, found: Replayed, source: Source, place: Place) -> Deep | None:
    """Looks at every shard of the step, at its samples, and at the steps before it.

    Args:
        taker: that took the step; it is at the state before it afterwards.
        found: the verdict; its state before the step is where to look from.
        source: of the replay.
        place: where to compute.

    Returns:
        None where the step was not reached.
    """
    if found.before is None:
        return None
    taker.go_back(found.before)
    weights = weights_of(taker.parts.model)
    plans = [plan for plan in taker.plans(found.step) if plan.ids]
    traces = [trace_shard(taker, plan) for plan in plans]
    notes: list[str] = []
    before = _traces_before(source, place, found, notes)
    first = _first(weights, traces, before)
    suspected = sorted(plans, key=lambda plan: not _is_suspected(plan, first, traces))
    alone = take_alone(taker, suspected)
    by_shard = {plan.shard: plan for plan in plans}
    shown = [show_sample(taker, by_shard[s.shard], s) for s in alone.culprits[:MAX_SHOWN]]
    return Deep(
        first=first,
        traces=tuple(traces),
        before=tuple(before),
        weights=tuple(weights),
        alone=alone,
        shown=tuple(shown),
        notes=tuple(notes),
    )


def _traces_before(
    source: Source, place: Place, found: Replayed, notes: list[str]
) -> list[ShardTrace]:
    """Shard 0 of the steps before, by a taker of its own; none where there is no step before."""
    first_step = max(found.first_step, found.step - STEPS_BEFORE)
    if first_step >= found.step:
        return []
    traces: list[ShardTrace] = []
    try:
        taker = Taker(source, spec=source.spec, place=place, last_step=found.step - 1)
        try:
            while taker.step < found.step:
                taker.begin_step()
                if taker.step >= first_step:
                    traces.append(trace_shard(taker, taker.plans(taker.step)[0]))
                taker.settle(taker.take().values, with_hooks=False)
        finally:
            taker.close()
    except SamestepError as error:
        notes.append(f"the steps before can't be looked at: {str(error).splitlines()[0]}")
    return traces


def _first(
    weights: Sequence[Seen], traces: Sequence[ShardTrace], before: Sequence[ShardTrace]
) -> First | None:
    broken_weights = [seen for seen in weights if seen.stats.num_not_finite]
    for seen in broken_weights:
        if seen.kind is Kind.WEIGHT:
            return First(seen=seen, shard=-1, why=_not_finite(seen.stats))
    for kinds in (_FORWARD, tuple(set(Kind) - set(_FORWARD))):
        broken = [
            (place, trace.shard, seen)
            for trace in traces
            for place, seen in enumerate(trace.seen)
            if seen.kind in kinds and seen.stats.num_not_finite
        ]
        if broken:
            _, shard, seen = min(broken, key=lambda item: item[:2])
            return First(seen=seen, shard=shard, why=_not_finite(seen.stats))
    for seen in broken_weights:  # a buffer that nothing was computed from, as an average
        return First(seen=seen, shard=-1, why=_not_finite(seen.stats))
    return _standing_out(traces, before)


def _standing_out(traces: Sequence[ShardTrace], before: Sequence[ShardTrace]) -> First | None:
    """The first tensor, forward before backward, that is far larger than usual."""
    others = "the steps before" if before else "the other shards"
    for forward in (True, False):
        found: list[tuple[int, int, Seen, float]] = []
        for trace in traces:
            compared = before or [other for other in traces if other is not trace]
            usual = _usual(compared)
            found += [
                (place, trace.shard, seen, seen.stats.rms / usual[seen.kind, seen.name])
                for place, seen in enumerate(trace.seen)
                if (seen.kind in _FORWARD) is forward
                and usual.get((seen.kind, seen.name), 0.0) > 0
                and seen.stats.rms > FACTOR * usual[seen.kind, seen.name]
            ]
        if found:
            _, shard, seen, factor = min(found, key=lambda item: item[:2])
            why = (
                f"{factor:.3g} times as large as in {others} (root mean square "
                f"{seen.stats.rms:.4g})"
            )
            return First(seen=seen, shard=shard, why=why)
    return None


def _usual(traces: Sequence[ShardTrace]) -> dict[tuple[Kind, str], float]:
    """Median of the root mean squares of each tensor."""
    values: dict[tuple[Kind, str], list[float]] = {}
    for trace in traces:
        for seen in trace.seen:
            if math.isfinite(seen.stats.rms):
                values.setdefault((seen.kind, seen.name), []).append(seen.stats.rms)
    return {key: statistics.median(each) for key, each in values.items()}


def _not_finite(stats: Stats) -> str:
    return f"{stats.num_not_finite} of {stats.numel} values are not finite"


def _is_suspected(plan: ShardPlan, first: First | None, traces: Sequence[ShardTrace]) -> bool:
    raised = any(trace.shard == plan.shard and trace.raised is not None for trace in traces)
    return raised or (first is not None and first.shard == plan.shard)


def describe_deep(found: Deep) -> list[str]:
    """What was found, in lines."""
    lines = ["looking closer:"]
    if found.first is not None:
        lines.append(f"  first: {found.first}")
    for trace in found.traces:
        if trace.raised is not None:
            inside = f" inside {trace.inside}" if trace.inside else ""
            lines.append(f"  shard {trace.shard} raises {trace.raised}{inside}")
    if found.first is None and not any(trace.raised for trace in found.traces):
        lines.append("  every value is finite, and none stands out")
    lines += [f"  {line}" for line in describe_alone(found.alone)]
    return lines + [f"  {note}" for note in (*found.notes, *found.alone.notes)]


def describe_alone(alone: Alone) -> list[str]:
    """Which samples do it, in lines."""
    if not alone.culprits:
        return [f"no sample does it alone ({alone.num_looked_at} of {alone.num_samples} taken)"]
    if len(alone.culprits) == alone.num_looked_at > 1:
        return [f"each of {alone.num_looked_at} samples does it alone: it is not the data"]
    lines = [f"samples that do it alone ({alone.num_looked_at} of {alone.num_samples} taken):"]
    lines += [f"  {_sample(sample)}" for sample in alone.culprits[:10]]
    more = len(alone.culprits) - 10
    return lines + ([f"  and {more} more"] if more > 0 else [])


def _sample(sample: Sample) -> str:
    text = f"sample {sample.id} (shard {sample.shard}, place {sample.place})"
    if sample.raised is not None:
        return f"{text}: raises {sample.raised}"
    out = f", {sample.score:.3g} deviations from the others" if sample.score else ""
    return f"{text}: loss {sample.loss:.6g}, gradient norm {sample.grad_norm:.6g}{out}"


def deep_json(found: Deep | None) -> dict[str, Any] | None:
    """As a JSON object."""
    if found is None:
        return None
    first = found.first
    return {
        "first": None
        if first is None
        else {
            "kind": str(first.seen.kind),
            "name": first.seen.name,
            "module": first.seen.module,
            "shard": first.shard,
            "why": first.why,
        },
        "raised": [
            {"shard": trace.shard, "raised": str(trace.raised), "inside": trace.inside}
            for trace in found.traces
            if trace.raised is not None
        ],
        "samples": [
            {"id": s.id, "shard": s.shard, "place": s.place, "text": _sample(s)}
            for s in found.alone.culprits
        ],
        "samples_taken_alone": found.alone.num_looked_at,
        "notes": [*found.notes, *found.alone.notes],
    }
