"""One of two runs that are bisected: its steps taken again, and every tensor of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.engine.step import Reduced
from samestep.errors import CannotReplayError, SamestepError
from samestep.exact import numerics
from samestep.exact.digest import live_digest
from samestep.names import Event
from samestep.replay.bench import Place
from samestep.replay.raised import Raised
from samestep.replay.run_source import RunSource
from samestep.replay.source import Source
from samestep.replay.taking import Taken, Taker
from samestep.replay.trace import Kind, Seen, Stats, trace_shard
from samestep.telemetry.ledger import events
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
        step: in which it does.
        stage: of the step.
        shard: that it belongs to; -1 where it belongs to none.
        name: what it is.
        in_a: its values in run a, None where it has none of that name; in_b likewise.
    """

    step: int
    stage: Stage
    shard: int
    name: str
    in_a: Stats | None
    in_b: Stats | None


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Steps of a run taken again.

    Attributes:
        start: steps before the state that they are taken from: a checkpoint, or 0.
        states: digests of the state by the steps taken before it, from `start` on.
    """

    start: int
    states: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run's step taken again.

    Attributes:
        step: its number.
        walk: to the state before it.
        tensors: every tensor by (stage, shard, name), in order; its digest and values.
        record: what the step came to.
        recorded: what the ledger says.
    """

    step: int
    walk: Walk
    tensors: Mapping[tuple[Stage, int, str], tuple[str, Stats]]
    record: StepRecord
    recorded: StepRecord | None

    @property
    def is_reproduced(self) -> bool | None:
        """Whether the step gives what the ledger says; None: that says nothing."""
        if self.recorded is None:
            return None
        return not same_values(replace(self.recorded, state_digest=None), self.record)


def forked_after(run: Storage) -> int:
    """Steps that a run took over from the one it was forked from: they are not its own."""
    return max((event.step for event in events(run, Event.FORKED)), default=0)


def walk_to(run: Storage, place: Place, *, until: int) -> Walk:
    """Takes a run's steps again from the newest checkpoint before `until` steps, or its start.

    Raises:
        CannotReplayError: workload or data are not here, or a fork has no such checkpoint.
    """
    source = RunSource(run, step=until - 1)
    with numerics.GlobalsKept(), _taker(source, place) as taker:
        if taker.step < (begins := forked_after(run)):
            raise CannotReplayError(
                f"{run.uri} was forked after {begins} steps, and has no checkpoint from there to "
                f"{until - 1} steps any more"
            )
        return _walk(taker, until)


def side_at(run: Storage, place: Place, *, step: int) -> Side:
    """Takes a step again, from the newest checkpoint at or before it, with every tensor of it.

    Raises:
        CannotReplayError: workload or data are not here, or a step raised.
    """
    source = RunSource(run, step=step)
    with numerics.GlobalsKept(), _taker(source, place) as taker:
        walk = _walk(taker, step)
        taker.begin_step()
        found: dict[tuple[Stage, int, str], tuple[str, Stats]] = {}
        _note(found, Stage.STATE, taker.state().tensors)
        for plan in taker.plans(step):
            if plan.ids:
                for seen in trace_shard(taker, plan).seen:
                    key = _stage_of(seen), plan.shard, str(seen)
                    found[key] = seen.digest, seen.stats
        record = _noted(taker, found)
    return Side(
        step=step, walk=walk, tensors=found, record=record, recorded=source.records().get(step)
    )


def first_apart(a: Side, b: Side) -> Apart | None:
    """The first tensor of a step that differs; None: none does."""
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
            step=a.step,
            stage=stage,
            shard=shard,
            name=name,
            in_a=None if left is None else left[1],
            in_b=None if right is None else right[1],
        )
    return None


@contextmanager
def _taker(source: Source, place: Place) -> Iterator[Taker]:
    taker = Taker(source, spec=source.spec, place=place, last_step=source.step)
    try:
        yield taker
    finally:
        taker.close()


def _walk(taker: Taker, until: int) -> Walk:
    start = taker.step
    states = {start: live_digest(taker.state().tensors)}
    while taker.step < until:
        taker.settle(_taken(taker).values, with_hooks=False)
        states[taker.step] = live_digest(taker.state().tensors)
    return Walk(start=start, states=states)


def _noted(taker: Taker, found: dict[tuple[Stage, int, str], tuple[str, Stats]]) -> StepRecord:
    named = dict(taker.parts.model.named_parameters())

    def note(reduced: Reduced) -> None:
        having = {id(parameter) for parameter in reduced.parameters}
        gradients = {n: p.grad for n, p in named.items() if id(p) in having and p.grad is not None}
        _note(found, Stage.REDUCED, gradients)

    taken = _taken(taker, note)
    _note(found, Stage.UPDATED, taker.state().tensors)
    return taken.record


def _taken(taker: Taker, on_reduced: Callable[[Reduced], None] | None = None) -> Taken:
    step = taker.step
    try:
        return taker.take(on_reduced=on_reduced)
    except CannotReplayError:
        raise
    except SamestepError as error:
        raise CannotReplayError(f"step {step} raised {Raised.of(error)}") from error


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
