"""The one writer of a run: what the workers report becomes real here, or not at all.

It takes records, checkpoints and incidents from the present attempt only, so that a worker that
was cut off and lives on can commit nothing. It checks that steps taken again equal the ledger's.
It knows no Ray: in mode local it is called through `link.InProcess`, else it lives in an actor;
all arguments and results are plain data. It is not safe for threads: whoever hosts it calls one
method at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.retention import apply_retention
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import commit
from samestep.errors import DivergenceError, RecorderError
from samestep.exact.numerics import differences
from samestep.incidents import record as incidents
from samestep.incidents.record import Incident
from samestep.names import RESULT_FILE, Event, IncidentKind, RunState
from samestep.telemetry import identity
from samestep.telemetry import lease as leases
from samestep.telemetry.batch import Batch
from samestep.telemetry.board import Board
from samestep.telemetry.ledger import LedgerWriter
from samestep.telemetry.past import Past, read_past
from samestep.telemetry.records import TOLERANCE, EventRecord
from samestep.telemetry.redo import Position, Redo

_ENDS: Final = (RunState.DONE, RunState.INTERRUPTED, RunState.FAILED)

logger = logging.getLogger(__name__)


class Recorder:
    """Opens a run directory for writing; made anew (after a crash) it goes on where it stopped.

    Args:
        run_uri: the run directory.
        run: name of the run.
        spec_yaml: the job as `spec.dump_spec` writes it.
        lease: take the run's lease; False only where the caller holds it.
        clock: seconds since the epoch.

    Raises:
        RunInUseError: another live recorder holds the run.
        RunConflictError: the directory belongs to a job whose bits would be others.
    """

    def __init__(
        self,
        run_uri: str,
        *,
        run: str,
        spec_yaml: str,
        lease: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = Storage.at(run_uri)
        self._name = run
        self._clock = clock
        self._spec = identity.parse_spec_text(spec_yaml, source="the job")
        self._lease = leases.acquire(self._run) if lease else None
        try:
            identity.keep_spec(self._run, spec_yaml)
            self._board = Board(run, clock=clock)
            self._writer = LedgerWriter(self._run, run_name=run)
            self._attempt = 0
            self._acknowledged: dict[str, int] = {}
            self._written: dict[str, tuple[int, int]] = {}
            self._stop: str | None = None
            self._divergence: str | None = None
            self._verdict: dict[str, Any] | None = None
            self._end: str | None = None
            self._committed: tuple[int, int, str] | None = None
            self._open_ledger()
        except BaseException:
            self.close()
            raise

    # What the driver calls.

    def begin_attempt(self, info: Mapping[str, Any]) -> int:
        """Starts the next attempt; from now on earlier ones are refused.

        Args:
            info: `start_step` (int), `mode`, `world_size`, `numerics` (a fingerprint), and what
                else is worth keeping: `hosts`, `total_steps`, `dataset_size`, `custom_order`,
                `placement_dependent` (lines telling why the bits depend on placement).

        Returns:
            The attempt's number, counted from 1 over the life of the run.

        Raises:
            RecorderError: the ledger does not hold all steps before `start_step`.
        """
        self._require_lease()
        start_step = int(info["start_step"])
        past = read_past(self._run)
        if start_step > past.num_steps:
            raise RecorderError(
                f"an attempt can't start at step {start_step}: the ledger of {self._run.uri} ends "
                f"with step {past.num_steps - 1}; resume from a checkpoint at or before step "
                f"{past.num_steps}, or deliver the missing steps first"
            )
        self._end_attempt_if_open("died" if self._returned else "restarted")
        number = max([self._attempt, *(attempt.number for attempt in past.attempts)]) + 1
        numerics = dict(info.get("numerics") or {})
        mixed = list(info.get("placement_dependent") or [])
        numerics_id = identity.numerics_id(numerics)
        # Bits that depend on placement equal no other attempt's, whatever the fingerprint says.
        values_id = f"{numerics_id}-placed-{number}" if mixed else numerics_id
        kept = {key: value for key, value in info.items() if key != "numerics"}
        kept |= {"known_steps": past.num_steps, "numerics_id": numerics_id, "values_id": values_id}
        self._run.delete(RESULT_FILE)
        previous = past.attempts[-1].numerics_id if past.attempts else None
        self._attempt, self._end, self._stop = number, None, None
        self._log(Event.ATTEMPT_STARTED, start_step, kept)
        self._tell_numerics(numerics, previous, start_step, mixed)
        self._enter(past, start_step, values_id)
        self._acknowledged, self._written = {}, {}
        self._open, self._returned, self._dirty = True, False, False
        self._divergence = self._verdict = None
        self._board.set(state=str(RunState.RUNNING), stop=None)
        return number

    def end_attempt(self, attempt: int, reason: str) -> None:
        """Notes why an attempt ended; an attempt that is no longer current is left alone."""
        if attempt == self._attempt:
            self._require_lease()
            self._end_attempt_if_open(reason)

    def request_stop(self, reason: str) -> None:
        """Asks the workers to stop at a step boundary; they learn of it with their next batch."""
        if self._stop is None and self._end is None:
            self._require_lease()
            self._stop = reason
            self._board.set(state=str(RunState.STOPPING), stop=reason)
            self._log(Event.STOP_REQUESTED, self._board.num_steps, {"reason": reason})

    def status(self, since_message: int = 0) -> dict[str, Any]:
        """The present state as plain data; see `Board.status`. Never fails."""
        if self._lease is not None and self._lease.lost:
            self._board.set(state=str(RunState.FENCED))
        return self._board.status(since_message)

    def say(self, text: str) -> None:
        """Adds a message for whoever follows the run; it is not kept in the ledger."""
        self._board.say(text)

    def finish(self, attempt: int, result: Mapping[str, Any]) -> None:
        """Ends the run: writes `result.json` and gives the lease back. Repeating it is harmless.

        Args:
            attempt: the present attempt; 0 when the run ended before its first.
            result: `status` (done, interrupted or failed), `step`, `digest`, `evaluation`,
                `exit_status`, `message`: plain data.
        """
        status = str(result["status"])
        if status not in _ENDS:
            raise RecorderError(f"a run can't end as {status!r}; allowed: {', '.join(_ENDS)}")
        if self._end is not None:
            return
        self._require_current(attempt)
        self._end_attempt_if_open(status)
        step = int(result.get("step", self._board.num_steps))
        self._log(Event.FINISHED, step, result)
        identity.write_result(
            self._run, {"run": self._name, "time": self._clock(), "attempt": attempt, **result}
        )
        self._end = status
        self._board.set(state=status)
        self.close()

    def fail(self, attempt: int, kind: str, message: str) -> None:
        """Notes that an attempt can't succeed; the first cause stays, later ones are echoes."""
        if attempt == self._attempt and self._verdict is None:
            self._verdict = {
                "attempt": attempt,
                "kind": kind,
                "message": message,
                "time": self._clock(),
            }
            self._board.say(f"attempt {attempt} fails ({kind}): {message.splitlines()[0]}")

    def verdict(self, attempt: int) -> dict[str, Any] | None:
        """The outcome noted by `fail` for this attempt, if there is one."""
        if self._verdict is not None and self._verdict["attempt"] == attempt:
            return dict(self._verdict)
        return None

    def close(self) -> None:
        """Gives the lease back without an end: the run can be resumed."""
        if self._lease is not None:
            self._lease.release()

    # What the workers call.

    def push(
        self,
        attempt: int,
        sender: str,
        sequence: int,
        records: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Takes a batch of records, or says why not.

        Args:
            attempt: the sender's attempt.
            sender: names the worker within its attempt.
            sequence: number of the batch, counted from 1 per sender; 0 with no records only
                asks. A batch that is in already is acknowledged again.
            records: `to_json` of step and event records, in order.

        Returns:
            `acknowledged` (number of the last batch that is in), `refused` (the attempt is not
            the present one, or the lease is lost), `stop` (end at the next step boundary),
            `divergence` (what differs from the ledger, or None), and, when batches before this
            one are missing, `expected`.

        Raises:
            RecorderError: steps out of order; nothing of the batch was taken.
            StorageError: the batch may be in part in the ledger; send it again.
        """
        if not self._is_current(attempt):
            return self._ack(sender, refused=True)
        last = self._acknowledged.get(sender)
        if last is None and not self._returned:
            last = 0
        if sequence == 0 or (last is not None and sequence <= last):
            return self._ack(sender)
        if last is not None and sequence > last + 1:
            return self._ack(sender) | {"expected": last + 1}
        if self._divergence is None:
            self._take(sender, sequence, records)
        self._acknowledged[sender] = sequence
        return self._ack(sender)

    def commit(self, attempt: int, manifest_json: str, keep: int) -> None:
        """Makes a checkpoint real whose files are written, and deletes the oldest beyond `keep`.

        Raises:
            RecorderError: the attempt is not the present one, or the ledger does not hold all
                steps before the checkpoint's: flush the link first.
            DivergenceError: the attempt diverged from the ledger.
        """
        self._require_current(attempt)
        manifest = Manifest.from_json(manifest_json)
        if self._divergence is not None:
            raise DivergenceError(
                f"the checkpoint at step {manifest.step} is not committed: {self._divergence}"
            )
        self._refresh()
        missing = self._position.missing_before(manifest.step)
        if missing is not None:
            raise RecorderError(
                f"the checkpoint at step {manifest.step} is not committed: step {missing} is not "
                "in the ledger yet; flush the link before committing"
            )
        commit(self._run, manifest)
        made = (attempt, manifest.step, manifest.digest)
        if made != self._committed:  # asked again because the answer was lost: told once
            fields = {"digest": manifest.digest}
            self._log(Event.CHECKPOINT_COMMITTED, manifest.step, fields)
            self._committed = made
        apply_retention(self._run, keep)

    def record_incident(self, attempt: int, incident: Mapping[str, Any]) -> str:
        """Writes an incident (`Incident.to_json`; time and attempt are filled in) for good.

        Returns:
            Its id: the name of its folder under `incidents/`.
        """
        self._require_current(attempt)
        given = {"attempt": attempt, **incident}
        if not given.get("time"):
            given["time"] = self._clock()
        return self._write_incident(Incident.from_json(given))

    # How it does it.

    def _open_ledger(self) -> None:
        past = read_past(self._run)
        for text in past.torn:
            logger.warning("run=%s %s; it will be delivered again", self._name, text)
        self._board.load(past)
        self._go_on(past)
        if self._open:
            self._stop = past.stop_reason
            state = RunState.STOPPING if self._stop else RunState.RUNNING
            self._board.set(state=str(state), stop=self._stop)

    def _go_on(self, past: Past) -> None:
        """Continues the last attempt as far as the ledger tells how far it was."""
        last = past.attempts[-1] if past.attempts else None
        self._attempt = last.number if last else 0
        self._open = last is not None and last.ended is None
        self._acknowledged = {}
        self._written = dict(past.written)
        self._returned = True
        before = replace(past, attempts=past.attempts[:-1])
        start_step = last.start_step if last else 0
        self._enter(before, start_step, last.values_id if last else "")
        low = last.next_step if last else 0
        self._position = replace(self._position, low=low, high=max(low, past.num_steps))
        self._dirty = False

    def _enter(self, past: Past, start_step: int, values_id: str) -> None:
        self._redo = Redo(
            checked=self._spec.reduction == "exact",
            values_id=values_id,
            tolerance=TOLERANCE[self._spec.precision],
        )
        self._redo.load(self._run, start_step=start_step, values_ids=past.values_ids())
        self._position = Position(
            start_step=start_step, low=start_step, high=start_step, num_known=past.num_steps
        )
        self._num_redone = 0

    def _refresh(self) -> None:
        """After a failed write nobody knows what reached the ledger: read it again."""
        if self._dirty:
            redone, returned = self._num_redone, self._returned
            self._go_on(read_past(self._run))
            self._num_redone, self._returned = redone, returned

    def _take(self, sender: str, sequence: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._refresh()
        batch = Batch(
            attempt=self._attempt,
            sender=sender,
            sequence=sequence,
            skip_through=self._written.get(sender, (0, -1)),
            position=self._position,
            redo=self._redo,
        )
        batch.judge(records)
        self._append(batch.lines)
        self._position = batch.position
        self._num_redone += len(batch.again)
        self._board.steps(batch.steps, num_again=len(batch.again))
        self._redo.passed(batch.again, batch.evaluations_again)
        for event in batch.events:
            self._board.event(event)
        if batch.differences:
            self._diverge(batch.differing_step, batch.differences)

    def _diverge(self, step: int, found: Sequence[str]) -> None:
        text = (
            f"step {step} taken again by attempt {self._attempt} differs from the ledger in "
            f"{found[0]}"
        )
        self._divergence = text
        self._write_incident(
            Incident(
                kind=IncidentKind.DIVERGENCE,
                step=step,
                attempt=self._attempt,
                message=text,
                time=self._clock(),
                seen={"differences": list(found)},
            )
        )

    def _write_incident(self, incident: Incident) -> str:
        written = incidents.write(self._run, incident)
        fields = {"id": written.id, "kind": str(written.kind), "message": written.message}
        self._log(Event.INCIDENT, written.step, fields)
        return written.id

    def _tell_numerics(
        self,
        numerics: Mapping[str, Any],
        previous: str | None,
        step: int,
        mixed: Sequence[str],
    ) -> None:
        if mixed:
            self._log(Event.PLACEMENT_DEPENDENT, step, {"differences": list(mixed)})
        if not numerics:
            return
        found = differences(identity.keep_numerics(self._run, numerics), numerics)
        if previous is not None and previous != identity.numerics_id(numerics):
            fields = {"differences": found or ["as at the run's start again"]}
            self._log(Event.NUMERICS_CHANGED, step, fields | {"numerics": dict(numerics)})

    def _end_attempt_if_open(self, reason: str) -> None:
        if self._open:
            fields: dict[str, Any] = {"reason": reason}
            if not self._returned:
                fields["redone"] = self._num_redone
            if self._verdict is not None:
                fields["cause"] = self._verdict["kind"]
                fields["message"] = self._verdict["message"]
            self._log(Event.ATTEMPT_ENDED, self._board.num_steps, fields)
            self._open = False

    def _log(self, kind: Event, step: int, fields: Mapping[str, Any]) -> None:
        event = EventRecord(
            event=kind, step=step, attempt=self._attempt, time=self._clock(), fields=fields
        )
        self._append([event.to_json()])
        self._board.event(event)

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._writer.append(lines)
        except BaseException:
            self._dirty = True
            raise

    def _ack(self, sender: str, *, refused: bool = False) -> dict[str, Any]:
        return {
            "acknowledged": self._acknowledged.get(sender, 0),
            "stop": self._stop is not None,
            "divergence": self._divergence,
            "refused": refused,
        }

    def _holds_lease(self) -> bool:
        return self._lease is None or self._lease.held()

    def _is_current(self, attempt: int) -> bool:
        return attempt == self._attempt and self._holds_lease()

    def _require_lease(self) -> None:
        if not self._holds_lease():
            raise RecorderError(
                f"the lease of {self._run.uri} is lost: another process goes on with this run; "
                "nothing more is written from here"
            )

    def _require_current(self, attempt: int) -> None:
        if self._end is not None:
            raise RecorderError(f"the run has ended ({self._end}); nothing more is written")
        self._require_lease()
        if attempt != self._attempt:
            raise RecorderError(
                f"attempt {attempt} is refused: the present one is {self._attempt}; a worker of "
                "an earlier attempt must end"
            )
