"""Incidents of what comes after an update: in a hook, in an evaluation, in the weights it left."""

from __future__ import annotations

from typing import Final

from samestep.faults.progress import Phase
from samestep.incidents.record import Incident

WEIGHTS: Final = "weights"
"""In `seen`: names of the weights that are not finite after the update."""


def is_aftermath(incident: Incident) -> bool:
    """Whether the update of the incident's step was through when it happened.

    The state before the step is gone then; that after it is what shows the incident again.
    """
    return WEIGHTS in incident.seen or is_in(incident, Phase.HOOKS, Phase.EVALUATION)


def is_in(incident: Incident, *phases: Phase) -> bool:
    """Whether an incident happened in one of some phases, as far as it tells."""
    return incident.seen.get("phase") in phases
