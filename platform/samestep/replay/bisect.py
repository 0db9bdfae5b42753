"""Two runs that should be equal and are not: the first step, shard and tensor that differ.

The ledgers tell the step and, by each shard's loss, the shard. For the tensor both runs are taken
again up to that step: from the states before it through forward, gradients and update, in the order
in which a step computes them, compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.engine.step import Reduced
from samestep.errors import CannotReplayError, InputError, SamestepError
from samestep.exact import numerics
from samestep.exact.digest import canonical_float_hex, live_digest
from samestep.replay.bench import Place
from samestep.replay.compare import Comparison, Verdict, compare_runs
from samestep.replay.raised import Raised
from samestep.replay.run_source import RunSource
from samestep.replay.source import Source
from samestep.replay.taking import Taker
from samestep.replay.trace import Kind, Seen, Stats, trace_shard
from samestep.telemetry.ledger import steps
from samestep.telemetry.records import StepRecord, same_values


class Stage(StrEnum):
    """Parts of a step, in the order in which they are compared."""

    STATE = "state before the step"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced gradient"
    UPDATED = "state after the step"


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The first tensor that differs between the two runs taken again.

    Attributes:
        stage: of the step.
        shard: that it belongs to; -1 where it belongs to none.
        name: what it is.
        in_a: its values in run a, None where it has none of that name; in_b likewise.
    """

    stage: Stage
    shard: int
    name: str
    in_a: Stats | None
    in_b: Stats | None


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """What was found.

    Attributes:
        comparison: of the runs as a whole.
        step: the first step whose record differs; None: none does.
        shard: the first shard whose loss differs there; None: each shard's loss is the same.
        quantities: lines `quantity: in a against in b`.
        apart: the first tensor that differs when both are taken again; None: none does, or they
            could not be taken again.
        reproduced: whether each run's step, taken again, gives what its ledger says; None: not
            known.
        notes: what could not be done, and what follows.
    """

    comparison: Comparison
    step: int | None
    shard: int | None
    quantities: tuple[str, ...]
    apart: Apart | None
    reproduced: tuple[bool | None, bool | None]
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """The runs do not differ at all."""
        return self.comparison.verdict is Verdict.IDENTICAL


def bisect_runs(a: Storage, b: Storage, *, places: tuple[Place, Place]) -> Bisected:
    """Finds where two runs part.

    Args:
        a: a run directory.
        b: another.
        places: where each is taken again.

    Raises:
        InputError: they have no step in common.
    """
    comparison = compare_runs(a, b)
    notes: list[str] = []
    ledgers = steps(a), steps(b)
    found = _first_step(*ledgers)
    if found is None:
        if comparison.verdict is not Verdict.IDENTICAL:
            notes.append("no step's record differs: what differs was seen between steps")
        return _without_step(comparison, notes)
    step, quantities = found
    shard = _first_shard(ledgers[0][step], ledgers[1][step])
    apart: Apart | None = None
    reproduced: tuple[bool | None, bool | None] = (None, None)
    if comparison.spec:
        notes.append("the jobs differ in what decides bits, so the runs need not be equal")
    try:
        sides = _both((a, b), step, places)
        reproduced = (_reproduced(sides[0]), _reproduced(sides[1]))
        apart = _first_apart(*sides)
        earlier = _step_that_changed_it(*sides)
        if earlier is not None:
            notes.append(
                f"the values of step {earlier} are the same, but not what its update made of them"
            )
            apart = _first_apart(*_both((a, b), earlier, places))
        notes += _conclusions(apart, reproduced)
    except (CannotReplayError, InputError) as error:
        notes.append(f"the tensor is not known: {error}")
    return Bisected(
        comparison=comparison,
        step=step,
        shard=shard,
        quantities=tuple(quantities),
        apart=apart,
        reproduced=reproduced,
        notes=tuple(notes),
    )


def _without_step(comparison: Comparison, notes: list[str]) -> Bisected:
    return Bisected(
        comparison=comparison,
        step=None,
        shard=None,
        quantities=() if comparison.first is None else (comparison.first.quantity,),
        apart=None,
        reproduced=(None, None),
        notes=tuple(notes),
    )


def _first_step(
    a: Mapping[int, StepRecord], b: Mapping[int, StepRecord]
) -> tuple[int, list[str]] | None:
    for step in sorted(a.keys() & b.keys()):
        lines = same_values(a[step], b[step])
        if lines:
            return step, lines
    return None


def _first_shard(a: StepRecord, b: StepRecord) -> int | None:
    pairs = zip(a.shard_losses, b.shard_losses, strict=False)
    for shard, (left, right) in enumerate(pairs):
        if _bits(left) != _bits(right):
            return shard
    return None


def _bits(value: float | None) -> str:
    return "absent" if value is None else canonical_float_hex(value)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One run's step taken again.

    Attributes:
        states: digests of the state by the steps taken before it, from where it was taken again.
        tensors: every tensor by (stage, shard, name), in order; its digest and values.
        record: what the step came to; None where it raised.
        recorded: what the ledger says.
    """

    states: Mapping[int, str]
    tensors: Mapping[tuple[Stage, int, str], tuple[str, Stats]]
    record: StepRecord | None
    recorded: StepRecord | None


def _both(
    runs: tuple[Storage, Storage], step: int, places: tuple[Place, Place]
) -> tuple[_Side, _Side]:
    return _side(runs[0], step, places[0]), _side(runs[1], step, places[1])


def _side(run: Storage, step: int, place: Place) -> _Side:
    source = RunSource(run, step=step)
    with numerics.GlobalsKept(), _taker(source, place) as taker:
        states = {taker.step: live_digest(taker.state().tensors)}
        while taker.step < step:
            taker.settle(taker.take().values, with_hooks=False)
            states[taker.step] = live_digest(taker.state().tensors)
        taker.begin_step()
        found: dict[tuple[Stage, int, str], tuple[str, Stats]] = {}
        _note(found, Stage.STATE, taker.state().tensors)
        for plan in taker.plans(step):
            if plan.ids:
                for seen in trace_shard(taker, plan).seen:
                    key = _stage_of(seen), plan.shard, str(seen)
                    found[key] = seen.digest, seen.stats
        record = _taken(taker, found)
    recorded = source.records().get(step)
    return _Side(states=states, tensors=found, record=record, recorded=recorded)


def _step_that_changed_it(a: _Side, b: _Side) -> int | None:
    """The step after which the states first differ, where they agreed before it."""
    common = sorted(a.states.keys() & b.states.keys())
    for before, after in pairwise(common):
        if a.states[before] == b.states[before] and a.states[after] != b.states[after]:
            return before
    return None


@contextmanager
def _taker(source: Source, place: Place) -> Iterator[Taker]:
    taker = Taker(source, spec=source.spec, place=place, last_step=source.step)
    try:
        yield taker
    finally:
        taker.close()


def _taken(
    taker: Taker, found: dict[tuple[Stage, int, str], tuple[str, Stats]]
) -> StepRecord | None:
    named = dict(taker.parts.model.named_parameters())

    def note(reduced: Reduced) -> None:
        having = {id(parameter) for parameter in reduced.parameters}
        gradients = {n: p.grad for n, p in named.items() if id(p) in having and p.grad is not None}
        _note(found, Stage.REDUCED, gradients)

    try:
        taken = taker.take(on_reduced=note)
    except CannotReplayError:
        raise
    except SamestepError as error:
        raise CannotReplayError(f"step {taker.step} raised {Raised.of(error)}") from error
    _note(found, Stage.UPDATED, taker.state().tensors)
    return taken.record


def _note(
    found: dict[tuple[Stage, int, str], tuple[str, Stats]],
    stage: Stage,
    tensors: Mapping[str, Any],
) -> None:
    for name, tensor in tensors.items():
        found[stage, -1, name] = live_digest({"": tensor.detach()}), Stats.of(tensor)


def _stage_of(seen: Seen) -> Stage:
    is_forward = seen.kind in (Kind.INPUT, Kind.OUTPUT, Kind.LOSS)
    return Stage.FORWARD if is_forward else Stage.BACKWARD


def _first_apart(a: _Side, b: _Side) -> Apart | None:
    order = list(Stage)
    keys = [*a.tensors, *(key for key in b.tensors if key not in a.tensors)]
    place = {key: number for number, key in enumerate(keys)}
    # The forward passes of all shards before any backward: what a shard's gradient hangs on.
    for key in sorted(keys, key=lambda key: (order.index(key[0]), place[key])):
        left, right = a.tensors.get(key), b.tensors.get(key)
        if left is not None and right is not None and left[0] == right[0]:
            continue
        stage, shard, name = key
        return Apart(
            stage=stage,
            shard=shard,
            name=name,
            in_a=None if left is None else left[1],
            in_b=None if right is None else right[1],
        )
    return None


def _reproduced(side: _Side) -> bool | None:
    if side.record is None or side.recorded is None:
        return None
    recorded = replace(side.recorded, state_digest=None)
    return not same_values(recorded, side.record)


def _conclusions(apart: Apart | None, reproduced: tuple[bool | None, bool | None]) -> Iterator[str]:
    if apart is None:
        odd = [name for name, same in zip("ab", reproduced, strict=True) if same is False]
        if odd:
            yield (
                f"taken again here both give the same, which is not what run {' and '.join(odd)} "
                "recorded: that run was computed differently then (another machine, other code, "
                "or a fault of the hardware)"
            )
        return
    if apart.stage is Stage.STATE:
        yield (
            "the states from which the two are taken again differ already: the runs began with "
            "others, or their checkpoints are of others; give both the same start"
        )
