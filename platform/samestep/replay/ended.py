"""The verdict on a step that took its process with it, or stands still.

The process that takes the steps tells of each whose values it has; who watches it judges by that,
and by where it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.replay.apart import Ended
from samestep.replay.verdict import Compared, Replayed, Verdict, verdict_of
from samestep.telemetry.records import StepRecord


def compared_to_json(item: Compared) -> dict[str, Any]:
    """A step that was compared, for the process that watches."""
    return {
        "step": item.step,
        "found": None if item.found is None else item.found.to_json(),
        "recorded": None if item.recorded is None else item.recorded.to_json(),
        "differences": list(item.differences),
        "apart": list(item.apart),
    }


def _from_json(data: Mapping[str, Any]) -> Compared:
    found, recorded = (
        None if data[name] is None else StepRecord.from_json(data[name])
        for name in ("found", "recorded")
    )
    return Compared(
        step=data["step"],
        found=found,
        recorded=recorded,
        differences=tuple(data["differences"]),
        apart=tuple(data["apart"]),
    )


def judge_ended(incident: Incident, ended: Ended) -> Replayed:
    """The verdict, and what was compared before the end.

    Args:
        incident: what the run met.
        ended: how the process that took the step came to its end, or did not.
    """
    steps = tuple(map(_from_json, ended.told))
    values = verdict_of(steps)
    kind = IncidentKind.HANG if ended.how == "" else IncidentKind.CRASH
    where = ended.position if ended.position is not None else "its start"
    step = ended.position.step if ended.position is not None else -1
    told = f"the process {ended.how} in" if ended.how else "it stands still in"
    stood = _stood_in(incident)
    again = kind is incident.kind and step == incident.step and stood in ("", str(where))
    then = f"the run met {incident.kind} at step {incident.step}"
    return Replayed(
        verdict=values if again else Verdict.NOT_REPRODUCED,
        step=incident.step,
        first_step=steps[0].step if steps else max(step, 0),
        steps=steps,
        incident=incident,
        ended=f"{told} {where}",
        stacks=ended.stacks,
        notes=() if again else (then + (f", in {stood}" if stood else ""),),
    )


def _stood_in(incident: Incident) -> str:
    """Where the worker to blame stood still, as it told; empty where it could not tell."""
    workers = incident.seen.get("workers")
    told = workers.get(str(incident.world_rank)) if isinstance(workers, Mapping) else None
    return str(told.get("place", "")) if isinstance(told, Mapping) else ""
