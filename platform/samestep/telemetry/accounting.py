"""Where a run's time went, computed from its ledger alone: parts without gaps or overlaps.

A cursor moves along the wall clock; whatever moves it says which parts the time behind it belongs
to, so the parts add up to the time that the run was being run. Within an attempt worker 0's own
clock tells (the `timing` of its steps, see `timesheet`); around it the events do. Time in which
nobody ran the run (after its end, or after its driver died) is not part of it.

Steps that an attempt takes again leave no lines: they are what lies between the attempt's beginning
and its first new step. What an attempt leaves at its end without a step to show for it is idle
(a fault, and the time to notice it). Steps that a rollback takes back were kept until then, and
stay so here: what is counted never gets less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from samestep.names import Activity, Event, TimePart
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.timesheet import ELAPSED, seconds_of

PART_OF: Final = {
    Activity.TRAINING: TimePart.KEPT,
    Activity.DATA: TimePart.DATA,
    Activity.COMMUNICATION: TimePart.COMMUNICATION,
    Activity.CHECKPOINT: TimePart.CHECKPOINT,
    Activity.EVALUATION: TimePart.EVALUATION,
    Activity.IDLE: TimePart.IDLE,
}
OPENED: Final = "opened_at"
PROCESS_STARTED: Final = "process_started"
NOTICED_LATE: Final = "noticed_late"
TIMING: Final = "timing"


@dataclass(kw_only=True)
class _Attempt:
    """The attempt that is under way.

    Attributes:
        began_s: when it began, in seconds since the epoch.
        redoing: it has not come to a new step yet.
        ended_s: when it was seen to have ended, None before.
    """

    began_s: float
    redoing: bool
    ended_s: float | None = None


class Accounting:
    """Adds up a ledger's lines, in their order; for one thread at a time.

    Attributes:
        seconds: by part; none ever gets less.
        recoveries: seconds from the last step of an attempt to the beginning of the next, for
            each pair with no planned end between them.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(TimePart, 0.0)
        self.recoveries: list[float] = []
        self._cursor = 0.0
        self._session_began: float | None = None
        self._past_sessions_s = 0.0
        self._attempt: _Attempt | None = None
        self._num_steps = 0

    @property
    def wall_s(self) -> float:
        """The time accounted for: that in which the run was being run, up to its last line."""
        if self._session_began is None:
            return self._past_sessions_s
        return self._past_sessions_s + self._cursor - self._session_began

    def unsettled_s(self, now: float) -> float:
        """Time since what was accounted last, while the run is being run.

        Args:
            now: seconds since the epoch.
        """
        return 0.0 if self._session_began is None else max(0.0, now - self._cursor)

    def goodput(self, now: float | None = None) -> float | None:
        """Seconds of kept training over all of the time; None before there was any."""
        wall_s = self.wall_s + (0.0 if now is None else self.unsettled_s(now))
        return self.seconds[TimePart.KEPT] / wall_s if wall_s > 0 else None

    def add(self, record: StepRecord | EventRecord) -> None:
        """Takes in the next line."""
        if isinstance(record, StepRecord):
            self._add_step(record)
            return
        match record.event:
            case Event.ATTEMPT_STARTED:
                self._start_attempt(record)
            case Event.ATTEMPT_ENDED if self._attempt is not None:
                if not record.fields.get(NOTICED_LATE):
                    self._attempt.ended_s = record.time
            case Event.ROLLED_BACK:
                self._num_steps = min(self._num_steps, record.step)
            case Event.FINISHED:
                self._finish(record)
            case _:
                pass

    def _add_step(self, record: StepRecord) -> None:
        attempt = self._attempt
        if attempt is None:  # no attempt began: a ledger without its first lines
            return
        seconds = seconds_of(record.timing)
        end = self._end_of(attempt, record.timing, seconds, record.time)
        room = end - self._cursor
        known = record.step < self._num_steps
        self._num_steps = max(self._num_steps, record.step + 1)
        if known:
            self._spend(TimePart.REDONE, end)
            return
        own = min(room, sum(seconds.values()))
        self._spend(TimePart.REDONE if attempt.redoing else TimePart.IDLE, end - own)
        attempt.redoing = False
        self._split(seconds, end)

    def _end_of(
        self,
        attempt: _Attempt,
        timing: Mapping[str, float],
        seconds: Mapping[Activity, float],
        limit: float | None,
    ) -> float:
        """When a step ended by the recorder's clock: never after it came in."""
        if ELAPSED in timing:
            end = attempt.began_s + float(timing[ELAPSED])
        else:
            end = self._cursor + sum(seconds.values())
        return max(self._cursor, end if limit is None else min(end, limit))

    def _start_attempt(self, record: EventRecord) -> None:
        fields, previous = record.fields, self._attempt
        opened = _number(fields, OPENED)
        if self._session_began is not None and opened is not None and opened > self._cursor:
            # The recorder before died without a word, and with it, for all we know, its driver.
            self._close_session()
        if self._session_began is None:
            opened = record.time if opened is None else min(opened, record.time)
            self._session_began = self._cursor = max(self._cursor, opened)
        elif previous is not None:
            self.recoveries.append(max(0.0, record.time - self._cursor))
            if previous.ended_s is not None:
                self._spend_tail(previous, min(previous.ended_s, record.time))
        process_started = _number(fields, PROCESS_STARTED)
        if process_started is not None:
            self._spend(TimePart.WAITING, min(process_started, record.time))
        self._spend(TimePart.STARTING, record.time)
        start_step = int(fields.get("start_step", record.step))
        known_steps = int(fields.get("known_steps", start_step))
        self._num_steps = max(self._num_steps, known_steps)
        self._attempt = _Attempt(began_s=record.time, redoing=known_steps > start_step)

    def _finish(self, record: EventRecord) -> None:
        attempt = self._attempt
        timing = record.fields.get(TIMING)
        if attempt is not None and isinstance(timing, Mapping):
            seconds = seconds_of(timing)
            end = self._end_of(attempt, timing, seconds, record.time)
            own = min(end - self._cursor, sum(seconds.values()))
            self._spend_tail(attempt, end - own)
            self._split(seconds, end)
        if attempt is not None:
            self._spend(TimePart.IDLE, record.time)
        self._attempt = None
        self._close_session()

    def _spend_tail(self, attempt: _Attempt, end: float) -> None:
        self._spend(TimePart.REDONE if attempt.redoing else TimePart.IDLE, end)

    def _close_session(self) -> None:
        self._past_sessions_s = self.wall_s
        self._session_began = None

    def _spend(self, part: TimePart, end: float) -> None:
        """Gives the time from the cursor to `end` to a part."""
        if self._session_began is not None and end > self._cursor:
            self.seconds[part] += end - self._cursor
            self._cursor = end

    def _split(self, seconds: Mapping[Activity, float], end: float) -> None:
        """Gives the time from the cursor to `end` to several parts, in proportion."""
        room, total = end - self._cursor, sum(seconds.values())
        if room <= 0 or total <= 0:
            self._spend(TimePart.IDLE, end)
            return
        for activity, value in seconds.items():
            self.seconds[PART_OF[activity]] += room * (value / total)
        self._cursor = end


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None
