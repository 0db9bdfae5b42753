"""Comparing two runs by what their ledgers and checkpoints say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.manifest import Manifest, step_name
from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.exact.numerics import INFORMATIONAL, differences
from samestep.exact.numerics import tolerance as tolerance_of
from samestep.names import CHECKPOINTS_DIR, MANIFEST_FILE, Event
from samestep.spec import differing_fields
from samestep.telemetry.identity import read_numerics, read_spec
from samestep.telemetry.ledger import events, steps
from samestep.telemetry.records import (
    EventRecord,
    StepRecord,
    differing_metrics,
    same_values,
)


class Verdict(StrEnum):
    """How two runs stand to each other."""

    IDENTICAL = "identical"
    WITHIN_TOLERANCE = "within_tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A place where two runs differ.

    Attributes:
        step: the step that shows it: of a step record its number, of an evaluation or a
            checkpoint the number of steps taken before it.
        quantity: name and both values, floats as hex and readable.
    """

    step: int
    quantity: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out of comparing run a with run b.

    Attributes:
        verdict: identical only when the same steps were taken with the same values throughout.
        first_step: first step that both ledgers hold.
        num_compared: steps that both hold.
        identical_through: last step through which all is equal bit for bit; None: not even the
            first one.
        first: the first difference in bits, None where there is none.
        digest_step: steps taken before the newest checkpoints that both have; None without any.
        digest: SHA-256 of the state there, where it is the same in both.
        only_in_a: steps that only a holds; only_in_b the same.
        evaluations_compared: evaluations after the same steps.
        tolerance: what floats were held to where numerics differ; None where they don't.
        numerics: how the binding numerics differ.
        informational: how the informational ones differ.
        spec: fields of the jobs that affect bits and differ.
        notes: events that touch on what was compared (numerics changed, placement).
    """

    verdict: Verdict
    first_step: int
    num_compared: int
    identical_through: int | None
    first: Difference | None
    digest_step: int | None
    digest: str | None
    only_in_a: int
    only_in_b: int
    evaluations_compared: int
    tolerance: float | None
    numerics: tuple[str, ...]
    informational: tuple[str, ...]
    spec: tuple[str, ...]
    notes: tuple[str, ...]


def compare_runs(a: Storage, b: Storage, *, through: int | None = None) -> Comparison:
    """Compares the ledgers of two runs, their evaluations and their newest common checkpoints.

    Args:
        a: a run directory.
        b: another.
        through: compare no step behind this one, and don't mind that one run went further.

    Raises:
        InputError: one is no run directory, or they have no step in common.
    """
    spec_a, spec_b = read_spec(a), read_spec(b)
    steps_a, steps_b = _steps(a, through), _steps(b, through)
    common = sorted(steps_a.keys() & steps_b.keys())
    if not common:
        raise InputError(
            f"nothing to compare: {a.uri} holds {_range(steps_a)}, {b.uri} holds {_range(steps_b)}"
        )
    numerics_a, numerics_b = read_numerics(a) or {}, read_numerics(b) or {}
    notes = (*_notes("a", a), *_notes("b", b))
    numerics = differences(numerics_a, numerics_b)
    pair = _Pair(
        steps=(steps_a, steps_b),
        evaluations=(_evaluations(a, through), _evaluations(b, through)),
        digests=_common_digests(a, b, through),
    )
    first = pair.first_difference(None)
    tolerance = None
    if numerics or notes:
        tolerance = max(
            tolerance_of(spec_a.precision, numerics_a), tolerance_of(spec_b.precision, numerics_b)
        )
    apart = first is not None and (
        tolerance is None or pair.first_difference(tolerance) is not None
    )
    uneven = (len(steps_a) - len(common), len(steps_b) - len(common))
    if apart or any(uneven):
        verdict = Verdict.DIFFERENT
    elif first is not None:
        verdict = Verdict.WITHIN_TOLERANCE
    else:
        verdict = Verdict.IDENTICAL
    equal = [step for step in common if first is None or step < first.step]
    newest = max(pair.digests, default=None)
    return Comparison(
        verdict=verdict,
        first_step=common[0],
        num_compared=len(common),
        identical_through=equal[-1] if equal else None,
        first=first,
        digest_step=newest,
        digest=pair.digests[newest][0] if newest is not None and pair.same_at(newest) else None,
        only_in_a=uneven[0],
        only_in_b=uneven[1],
        evaluations_compared=len(pair.common_evaluations),
        tolerance=tolerance,
        numerics=tuple(numerics),
        informational=tuple(differences(numerics_a, numerics_b, kind=INFORMATIONAL)),
        spec=tuple(differing_fields(spec_a, spec_b)),
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class _Pair:
    steps: tuple[Mapping[int, StepRecord], Mapping[int, StepRecord]]
    evaluations: tuple[Mapping[int, Mapping[str, float]], Mapping[int, Mapping[str, float]]]
    digests: Mapping[int, tuple[str, str]]

    @property
    def common_evaluations(self) -> list[int]:
        return sorted(self.evaluations[0].keys() & self.evaluations[1].keys())

    def same_at(self, step: int) -> bool:
        return self.digests[step][0] == self.digests[step][1]

    def first_difference(self, tolerance: float | None) -> Difference | None:
        """The first in time: what was seen after S steps comes before step S is taken."""
        found = self._in_evaluations(tolerance)
        if tolerance is None:
            found += self._in_checkpoints()
        found += self._in_steps(tolerance)
        return min(found, key=lambda item: item.step, default=None)

    def _in_steps(self, tolerance: float | None) -> list[Difference]:
        a, b = self.steps
        for step in sorted(a.keys() & b.keys()):
            lines = same_values(a[step], b[step], tolerance=tolerance)
            if lines:
                return [Difference(step=step, quantity=lines[0])]
        return []

    def _in_evaluations(self, tolerance: float | None) -> list[Difference]:
        a, b = self.evaluations
        for step in self.common_evaluations:
            lines = differing_metrics(a[step], b[step], tolerance=tolerance)
            if lines:
                return [Difference(step=step, quantity=f"evaluation, {lines[0]}")]
        return []

    def _in_checkpoints(self) -> list[Difference]:
        for step in sorted(self.digests):
            if not self.same_at(step):
                a, b = self.digests[step]
                return [Difference(step=step, quantity=f"checkpoint digest: {a} against {b}")]
        return []


def _steps(run: Storage, through: int | None) -> dict[int, StepRecord]:
    return {
        step: record for step, record in steps(run).items() if through is None or step <= through
    }


def _evaluations(run: Storage, through: int | None) -> dict[int, Mapping[str, float]]:
    return {
        event.step: event.fields.get("metrics", {})
        for event in events(run, Event.EVALUATION)
        if through is None or event.step <= through + 1
    }


def _common_digests(a: Storage, b: Storage, through: int | None) -> dict[int, tuple[str, str]]:
    """Digests by the manifests of the checkpoints that both have, by steps taken before them."""
    common = {info.step for info in list_checkpoints(a) if info.whole}
    common &= {info.step for info in list_checkpoints(b) if info.whole}
    return {
        step: (_manifest_digest(a, step), _manifest_digest(b, step))
        for step in common
        if through is None or step <= through + 1
    }


def _manifest_digest(run: Storage, step: int) -> str:
    data = run.read(f"{CHECKPOINTS_DIR}/{step_name(step)}/{MANIFEST_FILE}")
    return Manifest.from_json(data).digest


def _notes(name: str, run: Storage) -> list[str]:
    found: list[EventRecord] = [
        *events(run, Event.NUMERICS_CHANGED),
        *events(run, Event.PLACEMENT_DEPENDENT),
    ]
    return [
        f"{name}, attempt {event.attempt} at step {event.step}, {event.event.replace('_', ' ')}: "
        + "; ".join(event.fields.get("differences", []))
        for event in found
    ]


def _range(found: Mapping[int, StepRecord]) -> str:
    return f"steps {min(found)} to {max(found)}" if found else "no step"
