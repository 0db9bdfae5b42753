"""How records get into the ledger: which are new, which were there, and what was acknowledged.

All of its state can be read back from the ledger, so that a recorder that died, or failed over a
write, goes on without losing a record or writing one twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.exact.numerics import tolerance
from samestep.incidents.redaction import Redaction
from samestep.names import Event
from samestep.spec import JobSpec
from samestep.telemetry.batch import Batch
from samestep.telemetry.board import Board
from samestep.telemetry.identity import read_numerics
from samestep.telemetry.ledger import LedgerWriter
from samestep.telemetry.past import Attempt, Past, read_past
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.redo import Position, Redo

TOLD: Final = ("message", "reason")
"""Fields of events that may hold what an exception says."""


class Intake:
    """The writing end of a run's ledger.

    Args:
        run: the run directory.
        run_name: name of the run.
        spec: the job; tells what steps taken again are held to.
        board: shown what was taken.
        clock: seconds since the epoch.
        announce: told that the ledger may have grown, with the last step that came in, if any.

    Attributes:
        attempt: number of the present attempt; 0 before the first.
        open: whether the present attempt has no end in the ledger.
        returned: the present attempt was begun by an earlier recorder.
        num_redone: steps of the present attempt that the ledger had already.
        num_due_again: steps that the ledger had when the present attempt began, behind its start.
        start_step: the present attempt's first step.
    """

    attempt: int
    open: bool
    num_redone: int
    num_due_again: int
    start_step: int
    _acknowledged: dict[str, int]
    _written: dict[str, tuple[int, int]]
    _position: Position
    _evaluated: int
    _redo: Redo
    _dirty: bool

    def __init__(
        self,
        run: Storage,
        *,
        run_name: str,
        spec: JobSpec,
        board: Board,
        clock: Callable[[], float],
        announce: Callable[[StepRecord | None], None] = lambda latest: None,
    ) -> None:
        self._announce = announce
        self._run = run
        self._spec = spec
        self._redact = Redaction(spec).plain
        self._board = board
        self._clock = clock
        self._writer = LedgerWriter(run, run_name=run_name)
        self.past = read_past(run)
        board.load(self.past)
        self.returned = True
        self._go_on(self.past)

    def known(self) -> Past:
        """The sum of the ledger as it is now; grows with it."""
        if self._dirty:
            self.past = read_past(self._run)
        self.past.find_last_step(self._run)
        return self.past

    def begin(self, attempt: int, *, start_step: int, values_id: str) -> None:
        """Goes over to a new attempt, whose start is logged next; before it, `known` was asked."""
        self.attempt = attempt
        self.open, self.returned, self._dirty = True, False, False
        self._acknowledged, self._written, self._evaluated = {}, {}, -1
        self._enter(self.past.attempts, start_step, values_id)

    def end(self, fields: Mapping[str, Any]) -> None:
        """Logs the end of the present attempt, unless it has one."""
        if self.open:
            counted = {} if self.returned else {"redone": self.num_redone}
            self.log(Event.ATTEMPT_ENDED, self._board.num_steps, {**fields, **counted})
            self.open = False

    def acknowledged(self, sender: str) -> int | None:
        """The last batch of a sender that is in; None when only the sender can know."""
        return self._acknowledged.get(sender, None if self.returned else 0)

    def acknowledge(self, sender: str, sequence: int) -> None:
        """Notes that a batch needs not be sent again."""
        self._acknowledged[sender] = sequence

    def take(self, sender: str, sequence: int, records: Sequence[Mapping[str, Any]]) -> Batch:
        """Writes what is new of a batch; `differences` of the result tell of a divergence.

        Raises:
            RecorderError: a step out of order, or a record of an unknown type; nothing is taken.
            StorageError: an unknown part of the batch was written; it may be sent again.
        """
        self._refresh()
        batch = Batch(
            attempt=self.attempt,
            sender=sender,
            sequence=sequence,
            skip_through=self._written.get(sender, (0, -1)),
            position=self._position,
            redo=self._redo,
            time=self._clock(),
            evaluated=self._evaluated,
        )
        batch.judge(records)
        self._append(batch.lines)
        self._position, self._evaluated = batch.position, batch.evaluated
        self._redo.passed(batch.again, batch.evaluations_again)
        self.num_redone += len(batch.again)
        self._board.steps(batch.steps, num_again=len(batch.again))
        for event in batch.events:
            self._board.event(event)
        self._announce(batch.steps[-1] if batch.steps else None)
        return batch

    def missing_before(self, step: int) -> int | None:
        """The first step before `step` that the present attempt has not brought, if any."""
        self._refresh()
        return self._position.missing_before(step)

    def log(self, kind: Event, step: int, fields: Mapping[str, Any]) -> None:
        """Writes an event of the recorder's own; what failures tell goes without secrets."""
        told = {name: self._redact(fields[name]) for name in TOLD if name in fields}
        fields = {**fields, **told}
        event = EventRecord(
            event=kind, step=step, attempt=self.attempt, time=self._clock(), fields=fields
        )
        self._append([event.to_json()])
        self._board.event(event)
        self._announce(None)

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._writer.append(lines)
        except BaseException:
            self._dirty = True
            raise
        for line in lines:
            self.past.take(line)

    def _refresh(self) -> None:
        """After a failed write nobody knows what reached the ledger: reads it again."""
        if self._dirty:
            num_redone, attempt_open = self.num_redone, self.open
            self.past = read_past(self._run)
            self._go_on(self.past)
            self.num_redone, self.open = num_redone, attempt_open

    def _go_on(self, past: Past) -> None:
        """Continues the last attempt as far as the ledger tells how far it was."""
        last = past.attempts[-1] if past.attempts else None
        self.attempt = last.number if last else 0
        self.open = last is not None and last.ended is None
        self._dirty = False
        if self.returned:
            self._acknowledged = {}
        self._written = dict(past.written)
        evaluation = past.last_events.get(Event.EVALUATION)
        is_own = evaluation is not None and evaluation.attempt == self.attempt
        self._evaluated = evaluation.step if evaluation is not None and is_own else -1
        start_step, values_id = (last.start_step, last.values_id) if last else (0, "")
        self._enter(past.attempts[:-1], start_step, values_id)
        # Steps that were taken again without being written left no trace: any of them may be next.
        low = last.next_step if last else 0
        self._position = replace(self._position, low=low, high=max(low, past.num_steps))

    def _enter(self, before: Sequence[Attempt], start_step: int, values_id: str) -> None:
        self._redo = Redo(
            checked=self._spec.reduction == "exact",
            values_id=values_id,
            tolerance=tolerance(self._spec.precision, read_numerics(self._run) or {}),
        )
        self.start_step, num_steps = start_step, self.past.num_steps
        self.num_due_again = max(0, num_steps - start_step)
        self._redo.load(self._run, start_step=start_step, attempts=before)
        self._position = Position(
            start_step=start_step, low=start_step, high=start_step, num_known=num_steps
        )
        self.num_redone = 0
