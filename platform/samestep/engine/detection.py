"""What is odd in a step, and what the job says to do about it: on every worker alike.

The reduced values of a step are equal on all workers, so each decides by itself what the others
decide. The decisions, and what they were made from, are part of the state: a restart at any step
decides the same again. What happens on a step that is left out is told in `update`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from samestep.engine.step import Reduced
from samestep.errors import IncidentError
from samestep.incidents.detectors import Detectors, Finding
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.spec_incidents import CONTINUE, SKIP, STOP, Policy
from samestep.telemetry.link import Target

STATE_KEY: Final = "incidents"
"""Among a state's extras."""

Keep = Callable[[Incident, float, bool], None]
"""Told an incident, the norm of the gradient, and whether the update is applied all the same."""


class Detection:
    """Judges the steps of one attempt.

    Nothing here leads back to the process group (see `Keeping`).

    Args:
        spec: the job.
        state: what `state` gave in the restored state; None at the start of a run.
        target: the recorder.
        attempt: the present one.
        tells: this worker tells the recorder.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        state: Mapping[str, Any] | None,
        target: Target,
        attempt: int,
        tells: bool,
    ) -> None:
        settings, kept = spec.incidents, state or {}
        self._settings = settings
        self._policies: dict[IncidentKind, Policy] = {
            IncidentKind.NON_FINITE: settings.non_finite,
            IncidentKind.LOSS_SPIKE: settings.loss_spike,
            IncidentKind.GRAD_SPIKE: settings.grad_spike,
        }
        self._detectors = Detectors(
            length=settings.window,
            least=settings.least,
            threshold=settings.spike_score,
            state=kept.get("windows"),
        )
        self._num_skips = int(kept.get("num_skips", 0))
        self._target = target
        self._attempt = attempt
        self._tells = tells

    @property
    def state(self) -> dict[str, Any]:
        """What the state of the run must hold; plain values."""
        return {STATE_KEY: {"windows": self._detectors.state, "num_skips": self._num_skips}}

    def leaves_out(
        self, step: int, reduced: Reduced, keep: Keep, grad_norm: float, overflow: bool
    ) -> bool:
        """Judges a step before its update.

        Args:
            step: its number.
            reduced: what it came to.
            keep: called with the first incident, where there is any and this worker tells them,
                while everything is as before the step.
            grad_norm: of the unscaled gradient before clipping; NaN where there is none.
            overflow: it overflows under loss scaling, which is no incident.

        Returns:
            Whether the update is left out.

        Raises:
            IncidentError: the run ends here, without the update.
        """
        loss = None if reduced.is_empty else reduced.loss
        norm = None if reduced.is_empty else grad_norm
        found = self._detectors.judge(step=step, loss=loss, grad_norm=norm, overflow=overflow)
        policies = [self._policies[finding.kind] for finding in found]
        skips = SKIP in policies and self._num_skips < self._settings.max_skips
        stops = STOP in policies or (SKIP in policies and not skips)
        told = [
            self._tell(finding, step, policy)
            for finding, policy in zip(found, policies, strict=True)
        ]
        if told and told[0] is not None:
            keep(told[0], grad_norm, not (skips or stops or overflow))
        if stops:
            raise IncidentError(self._why_stopped(found, policies, step), found[0].kind)
        self._detectors.take(loss=loss, grad_norm=norm, overflow=overflow)
        self._num_skips += int(skips)
        return skips

    def look_at_weights(self, model: nn.Module, step: int) -> None:
        """After the update of a step: whether a weight is not finite, as often as the job says.

        The update is through, so there is nothing to skip: `skip` is as good as `continue` here.

        Raises:
            IncidentError: one is not, and the job says to stop.
        """
        every = self._settings.weights_every
        if not every or (step + 1) % every:
            return
        broken = _not_finite(model)
        if not broken:
            return
        named = ", ".join(broken[:8]) + (f" and {len(broken) - 8} more" if broken[8:] else "")
        finding = Finding(
            kind=IncidentKind.NON_FINITE,
            message=f"after step {step}: not finite: {named}",
            seen={"weights": broken},
        )
        policy = self._policies[finding.kind]
        self._tell(finding, step, policy)
        if policy not in (CONTINUE, SKIP):
            raise IncidentError(self._why_stopped([finding], [policy], step), finding.kind)

    def _tell(self, finding: Finding, step: int, policy: Policy) -> Incident | None:
        """The incident as it is recorded; None where another worker tells it."""
        if not self._tells:
            return None
        incident = Incident(
            kind=finding.kind,
            step=step,
            attempt=self._attempt,
            host=os.uname().nodename,
            time=time.time(),
            message=finding.message,
            seen={**finding.seen, "policy": policy},
        )
        told = self._target.call("record_incident", self._attempt, incident.to_json())
        return replace(incident, id=str(told))

    def _why_stopped(self, found: list[Finding], policies: list[Policy], step: int) -> str:
        told = "; ".join(finding.message for finding in found)
        if STOP not in policies:
            return (
                f"{told}: {self._num_skips} steps were left out already, and incidents.max_skips "
                f"is {self._settings.max_skips}"
            )
        kind = found[policies.index(STOP)].kind
        return f"{told}: incidents.{kind} is stop, so the run ends before the update of step {step}"


def _not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters that hold NaN or infinity."""
    named = dict(model.named_parameters())
    floats = {n: p.detach() for n, p in named.items() if p.is_floating_point()}
    if not floats:
        return []
    # The largest absolute value, NaN where there is one: unlike a sum of squares it can't overflow.
    norms = torch._foreach_norm(list(floats.values()), math.inf)
    return [name for name, norm in zip(floats, norms, strict=True) if not torch.isfinite(norm)]
