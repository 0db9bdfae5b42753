"""An attempt's records for the ledger: made on every worker, sent by worker 0."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from samestep.engine.backlog import Backlog
from samestep.engine.step import Reduced
from samestep.engine.update import Updated, learning_rates
from samestep.errors import DivergenceError, RecorderError
from samestep.exact.digest import ids_digest
from samestep.exact.order import ShardPlan
from samestep.names import Event
from samestep.telemetry.link import Link
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.timesheet import AUDIT
from samestep.workload import Values


class Recording:
    """Takes down steps and events.

    Args:
        link: of worker 0, which delivers them; None elsewhere.
        attempt: the present one.
    """

    def __init__(self, link: Link | None, attempt: int) -> None:
        self._link = link
        self._attempt = attempt
        self._backlog = Backlog()
        self._num_told = 0

    @property
    def delivered(self) -> int:
        """Records of the attempt that are in the ledger, as far as worker 0 knows."""
        return self._link.num_delivered if self._link is not None else 0

    def note_delivered(self, num_delivered: int) -> None:
        """Lets go of what worker 0 said is in the ledger."""
        self._num_told = num_delivered
        self._backlog.trim(num_delivered)

    @property
    def is_behind(self) -> bool:
        """Whether the ledger lacks more records than memory holds; the same on every worker."""
        return self._backlog.is_long(self._num_told)

    def rest(self) -> Iterable[Mapping[str, Any]]:
        """Records that may be missing in the ledger, in order; as they are when they are read."""
        if self._link is not None:
            self._backlog.trim(self._link.num_delivered)
        return self._backlog.records

    def require_current(self) -> None:
        """Raises where the recorder has found a divergence, or knows a later attempt."""
        if self._link is None:
            return
        if self._link.divergence is not None:
            raise DivergenceError(self._link.divergence)
        if self._link.refused:
            raise RecorderError(
                f"attempt {self._attempt} is no longer the run's present one: this worker was "
                "replaced, and nothing it does is kept"
            )

    def step(self, record: StepRecord) -> None:
        """Takes down a step."""
        self._take(record.to_json())

    def event(self, event: Event, step: int, fields: Mapping[str, Any]) -> None:
        """Takes down what happened after `step` steps."""
        record = EventRecord(
            event=event, step=step, attempt=self._attempt, time=time.time(), fields=fields
        )
        self._take(record.to_json())

    def _take(self, data: dict[str, Any]) -> None:
        self._backlog.add(data)
        if self._link is not None:
            self._link.record(data)


def step_record(
    values: Values,
    *,
    ids: Sequence[Sequence[int]],
    reduced: Reduced,
    digest: str | None,
    timing: Mapping[str, float],
) -> StepRecord:
    """The ledger's line of a step."""
    return StepRecord(
        step=values.step,
        epoch=values.epoch,
        samples=sum(map(len, ids)),
        loss=values.loss,
        shard_losses=reduced.shard_losses,
        shard_weights=[weight or None for weight in reduced.shard_weights],
        grad_norm=values.grad_norm,
        lr=list(values.lr),
        ids=ids_digest(ids),
        metrics=dict(values.metrics),
        skipped=values.skipped,
        state_digest=digest,
        timing=timing,
    )


def step_timing(
    reduced: Reduced, lap: Mapping[str, float], *, began_s: float, data_wait_s: float
) -> dict[str, float]:
    """What a step took, by name.

    Args:
        reduced: of the step.
        lap: of the timesheet.
        began_s: when the step began, by `time.perf_counter`.
        data_wait_s: waiting for batches.
    """
    audit = {} if reduced.audit_s is None else {AUDIT: reduced.audit_s}
    return {
        "step_s": time.perf_counter() - began_s,
        "data_wait_s": data_wait_s,
        "exchange_wait_s": reduced.traffic.wait_s,
        "sent_bytes": reduced.traffic.sent_bytes,
        "at_s": time.time(),
        **audit,
        **lap,
    }


def record_before_update(
    plans: Sequence[ShardPlan],
    reduced: Reduced,
    optimizer: Optimizer,
    grad_norm: float,
    *,
    applied: bool,
) -> StepRecord:
    """What the ledger's line of a step will be, or would be, as known right before its update."""
    would_be = Updated(
        grad_norm=grad_norm, learning_rates=learning_rates(optimizer), skipped=not applied
    )
    return step_record(
        values_of(plans[0].step, plans[0].epoch, reduced, would_be),
        ids=[plan.ids for plan in plans],
        reduced=reduced,
        digest=None,
        timing={},
    )


def values_of(step: int, epoch: int, reduced: Reduced, updated: Updated) -> Values:
    """What hooks are told of a step."""
    return Values(
        step=step,
        epoch=epoch,
        loss=None if reduced.is_empty else reduced.loss,
        grad_norm=(
            None if math.isnan(updated.grad_norm) and updated.skipped else updated.grad_norm
        ),
        lr=tuple(updated.learning_rates),
        metrics=dict(reduced.metrics),
        skipped=updated.skipped,
    )
