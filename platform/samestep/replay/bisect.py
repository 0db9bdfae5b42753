"""Two runs that should be equal and are not: the first step, shard and tensor that differ.

The ledgers tell the step and, by each shard's loss, the shard. For the tensor both runs are taken
again up to that step: from the states before it through forward, gradients and update, in the order
in which a step computes them, compared bit for bit. Where the states before it differ already, the
step that made them so is looked for first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from samestep.checkpoint.storage import Storage
from samestep.errors import CannotReplayError, InputError
from samestep.exact.digest import canonical_float_hex
from samestep.replay.bench import Place
from samestep.replay.bisect_parting import Cause, Parting, Stray, find_parting
from samestep.replay.bisect_side import Apart, Side, Stage, first_apart, side_at
from samestep.replay.compare import Comparison, Verdict, compare_runs
from samestep.telemetry.ledger import steps
from samestep.telemetry.records import StepRecord, same_values

Ledgers = tuple[Mapping[int, StepRecord], Mapping[int, StepRecord]]


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
        sides = _both((a, b), places, step)
        reproduced = (sides[0].is_reproduced, sides[1].is_reproduced)
        apart = first_apart(*sides)
        parting = find_parting((a, b), places, (sides[0].walk, sides[1].walk), step=step)
        if parting.step != step:
            apart = first_apart(*_both((a, b), places, parting.step))
        notes += _conclusions(parting, apart, reproduced, ledgers)
    except (CannotReplayError, InputError) as error:
        what = "the tensor" if apart is None else "what made it differ"
        notes.append(f"{what} is not known: {error}")
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


def _both(
    runs: tuple[Storage, Storage], places: tuple[Place, Place], step: int
) -> tuple[Side, Side]:
    return side_at(runs[0], places[0], step=step), side_at(runs[1], places[1], step=step)


def _conclusions(
    parting: Parting,
    apart: Apart | None,
    reproduced: tuple[bool | None, bool | None],
    ledgers: Ledgers,
) -> Iterator[str]:
    if parting.cause is Cause.START:
        yield "the states with which the two began differ already; give both the same start"
    elif parting.cause is not Cause.CHECKPOINT and apart is not None and apart.stage is Stage.STATE:
        yield f"both come to step {apart.step} with the same state: its before_step parts them"
    elif parting.cause is Cause.UPDATE:
        yield (
            f"the values of step {parting.step} are the same, but not what its update made of them"
        )
    for stray in parting.strays:
        yield _told(stray, ledgers)
    if apart is not None:
        return
    odd = [name for name, same in zip("ab", reproduced, strict=True) if same is False]
    if odd:
        yield (
            f"taken again here both give the same, which is not what run {' and '.join(odd)} "
            "recorded: that run was computed differently then (another machine, other code, "
            "or a fault of the hardware)"
        )


def _told(stray: Stray, ledgers: Ledgers) -> str:
    """The run that was computed differently then, and in which of its steps that was."""
    first, last = stray.start, stray.checkpoint - 1
    for step in range(first, last):
        # Up to here the ledgers are equal: where they have a digest, the states were.
        if all(step in each and each[step].state_digest is not None for each in ledgers):
            first = step + 1
    which = f"step {last}" if first == last else f"one of the steps {first} to {last}"
    start = f"its state after {stray.start} steps" if stray.start else "its start"
    return (
        f"run {stray.run}, taken again here from {start}, does not come to its own checkpoint "
        f"after {stray.checkpoint} steps: it was computed differently then (another machine, other "
        f"code, or a fault of the hardware), in {which} or when that checkpoint was written"
    )
