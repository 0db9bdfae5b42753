"""Judges a failure of the group, and tells the recorder: incidents, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from samestep.cluster.notes import Notes
from samestep.cluster.policy import Cause, Fault, RetryPolicy, Verdict
from samestep.cluster.process import Whereabouts
from samestep.incidents.cause import ECHO
from samestep.incidents.record import Incident
from samestep.names import IncidentKind
from samestep.spec_faults import Retries

KINDS = {
    Cause.CRASH: IncidentKind.CRASH,
    Cause.LOST: IncidentKind.CRASH,
    Cause.OUT_OF_MEMORY: IncidentKind.OUT_OF_MEMORY,
    Cause.HANG: IncidentKind.HANG,
    Cause.NO_ROOM: IncidentKind.NO_ROOM,
}


class Judge:
    """Remembers what happened before, over all attempts of a run.

    Args:
        retries: the job's budgets.
        notes: to the recorder.
        clock: seconds.
    """

    def __init__(
        self, retries: Retries, notes: Notes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = RetryPolicy(retries)
        self._notes = notes
        self._clock = clock
        self._not_before = 0.0
        self._attempt = 0
        self._step = 0

    def decide(self, faults: Sequence[Fault], everyone: Sequence[Whereabouts]) -> Verdict:
        """What to do about a failure.

        Args:
            faults: what the workers met, or the controller.
            everyone: where the workers were that could be reached.
        """
        self.saw(everyone)
        self._attempt = max([self._attempt, *(fault.attempt for fault in faults)])
        self._step = max([self._step, *(fault.step or 0 for fault in faults)])
        verdict = self._policy.decide(faults, step=self._step)
        for fault in faults:
            is_alone = fault is verdict.first and fault.cause is Cause.LOST
            if fault.cause in KINDS and (is_alone or not fault.told):
                self._tell_incident(fault)
        if not verdict.retry:
            first = verdict.first
            kind = f"{first.kind or first.cause}:{first.exit_status}"
            self._notes.put("give_up", kind, verdict.message)
        self._not_before = self._clock() + verdict.delay_s
        return verdict

    def saw(self, everyone: Sequence[Whereabouts]) -> None:
        """How far the workers are: what is behind them is progress."""
        self._attempt = max([self._attempt, *(there.attempt for there in everyone)])
        self._step = max([self._step, *(there.step for there in everyone)])

    def must_wait(self) -> bool:
        """Whether it is too early to start again."""
        return self._clock() < self._not_before

    def _tell_incident(self, fault: Fault) -> None:
        is_echo = fault.cause is Cause.LOST  # of another worker, which the message names
        incident = Incident(
            kind=KINDS[fault.cause],
            step=self._step if fault.step is None else fault.step,
            attempt=self._attempt,
            world_rank=None if is_echo else fault.world_rank,
            host="" if is_echo else fault.host,
            time=time.time(),
            message=fault.message,
            seen={ECHO: True} if is_echo else {},
        )
        self._notes.put("note_incident", incident.to_json())
