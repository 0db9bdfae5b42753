"""A step taken again, and what its values, or what it raised, say against what was recorded."""

from __future__ import annotations

import math
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final

from samestep.checkpoint.state import State
from samestep.engine.aftermath import WEIGHTS
from samestep.engine.detection import not_finite
from samestep.errors import CannotReplayError, ExitStatus, SamestepError
from samestep.exact import numerics
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.replay.audited import Audit, Audited
from samestep.replay.bench import Place
from samestep.replay.raised import Raised
from samestep.replay.source import Source
from samestep.replay.surroundings import surroundings
from samestep.replay.taking import Taken, Taker
from samestep.telemetry.records import StepRecord, same_values

OUTSIDE: Final = (
    IncidentKind.CRASH,
    IncidentKind.HANG,
    IncidentKind.OUT_OF_MEMORY,
    IncidentKind.STRAGGLER,
)
"""Kinds whose cause may lie outside of what a step computes: it need not come again."""


class Verdict(StrEnum):
    """What a replay found."""

    REPRODUCED = "reproduced"
    WITHIN_TOLERANCE = "within_tolerance"
    NOT_REPRODUCED = "not_reproduced"


STATUS: Final = {
    Verdict.REPRODUCED: ExitStatus.DONE,
    Verdict.WITHIN_TOLERANCE: ExitStatus.EQUAL_WITHIN_TOLERANCE,
    Verdict.NOT_REPRODUCED: ExitStatus.DIFFERENT,
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One step, against what was recorded of it.

    Attributes:
        step: its number.
        found: what it came to now; None where it raised.
        recorded: what it came to then; None where that is not known.
        grad_norm: now, also where the record does not tell it.
        differences: lines `quantity: then against now`, bit for bit.
        apart: those of them that are beyond the tolerance; the same without one.
    """

    step: int
    found: StepRecord | None
    recorded: StepRecord | None
    grad_norm: float | None = None
    differences: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay.

    Attributes:
        verdict: over all steps that were compared.
        step: the step that was to be taken again.
        first_step: the first one that was taken.
        steps: all that were taken, in order.
        incident: at the step; None where it is any step.
        raised: by the step now.
        raised_then: by the step in the run, as the incident tells.
        audited: the gradients of an audit that failed, computed here too; None: there was none.
        numerics: how the binding numerics differ from those of the run.
        tolerance: what values were held to where they do; else None.
        surroundings: how code and packages differ, as far as that is known; compared by nobody.
        notes: what else there is to know.
        ended: how the process that took the step ended or stood still; empty where it did neither.
        stacks: of its threads, where it stood still.
        weights: that are not finite after the update, where the incident tells of such; else None.
        before: the state right before the step; None where it was not reached.
    """

    verdict: Verdict
    step: int
    first_step: int
    steps: tuple[Compared, ...]
    incident: Incident | None
    raised: Raised | None = None
    raised_then: Raised | None = None
    audited: Audited | None = None
    numerics: tuple[str, ...] = ()
    tolerance: float | None = None
    surroundings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ended: str = ""
    stacks: str = ""
    weights: Weights | None = None
    before: State | None = field(default=None, repr=False, compare=False)

    @property
    def num_compared(self) -> int:
        """Steps of which something was known to compare with."""
        return sum(item.recorded is not None for item in self.steps)

    @property
    def is_behind(self) -> bool:
        """It went on from behind the update of the step, which itself was not taken."""
        return not self.ended and self.first_step > self.step

    @property
    def at_step(self) -> Compared | None:
        """The step itself; None where a step before it raised."""
        return next((item for item in self.steps if item.step == self.step), None)

    @property
    def first_difference(self) -> tuple[int, str] | None:
        """(step, quantity with both values) of the first difference in bits; None: there is none.

        Where something is beyond the tolerance, the first of that.
        """
        for which in ("apart", "differences"):
            for item in self.steps:
                lines: Sequence[str] = getattr(item, which)
                if lines:
                    return item.step, lines[0]
        return None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Names of the weights that are not finite after the update of a step.

    Attributes:
        then: in the run.
        now: here.
    """

    then: tuple[str, ...]
    now: tuple[str, ...]

    def __str__(self) -> str:
        now, then = (", ".join(names) or "none" for names in (self.now, self.then))
        told = "as in the run" if now == then else f"in the run: {then}"
        return f"weights that are not finite after the update: {now}; {told}"


BeforeStep = Callable[[Taker], None]
OnCompared = Callable[[Compared], None]


def replay(
    taker: Taker,
    source: Source,
    *,
    num_after: int = 0,
    before_step: BeforeStep = lambda taker: None,
    on_step: Callable[[int], None] = lambda step: None,
    on_compared: OnCompared = lambda compared: None,
) -> Replayed:
    """Takes the steps from the source's state through its step, and compares each.

    Args:
        taker: made of the source, at its state.
        source: what to compare with.
        num_after: steps to go on with behind it.
        before_step: called when all is ready for the step.
        on_step: told of each step before it is taken.
        on_compared: told of each step whose values were there.

    Raises:
        CannotReplayError: something is missing.
    """
    differing = numerics.differences(source.numerics, taker.fingerprint)
    if taker.spec.reduction == "fast":
        differing.append("reduction: 'fast' against 'exact'")
    tolerance = None
    if differing:
        tolerance = numerics.tolerance(taker.spec.precision, source.numerics, taker.fingerprint)
    first_step = taker.step
    passage = _Passage(
        taker, source, tolerance=tolerance, before_step=before_step, on_compared=on_compared
    )
    if taker.is_behind:
        on_step(source.step)
        passage.take_rest()
    while passage.raised is None and taker.step <= source.step + num_after:
        on_step(taker.step)
        passage.take_step()
    then = _raised_then(source.incident)
    verdict, notes = _verdict(source, passage, then)
    return Replayed(
        verdict=verdict,
        step=source.step,
        first_step=first_step,
        steps=tuple(passage.compared),
        incident=source.incident,
        raised=passage.raised,
        raised_then=then,
        audited=passage.audited,
        numerics=tuple(differing),
        tolerance=tolerance,
        surroundings=tuple(surroundings(source.provenance, taker.workload.folder)),
        notes=tuple(notes),
        weights=passage.weights,
        before=passage.before,
    )


class _Passage:
    """Takes steps, and keeps what each came to; the attributes are those of `Replayed`."""

    def __init__(
        self,
        taker: Taker,
        source: Source,
        *,
        tolerance: float | None,
        before_step: BeforeStep,
        on_compared: OnCompared,
    ) -> None:
        self._taker, self._source, self._tolerance = taker, source, tolerance
        self._before_step, self._on_compared = before_step, on_compared
        self._known = _Known(source)
        self._audit = Audit.in_incident(source.incident, num_shards=taker.spec.shards)
        self.compared: list[Compared] = []
        self.raised: Raised | None = None
        self.before: State | None = None
        self.audited: Audited | None = None
        self.weights: Weights | None = None

    def take_rest(self) -> None:
        """What remains of the source's step, whose update the state is behind of."""
        self.weights = _weights_of(self._source, self._taker)
        self._before_step(self._taker)
        with_hooks = _may_raise(self._source)
        self.raised = _raised_in(partial(self._taker.settle_rest, with_hooks=with_hooks))
        self.compared.append(Compared(step=self._source.step, found=None, recorded=None))

    def take_step(self) -> None:
        """The next step, and what follows its update."""
        taker, source, step = self._taker, self._source, self._taker.step
        found: list[Taken] = []
        self.raised = _raised_in(lambda: found.append(self._taken()))
        if not found:
            known = self._known.of(step, None)
            self.compared.append(Compared(step=step, found=None, recorded=known))
            return
        [taken] = found
        self.compared.append(_compared(taken, self._known.of(step, taken.record), self._tolerance))
        self._on_compared(self.compared[-1])
        if step == source.step:
            self.weights = _weights_of(source, taker)
        with_hooks = step == source.step and _may_raise(source)
        self.raised = _raised_in(partial(taker.settle, taken.values, with_hooks=with_hooks))

    def _taken(self) -> Taken:
        taker = self._taker
        if taker.step == self._source.step:
            taker.begin_step()
            self.before = taker.state()
            self._before_step(taker)
            if self._audit is not None:
                gradients = taker.gradients_apart(self._audit.computed)
                self.audited = Audited.of(self._audit, gradients)
        return taker.take()


def take_again(
    source: Source,
    place: Place,
    *,
    num_after: int = 0,
    before_step: BeforeStep = lambda taker: None,
    on_step: Callable[[int], None] = lambda step: None,
    on_compared: OnCompared = lambda compared: None,
) -> tuple[Replayed, Taker]:
    """`replay` with a new taker, which is given back for a closer look; close it."""
    taker = Taker(source, spec=source.spec, place=place, last_step=source.step + num_after)
    found = replay(
        taker,
        source,
        num_after=num_after,
        before_step=before_step,
        on_step=on_step,
        on_compared=on_compared,
    )
    return found, taker


def _raised_in(call: Callable[[], None]) -> Raised | None:
    """What a call raises, as far as that is not about the replay itself."""
    try:
        call()
    except CannotReplayError:
        raise
    except SamestepError as error:
        _unless_left(error)
        return Raised.of(error)
    return None


def _weights_of(source: Source, taker: Taker) -> Weights | None:
    """Those that are not finite; None where the incident tells of none."""
    then = source.incident.seen.get(WEIGHTS) if source.incident is not None else None
    if not isinstance(then, list | tuple):
        return None
    return Weights(then=tuple(map(str, then)), now=tuple(not_finite(taker.parts.model)))


def _unless_left(error: SamestepError) -> None:
    """A debugger that was left within the workload's code raises through it."""
    if isinstance(error.__cause__, BdbQuit):
        raise error.__cause__


class _Known:
    """What is known of the steps: records, and what the incident saw where there is none."""

    def __init__(self, source: Source) -> None:
        self._records = source.records()
        incident = source.incident
        self._step = incident.step if incident is not None else -1
        seen = incident.seen if incident is not None else {}
        numbers = {name: _number(seen.get(name)) for name in ("loss", "grad_norm")}
        self._seen = {name: value for name, value in numbers.items() if value is not None}

    def of(self, step: int, now: StepRecord | None) -> StepRecord | None:
        """The record of a step; what an incident did not see of it is as it is now."""
        if step in self._records:
            return self._records[step]
        if step != self._step or not self._seen or now is None:
            return None
        seen: dict[str, float | None] = dict(self._seen)
        if now.skipped and math.isnan(seen.get("grad_norm") or 0.0):
            seen["grad_norm"] = None  # as a record tells that of a step without an update
        return StepRecord(**{**vars(now), **seen})


def _number(value: Any) -> float | None:
    """A value as an incident's `seen` has it: a number, or its text where JSON has none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _compared(taken: Taken, known: StepRecord | None, tolerance: float | None) -> Compared:
    record, norm = taken.record, taken.grad_norm
    if known is None:
        return Compared(step=record.step, found=record, recorded=None, grad_norm=norm)
    differences = tuple(same_values(known, record))
    apart = differences
    if tolerance is not None:
        apart = tuple(same_values(known, record, tolerance=tolerance))
    return Compared(
        step=record.step,
        found=record,
        recorded=known,
        grad_norm=norm,
        differences=differences,
        apart=apart,
    )


def _may_raise(source: Source) -> bool:
    """An exception of the incident's kind may have come from a hook or an evaluation."""
    incident = source.incident
    return incident is not None and incident.kind in (
        IncidentKind.EXCEPTION,
        IncidentKind.OUT_OF_MEMORY,
    )


def _raised_then(incident: Incident | None) -> Raised | None:
    if incident is None or incident.kind not in (
        IncidentKind.EXCEPTION,
        IncidentKind.OUT_OF_MEMORY,
        IncidentKind.BAD_BATCH,
    ):
        return None
    return Raised.in_incident(incident)


def verdict_of(compared: Sequence[Compared]) -> Verdict:
    """What the values of all steps say."""
    if any(item.apart for item in compared):
        return Verdict.NOT_REPRODUCED
    if any(item.differences for item in compared):
        return Verdict.WITHIN_TOLERANCE
    return Verdict.REPRODUCED


def _verdict(source: Source, passage: _Passage, then: Raised | None) -> tuple[Verdict, list[str]]:
    compared, raised = passage.compared, passage.raised
    audited, weights = passage.audited, passage.weights
    notes: list[str] = []
    values = verdict_of(compared)
    incident = source.incident
    if raised is not None:
        if then is not None and raised.same_as(then) and compared[-1].step == source.step:
            return values, notes
        notes.append(f"the step raised {raised}; in the run " + (str(then) if then else "nothing"))
        return Verdict.NOT_REPRODUCED, notes
    if weights is not None:
        same = weights.then == weights.now
        return (values if same else Verdict.NOT_REPRODUCED), [str(weights)]
    if audited is not None:
        return (values if audited.is_reproduced else Verdict.NOT_REPRODUCED), audited.notes()
    is_known = any(item.recorded is not None for item in compared)
    if then is not None:
        told = f"the run raised {then}; now the step went through"
        notes.append(told + (", with the values of the ledger" if is_known else ""))
        if incident is None or incident.kind not in OUTSIDE:
            return Verdict.NOT_REPRODUCED, notes
    elif incident is not None and incident.kind in OUTSIDE:
        notes.append(
            f"the {incident.kind.replace('_', ' ')} did not come again: it lies outside of what "
            "the step computes (machine, memory, exchange between workers), or hangs on them"
        )
    if not is_known:
        notes.append("nothing is recorded of these steps to compare with")
        return Verdict.NOT_REPRODUCED, notes
    return values, notes
