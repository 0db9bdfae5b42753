"""A run in short: what `samestep show` tells, read from the run directory alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from samestep.checkpoint.committed import CheckpointInfo, best_of, list_checkpoints
from samestep.checkpoint.storage import Storage
from samestep.exact.digest import canonical_float_hex
from samestep.incidents.record import Incident, list_incidents
from samestep.incidents.rollback import Rollback
from samestep.incidents.wrong_hosts import hosts_of
from samestep.names import DIED, Event, RunState
from samestep.spec import JobSpec
from samestep.spec_incidents import AVOID
from samestep.telemetry.identity import read_result, read_spec
from samestep.telemetry.lease import Holder, holder
from samestep.telemetry.past import Attempt, Past, read_past
from samestep.telemetry.records import StepRecord

FORKED = "forked"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What there is to know about a run at a glance.

    Attributes:
        uri: the run directory.
        spec: its job.
        status: starting, running, done, interrupted, failed; or forked: nobody has trained it
            yet; or died: it has no result, and nobody holds its lease.
        holder: who holds the lease, where somebody does.
        result: what `result.json` says, None without one.
        attempts: in order.
        num_steps: steps in the ledger.
        total_steps: steps that the last attempt was to reach; None when it never said.
        num_redone: steps that were taken again.
        last: record of the last step.
        evaluation: the last one: `step`, `metrics` and `samples`.
        fork: where it comes from: `step` and the fields of the event; None: from nowhere.
        rollbacks: in order.
        incidents: in order of time.
        avoided: nodes that are kept away from, since audits found that they compute wrongly.
        recoveries: how long training stood still for faults and resizes, in order: `attempt`,
            `step` and the fields of the event.
        checkpoints: by step, unfinished ones too.
        torn: half-written lines, as after a process that was killed.
    """

    uri: str
    spec: JobSpec
    status: str
    holder: Holder | None
    result: dict[str, Any] | None
    attempts: tuple[Attempt, ...]
    num_steps: int
    total_steps: int | None
    num_redone: int
    last: StepRecord | None
    evaluation: dict[str, Any] | None
    fork: dict[str, Any] | None
    rollbacks: tuple[Rollback, ...]
    incidents: tuple[Incident, ...]
    avoided: tuple[str, ...]
    recoveries: tuple[dict[str, Any], ...]
    checkpoints: tuple[CheckpointInfo, ...]
    torn: tuple[str, ...]

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest whole checkpoint."""
        return next((info for info in reversed(self.checkpoints) if info.whole), None)

    @property
    def best(self) -> CheckpointInfo | None:
        """The best whole checkpoint, by what the run ranks by; None when none has a score."""
        return best_of(self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON data; a float that JSON can't hold becomes its name."""
        data: dict[str, Any] = {
            "uri": self.uri,
            "workload": self.spec.workload,
            "status": self.status,
            "holder": asdict(self.holder) if self.holder else None,
            "result": self.result,
            "steps": self.num_steps,
            "total_steps": self.total_steps,
            "redone": self.num_redone,
            "epoch": self.last.epoch if self.last else None,
            "loss": self.last.loss if self.last else None,
            "metrics": dict(self.last.metrics) if self.last else {},
            "evaluation": self.evaluation,
            "fork": self.fork,
            "rollbacks": [rollback.to_json() for rollback in self.rollbacks],
            "attempts": [_attempt_json(attempt) for attempt in self.attempts],
            "incidents": [incident.to_json() for incident in self.incidents],
            "avoided": list(self.avoided),
            "recoveries": list(self.recoveries),
            "checkpoints": [asdict(info) for info in self.checkpoints],
            "latest": self.latest.step if self.latest else None,
            "best": self.best_as_json(),
            "torn": list(self.torn),
        }
        made = plain(data)
        assert isinstance(made, dict)
        return made

    def best_as_json(self) -> dict[str, Any] | None:
        """The best checkpoint's step, score and what it is ranked by; None when none has one."""
        ranking = self.latest.ranking if self.latest is not None else None
        if ranking is None or self.best is None:
            return None
        return {"step": self.best.step, **asdict(ranking), "score": ranking.score_of(self.best)}


def summarize(run: Storage) -> RunSummary:
    """Reads a run directory; changes nothing in it.

    Raises:
        StorageError: it is no run directory, or a file in it is damaged.
    """
    spec = read_spec(run)
    past = read_past(run)
    present = holder(run)
    held = present if present is not None and present.alive else None
    result = read_result(run)
    attempts = past.attempts
    incidents = list_incidents(run)
    fork = past.last_events.get(Event.FORKED)
    status = status_of(held, result, has_begun=bool(attempts))
    return RunSummary(
        uri=run.uri,
        spec=spec,
        status=FORKED if fork and status == DIED and not attempts else status,
        holder=held,
        result=result,
        attempts=tuple(attempts),
        num_steps=past.num_steps,
        total_steps=attempts[-1].fields.get("total_steps") if attempts else None,
        num_redone=past.num_redone,
        last=past.last_step,
        evaluation=_evaluation(past),
        fork=None if fork is None else {"step": fork.step, **fork.fields},
        rollbacks=tuple(past.rollbacks),
        incidents=tuple(incidents),
        avoided=hosts_of(incidents) if spec.incidents.audit == AVOID else (),
        recoveries=tuple(
            {"attempt": event.attempt, "step": event.step, **event.fields}
            for event in past.recoveries
        ),
        checkpoints=tuple(list_checkpoints(run)),
        torn=tuple(past.torn),
    )


def why_ended(attempt: Attempt) -> str:
    """Why an attempt ended, in a few words; empty while it goes on."""
    if attempt.ended is None:
        return ""
    reason, cause = str(attempt.ended.get("reason", "")), attempt.ended.get("cause")
    return f"{reason} ({cause})" if cause else reason


def status_of(held: Holder | None, result: dict[str, Any] | None, *, has_begun: bool) -> str:
    """What a run is at: as its result says, else by who holds it and whether it has an attempt."""
    if result is not None:
        return str(result.get("status"))
    if held is None:
        return DIED
    return str(RunState.RUNNING if has_begun else RunState.STARTING)


def _evaluation(past: Past) -> dict[str, Any] | None:
    event = past.last_events.get(Event.EVALUATION)
    if event is None:
        return None
    return {"step": event.step, **event.fields}


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "mode": attempt.fields.get("mode"),
        "workers": attempt.fields.get("world_size"),
        "hosts": attempt.fields.get("hosts", []),
        "first_step": attempt.start_step,
        "next_step": attempt.next_step,
        "redone": attempt.num_redone,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "why_ended": why_ended(attempt) or None,
        "message": attempt.ended.get("message") if attempt.ended else None,
    }


def plain(value: Any) -> Any:
    """The value as JSON has it; a float that JSON can't hold becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return canonical_float_hex(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
