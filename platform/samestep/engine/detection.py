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

from samestep.engine.aftermath import WEIGHTS
from samestep.engine.step import Reduced
from samestep.errors import IncidentError
from samestep.exact.ranges import StepRanges
from samestep.incidents.detectors import Detectors, Finding, overflows_to_least_scale
from samestep.incidents.record import Incident
from samestep.incidents.rollback import Rollback
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.spec_incidents import CONTINUE, ROLLBACK, SKIP, STOP, Policy
from samestep.telemetry.link import Target

STATE_KEY: Final = "incidents"
"""Among a state's extras."""
STRONGEST_FIRST: Final[tuple[Policy, ...]] = (STOP, ROLLBACK, SKIP, CONTINUE)


class RolledBack(Exception):
    """Ends the attempt without an error: the run goes on from before some steps.

    Attributes:
        rollback: from where.
    """

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(rollback)
        self.rollback = rollback


Keep = Callable[[Incident, float, bool], None]
"""Told an incident, the norm of the gradient, and whether the update is applied all the same."""


class Detection:
    """Judges the steps of one attempt.

    Nothing here leads back to the process group (see `Keeping`).

    Args:
        spec: the job.
        state: what `state` gave in the restored state; None at the start of a run.
        left_out: steps whose batches are left out.
        num_rollbacks: of the run so far.
        target: the recorder.
        attempt: the present one.
        tells: this worker tells the recorder.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        state: Mapping[str, Any] | None,
        left_out: StepRanges,
        num_rollbacks: int,
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
            max_overflows=overflows_to_least_scale(
                spec.scaler.init_scale, spec.scaler.backoff_factor
            ),
            state=kept.get("windows"),
        )
        self._num_skips = int(kept.get("num_skips", 0))
        self._passed = StepRanges.of(kept.get("left_out", ()))
        self._left_out = left_out
        self._num_rollbacks = num_rollbacks
        self._target = target
        self._attempt = attempt
        self._tells = tells

    @property
    def state(self) -> dict[str, Any]:
        """What the state of the run must hold; plain values.

        `left_out` are the ranges of steps passed over so far, whoever decided it: by them a state
        shows whether it is on the run's way (see `resume`).
        """
        return {
            STATE_KEY: {
                "windows": self._detectors.state,
                "num_skips": self._num_skips,
                "left_out": self._passed.to_json(),
            }
        }

    def passes_over(self, step: int) -> bool:
        """Whether the batch of a step is left out, before it is loaded."""
        return step in self._left_out

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
            RolledBack: it goes back, without the update.
        """
        if self.passes_over(step):
            self._passed = self._passed.with_step(step)
            return True
        loss = None if reduced.is_empty else reduced.loss
        norm = None if reduced.is_empty else grad_norm
        found = self._detectors.judge(step=step, loss=loss, grad_norm=norm, overflow=overflow)
        policies = [self._policies[finding.kind] for finding in found]
        told = [
            self._tell(finding, step, policy)
            for finding, policy in zip(found, policies, strict=True)
        ]
        if told and told[0] is not None:
            keep(told[0], grad_norm, _strongest(policies) == CONTINUE and not overflow)
        action = self._act(found, policies, step, ends=f"ends before the update of step {step}")
        self._detectors.take(loss=loss, grad_norm=norm, overflow=overflow)
        self._num_skips += int(action == SKIP)
        return action == SKIP

    def look_at_weights(
        self, model: nn.Module, step: int, keep: Callable[[Incident], None]
    ) -> None:
        """After the update of a step: whether a weight is not finite, as often as the job says.

        The update is through, so there is nothing to skip: `skip` is as good as `continue` here.

        Args:
            model: the updated one.
            step: the step.
            keep: called with the incident, where there is one and this worker tells it.

        Raises:
            IncidentError: one is not, and the job says to stop.
            RolledBack: the job says to go back.
        """
        every = self._settings.weights_every
        if not every or (step + 1) % every:
            return
        broken = not_finite(model)
        if not broken:
            return
        named = ", ".join(broken[:8]) + (f" and {len(broken) - 8} more" if broken[8:] else "")
        finding = Finding(
            kind=IncidentKind.NON_FINITE,
            message=f"after step {step}: not finite: {named}",
            seen={WEIGHTS: broken},
        )
        policy = self._policies[finding.kind]
        told = self._tell(finding, step, policy)
        if told is not None:
            keep(told)
        if policy != SKIP:
            ends = f"ends here: the update of step {step} was applied"
            self._act([finding], [policy], step, ends=ends)

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

    def _act(self, found: list[Finding], policies: list[Policy], step: int, *, ends: str) -> Policy:
        """Does what the strongest of the policies says; `skip` and `continue` are returned.

        Args:
            found: what was found in the step.
            policies: for each.
            step: its number.
            ends: what a run that stops here does.
        """
        action = _strongest(policies)
        if action == CONTINUE:
            return action
        settings = self._settings
        told = "; ".join(finding.message for finding in found)
        kind = found[policies.index(action)].kind
        to = max(0, step - settings.rollback_steps)
        why = ""
        if action == STOP:
            why = f"incidents.{kind} is stop, so the run {ends}"
        elif action == SKIP and self._num_skips >= settings.max_skips:
            why = (
                f"{self._num_skips} steps were left out already, and incidents.max_skips is "
                f"{settings.max_skips}"
            )
        elif action == ROLLBACK and self._left_out.covers(to, step + 1):
            why = (
                f"the run went back to before step {to} for this already, and that was not far "
                f"enough: incidents.rollback_steps is {settings.rollback_steps}"
            )
        elif action == ROLLBACK and self._num_rollbacks >= settings.max_rollbacks:
            why = (
                f"the run went back {self._num_rollbacks} times already, and "
                f"incidents.max_rollbacks is {settings.max_rollbacks}"
            )
        if why:
            raise IncidentError(f"{told}: {why}", kind)
        if action == ROLLBACK:
            back = Rollback(to=to, until=step + 1, attempt=self._attempt, message=told)
            raise RolledBack(back)
        return action


def _strongest(policies: list[Policy]) -> Policy:
    return next((policy for policy in STRONGEST_FIRST if policy in policies), CONTINUE)


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters that hold NaN or infinity."""
    named = dict(model.named_parameters())
    floats = {n: p.detach() for n, p in named.items() if p.is_floating_point()}
    if not floats:
        return []
    # The largest absolute value, NaN where there is one: unlike a sum of squares it can't overflow.
    norms = torch._foreach_norm(list(floats.values()), math.inf)
    return [name for name, norm in zip(floats, norms, strict=True) if not torch.isfinite(norm)]
