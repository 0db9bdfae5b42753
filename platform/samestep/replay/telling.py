"""What came of a replay, in sentences and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.replay.summary import plain
from samestep.replay.verdict import STATUS, Compared, Replayed, Verdict
from samestep.replay.what_if import Effect, WhatIf


def describe(found: Replayed) -> list[str]:
    """What was found, in lines; the first one says it all."""
    lines = [headline(found), _what_was_taken(found)]
    first = found.first_difference
    if first is not None and found.verdict is Verdict.WITHIN_TOLERANCE:
        lines.append(f"first difference in bits at step {first[0]}: {first[1]}")
    if found.audited is not None and lines[0] != found.audited.headline():
        lines.append(f"of the audit: {found.audited.headline()}")
    lines += [*found.notes, *_where_they_stood(found.incident)]
    if found.numerics:
        lines += [
            "the numerics differ, in the run against here:",
            *(f"  {line}" for line in found.numerics),
        ]
    if found.surroundings and found.verdict is not Verdict.REPRODUCED:
        lines += [
            "code and packages differ, in the run against here:",
            *(f"  {line}" for line in found.surroundings),
        ]
    if found.verdict is Verdict.NOT_REPRODUCED and first is not None and not found.numerics:
        lines.append(
            "the numerics do not differ: the code, the data, or a machine does (samestep bisect "
            "finds the first tensor, where two runs are there)"
        )
    return lines


def _where_they_stood(incident: Incident | None) -> list[str]:
    """Where the workers were when a run stood still."""
    workers = incident.seen.get("workers") if incident is not None else None
    if incident is None or incident.kind is not IncidentKind.HANG:
        return []
    told = workers if isinstance(workers, Mapping) else {}
    lines = [
        f"in the run, worker {rank} stood in {worker.get('place')}"
        for rank, worker in sorted(told.items())
        if isinstance(worker, Mapping)
    ]
    silent = incident.seen.get("silent") or []
    return lines + [f"in the run, worker {rank} said nothing" for rank in silent]


def headline(found: Replayed) -> str:
    """The verdict in one line."""
    step, first = found.step, found.first_difference
    if found.ended:
        return _headline_of_end(found)
    if found.audited is not None and found.raised is None and first is None:
        return found.audited.headline()
    if found.verdict is Verdict.NOT_REPRODUCED:
        if first is not None:
            return f"not reproduced: first difference at step {first[0]}: {first[1]}"
        if found.raised is not None:
            return f"not reproduced: step {found.steps[-1].step} raised {found.raised}"
        went = "what follows its update" if found.is_behind else f"step {step}"
        return f"not reproduced: {went} went through"
    exactly = "bit for bit"
    if found.is_behind and found.raised is None:
        return f"reproduced: {found.weights}"
    if found.raised is not None:
        what = f"step {step} raises {found.raised}, as in the run"
        exactly = "" if found.num_compared == 0 else f"{exactly} up to there"
    else:
        at_step = found.at_step
        values = [] if at_step is None else _values(at_step)
        what = f"step {step} ({', '.join(values)})"
    if found.verdict is Verdict.WITHIN_TOLERANCE:
        return f"reproduced within {found.tolerance:g}, under other numerics: {what}"
    return f"reproduced{' ' if exactly else ''}{exactly}: {what}"


def _headline_of_end(found: Replayed) -> str:
    """Of a step that took its process with it, or stands still."""
    if found.verdict is Verdict.NOT_REPRODUCED:
        first = found.first_difference
        before = (
            "" if first is None else f", after a first difference at step {first[0]}: {first[1]}"
        )
        return f"not reproduced: {found.ended}{before}"
    how = "" if found.verdict is Verdict.REPRODUCED else " within tolerance, under other numerics"
    return f"reproduced{how}: {found.ended}, as in the run"


def _what_was_taken(found: Replayed) -> str:
    if found.ended and not found.steps:
        return "nothing was compared: the first step did not come to an end"
    if found.is_behind:
        return f"went on from the state right after the update of step {found.step}"
    last = found.steps[-1].step if found.steps else found.first_step
    count = len(found.steps)
    steps = f"step {last}" if count <= 1 else f"steps {found.first_step} to {last}"
    start = f"the state after {found.first_step} steps" if found.first_step else "the run's start"
    return f"took {steps} from {start}; {found.num_compared} of {count} compared with the run's"


def _values(at_step: Compared) -> list[str]:
    record = at_step.found
    if record is None:
        return []
    named = {"loss": record.loss, "grad_norm": at_step.grad_norm}
    told = [f"{name} {value:.6g}" for name, value in named.items() if value is not None]
    return told + (["left out"] if record.skipped else [])


def as_json(found: Replayed) -> dict[str, Any]:
    """As a JSON object."""
    first, at_step = found.first_difference, found.at_step
    record = at_step.found if at_step is not None else None
    data = {
        "verdict": str(found.verdict),
        "exit_status": int(STATUS[found.verdict]),
        "step": found.step,
        "first_step": found.first_step,
        "steps": len(found.steps),
        "compared": found.num_compared,
        "first_difference": None if first is None else {"step": first[0], "quantity": first[1]},
        "incident": found.incident.id if found.incident is not None else None,
        "raised": None if found.raised is None else str(found.raised),
        "ended": found.ended or None,
        "weights": None if found.weights is None else list(found.weights.now),
        "audit": None if found.audited is None else found.audited.to_json(),
        "numerics": list(found.numerics),
        "tolerance": found.tolerance,
        "surroundings": list(found.surroundings),
        "notes": list(found.notes),
        "record": None if record is None else record.to_json(),
        "grad_norm": None if at_step is None else at_step.grad_norm,
    }
    made = plain(data)
    assert isinstance(made, dict)
    return made


def what_if_rows(found: WhatIf) -> list[tuple[str, str, str]]:
    """(quantity, as it was, changed) for each step."""
    rows: list[tuple[str, str, str]] = []
    for number in range(max(len(found.as_it_was), len(found.changed))):
        pair = [
            effects[number] if number < len(effects) else None
            for effects in (found.as_it_was, found.changed)
        ]
        step = next(effect.step for effect in pair if effect is not None)
        told = [_effect(effect) for effect in pair]
        rows += [
            (f"step {step}: {name}", told[0].get(name, "-"), told[1].get(name, "-"))
            for name in sorted({*told[0], *told[1]}, key=_rank)
        ]
    return rows


def what_if_json(found: WhatIf) -> dict[str, Any]:
    """As a JSON object."""
    sides = {"as_it_was": found.as_it_was, "changed": found.changed}
    data: dict[str, Any] = {"changes": list(found.changes)}
    for side, effects in sides.items():
        data[side] = [
            {
                "step": effect.step,
                "raised": None if effect.raised is None else str(effect.raised),
                "record": None if effect.record is None else effect.record.to_json(),
                "update_norm": effect.update_norm,
                "weight_norm": effect.weight_norm,
                "not_finite": effect.num_not_finite,
            }
            for effect in effects
        ]
    made = plain(data)
    assert isinstance(made, dict)
    return made


_ORDER: Sequence[str] = (
    *("raised", "loss", "gradient norm", "learning rate", "update norm", "weight norm"),
    "weights not finite",
)


def _rank(name: str) -> int:
    return _ORDER.index(name)


def _effect(effect: Effect | None) -> dict[str, str]:
    if effect is None:
        return {}
    if effect.record is None:
        return {"raised": str(effect.raised)}
    record = effect.record
    return {
        "loss": _number(record.loss),
        "gradient norm": _number(effect.grad_norm),
        "learning rate": ", ".join(f"{rate:.6g}" for rate in record.lr),
        "update norm": _number(effect.update_norm),
        "weight norm": _number(effect.weight_norm),
        "weights not finite": str(effect.num_not_finite),
    }


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.9g}"
