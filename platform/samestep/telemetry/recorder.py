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
from contextlib import suppress
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.errors import DivergenceError, RecorderError, StorageError
from samestep.incidents.rollback import Rollback
from samestep.names import RESULT_FILE, Event, RunState
from samestep.telemetry import identity
from samestep.telemetry.accounting import NOTICED_LATE, OPENED, TIMING
from samestep.telemetry.board import Board
from samestep.telemetry.budget import ended_by_budget
from samestep.telemetry.bundle_desk import BundleCalls, BundleDesk
from samestep.telemetry.commits import Commits
from samestep.telemetry.incident_log import IncidentLog
from samestep.telemetry.intake import Intake
from samestep.telemetry.outlet import CLOSE_S, DRAIN_S, FAILING_DRAIN_S, Outlets
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.rollbacks import Rollbacks
from samestep.telemetry.saves import Part, Saves
from samestep.telemetry.sink import RunInfo, Sink
from samestep.telemetry.slowness import Slowness
from samestep.telemetry.tenure import Tenure

_ENDS: Final = (
    RunState.DONE,
    RunState.INTERRUPTED,
    RunState.BUDGET_EXHAUSTED,
    RunState.FAILED,
)

logger = logging.getLogger(__name__)


class Recorder(BundleCalls):
    """Opens a run directory for writing; made anew (after a crash) it goes on where it stopped.

    Args:
        run_uri: the run directory.
        run: name of the run.
        spec_yaml: the job as `spec.dump_spec` writes it.
        lease: take the run's lease; False only where the caller holds it.
        clock: seconds since the epoch.
        sinks: where else the run is shown; each works in a thread of its own until `close`.
        about: facts about the run that only its launcher knows, for the sinks.
        returning: the process of the recorder before died in mid-run: the sinks may warn, but
            not refuse to start.

    Raises:
        InputError: a sink refuses the start.
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
        sinks: Sequence[Sink] = (),
        about: Mapping[str, str] = MappingProxyType({}),
        returning: bool = False,
    ) -> None:
        self._run = Storage.at(run_uri)
        self._outlets: Outlets | None = None
        self._name = run
        self._clock = clock
        self._stop: str | None = None
        self._divergence: str | None = None
        self._verdict: dict[str, Any] | None = None
        self._end: str | None = None
        # Of a process that came back in mid-run it says nothing: the run went on meanwhile.
        self._opened_at = None if returning else clock()
        spec = identity.parse_spec_text(spec_yaml, source="the job")
        self._tenure = Tenure(self._run, take=lease)
        try:
            identity.keep_spec(self._run, spec_yaml)
            self._board = Board(run, clock=clock)
            self._intake = Intake(
                self._run,
                run_name=run,
                spec=spec,
                board=self._board,
                clock=clock,
                announce=self._announce,
            )
            self._rollbacks = Rollbacks(
                self._run, log=self._intake.log, past=self._intake.past.rollbacks
            )
            self._commits = Commits(
                self._run,
                intake=self._intake,
                rollbacks=self._rollbacks,
                back_steps=spec.incidents.back_steps,
                divergence=lambda: self._divergence,
            )
            self._slowness = Slowness(spec.incidents)
            self._bundles = BundleDesk(run=self._run, keep=spec.incidents.bundle.keep)
            log, noted = self._intake.log, self._bundles.note
            self._incidents = IncidentLog(self._run, spec, log=log, clock=clock, noted=noted)
            self._saves = Saves(
                self._run,
                commit=self._commits.commit,
                say=self._board.say,
                log=log,
                incident=self._incidents.write,
            )
            info = RunInfo(run=self._run, name=run, spec=spec, about=about, returning=returning)
            past = self._intake.past
            self._outlets = Outlets(sinks, info, self._tenure, num_lines=past.num_lines)
        except BaseException:
            self.close()
            raise
        for text in past.torn:
            logger.warning("run=%s %s; it will be delivered again", run, text)
        if not returning:  # the group of the attempt before is gone
            self._board.set(mode=None, workers=0, hosts=[])
        if self._intake.open:
            self._stop = past.stop_reason
            state = RunState.STOPPING if self._stop else RunState.RUNNING
            self._board.set(state=str(state), stop=self._stop)

    def begin_attempt(self, info: Mapping[str, Any]) -> int:
        """Starts the next attempt; from now on earlier ones are refused.

        Args:
            info: `start_step` (int), `num_rollbacks` (that the workers know of), `mode`,
                `world_size`, `numerics` (a fingerprint), and what else is worth keeping: `hosts`,
                `total_steps`, `dataset_size`, `custom_order`, `placement_dependent` (lines telling
                why the bits depend on placement).

        Returns:
            The attempt's number, counted from 1 over the life of the run.

        Raises:
            RecorderError: the ledger does not hold all steps before `start_step`.
            PeerLostError: the run went back since the workers met (`num_rollbacks`).
        """
        self._tenure.require()
        start_step = int(info["start_step"])
        past = self._intake.known()
        self._board.set(rollbacks=[each.to_json() for each in past.rollbacks])
        self._rollbacks.resume(
            past.rollbacks,
            last_attempt=self._intake.attempt,
            num_known=int(info.get("num_rollbacks", 0)),
        )
        if start_step > past.num_steps:
            raise RecorderError(
                f"an attempt can't start at step {start_step}: the ledger of {self._run.uri} ends "
                f"with step {past.num_steps - 1}; resume from a checkpoint at or before step "
                f"{past.num_steps}, or deliver the missing steps first"
            )
        self._settle_stalls()
        reason = "died" if self._intake.returned else "restarted"
        self._intake.end({"reason": reason, NOTICED_LATE: True})
        previous = past.attempts[-1].numerics_id if past.attempts else None
        number = max([self._intake.attempt, *(attempt.number for attempt in past.attempts)]) + 1
        numerics = dict(info.get("numerics") or {})
        mixed = list(info.get("placement_dependent") or [])
        numerics_id = identity.numerics_id(numerics)
        # Bits that depend on placement equal no other attempt's, whatever the fingerprint says.
        values_id = f"{numerics_id}-placed-{number}" if mixed else numerics_id
        kept = {key: value for key, value in info.items() if key != "numerics"}
        kept |= {"known_steps": past.num_steps, "numerics_id": numerics_id, "values_id": values_id}
        if self._opened_at is not None:
            kept[OPENED], self._opened_at = self._opened_at, None
        self._run.delete(RESULT_FILE)
        self._saves.begin_attempt()
        self._intake.begin(number, start_step=start_step, values_id=values_id)
        self._end = self._stop = self._divergence = self._verdict = None
        self._intake.log(Event.ATTEMPT_STARTED, start_step, kept)
        for event, told in identity.numerics_events(self._run, numerics, previous, mixed):
            self._intake.log(event, start_step, told)
        self._board.set(state=str(RunState.RUNNING), stop=None)
        return number

    def end_attempt(self, attempt: int, reason: str) -> None:
        """Notes why an attempt ended; an attempt that is no longer current is left alone."""
        if attempt == self._intake.attempt:
            self._tenure.require()
            self._end_attempt(reason)

    def request_stop(self, reason: str) -> None:
        """Asks the workers to stop at a step boundary; they learn of it with their next batch."""
        if self._stop is None and self._end is None:
            self._tenure.require()
            self._stop = reason
            self._board.set(state=str(RunState.STOPPING), stop=reason)
            self._intake.log(Event.STOP_REQUESTED, self._board.num_steps, {"reason": reason})

    def status(self, since_message: int = 0) -> dict[str, Any]:
        """The present state as plain data; see `Board.status`. Never fails."""
        if self._tenure.is_lost:
            self._board.set(state=str(RunState.FENCED))
        elif self._incidents.stalls.is_due(self._board.num_workers):
            with suppress(StorageError):
                self._settle_stalls()
        if self._outlets:
            self._board.set(**self._outlets.status())
            for note in self._outlets.notes():
                self._board.say(note)
        return self._board.status(since_message)

    def say(self, text: str) -> None:
        """Adds a message for whoever follows the run; it is not kept in the ledger."""
        self._board.say(text)

    def finish(self, attempt: int, result: Mapping[str, Any]) -> None:
        """Ends the run: writes `result.json`. Repeating it is harmless.

        The lease is given back at once where there are no sinks, else by `close`.

        Args:
            attempt: the present attempt; 0 when it ended before this recorder began one.
            result: `status` (done, interrupted, failed), `step`, `digest`, `evaluation`,
                `exit_status`, `message`: plain data; `timing` (see `timesheet`) of what came
                after the last step is kept in the ledger alone.
        """
        result = ended_by_budget(result, self._stop)
        status = str(result["status"])
        if status not in _ENDS:
            raise RecorderError(f"a run can't end as {status!r}; allowed: {', '.join(_ENDS)}")
        if self._end is not None:
            return
        self._require_current(attempt)
        self._settle_stalls()
        self._saves.tell()
        self._end_attempt(status)
        step = int(result.get("step", self._board.num_steps))
        self._intake.log(Event.FINISHED, step, result)
        kept = {key: value for key, value in result.items() if key != TIMING}
        identity.write_result(
            self._run, {"run": self._name, "time": self._clock(), "attempt": attempt, **kept}
        )
        self._end = status
        self._board.set(state=status)
        if not self._outlets:  # else the run is held until its sinks have got everything
            self.close()

    def fail(self, attempt: int, kind: str, message: str) -> None:
        """Notes that an attempt can't succeed; the first cause stays, later ones are echoes."""
        if attempt == self._intake.attempt and self._verdict is None:
            self._verdict = {
                "attempt": attempt,
                "kind": kind,
                "message": message,
                "time": self._clock(),
            }
            self._board.say(f"attempt {attempt} fails ({kind}): {message.splitlines()[0]}")

    def stalled(self, attempt: int, world_rank: int, host: str, report: Mapping[str, Any]) -> None:
        """Takes in what a worker's watchdog saw; one incident comes of all workers' reports."""
        if attempt == self._intake.attempt and self._end is None:
            self._incidents.stalled(attempt, world_rank, host, report)

    def report(self, data: Mapping[str, Any]) -> bool:
        """Takes in what a worker tells of itself, for display (`WorkerReport.to_json`).

        Returns:
            Whether its attempt is still the present one.
        """
        if data.get("attempt") != self._intake.attempt or self._end is not None:
            return False
        given = WorkerReport.from_json(data)
        if self._outlets:
            self._outlets.report(given)
        slow = self._slowness.take(given, hosts=self._board.hosts, step=self._board.num_steps)
        if slow is not None:
            self._incidents.write(replace(slow, time=self._clock()))
        return True

    def verdict(self, attempt: int) -> dict[str, Any] | None:
        """The outcome noted by `fail` for this attempt, if there is one."""
        if self._verdict is not None and self._verdict["attempt"] == attempt:
            return dict(self._verdict)
        return None

    def result(self) -> dict[str, Any] | None:
        """The run's result once `finish` has written it."""
        return identity.read_result(self._run) if self._end is not None else None

    def drain(
        self, timeout_s: float = DRAIN_S, failing_timeout_s: float = FAILING_DRAIN_S
    ) -> list[str]:
        """Waits until the sinks have got everything; returns the names of those that have not.

        Args:
            timeout_s: how long to wait for one that works.
            failing_timeout_s: how long for one that can't be reached at present.
        """
        return self._outlets.drain(timeout_s, failing_timeout_s) if self._outlets else []

    def close(self) -> None:
        """As `leave`, after the sinks got what they can take while the run is still ours."""
        if self._outlets and self._tenure.surely_holds():
            lacking = self.drain()
            if lacking:
                logger.info(
                    "run=%s closes before everything was delivered to %s; the records are in the "
                    "ledger, and the next start of the run delivers them",
                    self._name,
                    ", ".join(lacking),
                )
            self.status()  # takes the sinks' last notes
        self.leave(CLOSE_S)

    def leave(self, timeout_s: float) -> None:
        """Gives the lease back: the run can be resumed. The sinks get so long to end."""
        if self._outlets:
            self._outlets.close(timeout_s)
        self._tenure.release()

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
        is_over = self._end is not None or self._rollbacks.has_ended(attempt)
        if attempt != self._intake.attempt or is_over or not self._tenure.holds():
            return self._ack(sender, refused=True)
        last = self._intake.acknowledged(sender)
        if sequence == 0 or (last is not None and sequence <= last):
            return self._ack(sender)
        if last is not None and sequence > last + 1:
            return self._ack(sender) | {"expected": last + 1}
        if self._divergence is None:
            batch = self._intake.take(sender, sequence, records)
            if batch.differences:
                step, first = batch.differing_step, batch.differences[0]
                text = (
                    f"step {step} taken again by attempt {attempt} differs from the ledger: {first}"
                )
                self._diverge(step, text, batch.differences)
        self._intake.acknowledge(sender, sequence)
        return self._ack(sender)

    def commit(self, attempt: int, manifest_json: str, keep: int) -> None:
        """Makes a checkpoint real whose files are written, and deletes the oldest beyond `keep`.

        Raises:
            RecorderError: the attempt is not the present one, or the ledger does not hold all
                steps before the checkpoint's: flush the link first.
            DivergenceError: the attempt diverged from the ledger.
        """
        self._require_current(attempt)
        self._commits.commit(manifest_json, keep)

    def part(self, attempt: int, part: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a worker's part of a save; the last one that comes in commits the checkpoint.

        To be called again until the save has ended.

        Args:
            attempt: the present attempt.
            part: fields of a `saves.Part`.

        Returns:
            Fields of a `saves.Answer`: `state` (waiting, committed or failed), `message`, `digest`.

        Raises:
            RecorderError: the attempt is not the present one.
            DivergenceError: the workers' states differ, or the attempt from the ledger.
        """
        self._require_current(attempt)
        given = Part(**part)
        try:
            return asdict(self._saves.take(given, attempt))
        except DivergenceError as error:
            if self._divergence is None:  # every worker learns of it with its next batch
                self._diverge(given.step, str(error), [str(error)])
            raise

    def record_incident(self, attempt: int, incident: Mapping[str, Any]) -> str:
        """Writes an incident for good.

        Args:
            attempt: the present attempt; 0 before this recorder began one.
            incident: `Incident.to_json`; format, attempt, time and id may be left out.

        Returns:
            Its id: the name of its folder under `incidents/`.
        """
        self._require_current(attempt)
        return self._incidents.take(incident, attempt=attempt)

    def roll_back(self, attempt: int, rollback: Mapping[str, Any]) -> None:
        """Ends an attempt by a decision to go back (`Rollback.to_json`), which all workers took."""
        self._require_current(attempt)
        if self._divergence is not None:
            raise DivergenceError(self._divergence)
        self._rollbacks.enter(Rollback.from_json(rollback))
        self._board.load(self._intake.known())
        self._end_attempt(str(Event.ROLLED_BACK))

    def _settle_stalls(self) -> None:
        if self._tenure.holds() and self._end is None:
            self._incidents.settle_stalls(
                attempt=self._intake.attempt, num_workers=self._board.num_workers
            )

    def note_incident(self, incident: Mapping[str, Any]) -> str:
        """Writes an incident that the controller noticed; it outlives attempts, and so does this.

        Args:
            incident: `Incident.to_json`, with its attempt.
        """
        self._tenure.require()
        return self._incidents.take(incident, attempt=0)

    def give_up(self, kind: str, message: str) -> None:
        """Notes, for the controller, why the run fails, whatever its present attempt."""
        self.fail(self._intake.attempt, kind, message)

    def recovered(self, attempt: int, fields: Mapping[str, Any]) -> None:
        """Enters how long it took until training went on; the steps redone are put to it.

        Args:
            attempt: the one that training went on with.
            fields: see `board.describe_recovery`.
        """
        self._require_current(attempt)
        step = self._intake.start_step
        self._intake.log(Event.RECOVERED, step, {**fields, "redone": self._intake.num_due_again})

    def _announce(self, latest: StepRecord | None) -> None:
        if self._outlets:
            self._outlets.announce(latest, self._intake.past.num_lines)

    def _end_attempt(self, reason: str) -> None:
        fields: dict[str, Any] = {"reason": reason}
        if self._verdict is not None:
            fields |= {"cause": self._verdict["kind"], "message": self._verdict["message"]}
        self._intake.end(fields)

    def _diverge(self, step: int, text: str, found: Sequence[str]) -> None:
        self._divergence = text
        self._incidents.diverged(step, text, found, attempt=self._intake.attempt)

    def _ack(self, sender: str, *, refused: bool = False) -> dict[str, Any]:
        return {
            "acknowledged": self._intake.acknowledged(sender) or 0,
            "stop": self._stop is not None,
            "divergence": self._divergence,
            "refused": refused,
        }

    def _require_current(self, attempt: int) -> None:
        if self._end is not None:
            raise RecorderError(f"the run has ended ({self._end}); nothing more is written")
        self._tenure.require()
        present = self._intake.attempt
        before_first = attempt == 0 and self._intake.returned
        if attempt != present and not before_first:
            raise RecorderError(
                f"attempt {attempt} is refused: the present one is {present}; a worker of an "
                "earlier attempt must end"
            )
