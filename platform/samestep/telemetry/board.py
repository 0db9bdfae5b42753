"""The present state of a run, for whoever asks the recorder; holds no history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from samestep.incidents.rollback import Rollback
from samestep.names import Event, RunState
from samestep.telemetry.past import Past
from samestep.telemetry.records import EventRecord, StepRecord

MAX_MESSAGES: Final = 500
RATE_WINDOW_S: Final = 30.0


class Board:
    """Takes in what the recorder accepts and answers with plain data.

    Args:
        run: name of the run.
        clock: seconds, for rates.
    """

    def __init__(self, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._messages: deque[dict[str, Any]] = deque(maxlen=MAX_MESSAGES)
        self._num_messages = 0
        self._num_samples = 0
        self._num_taken = 0
        # Arrivals as (time, samples, steps): the rate is taken over the window they span.
        self._arrivals: deque[tuple[float, int, int]] = deque()
        self._last_step_s: tuple[float, int] | None = None
        self._values: dict[str, Any] = {
            "run": run,
            "state": str(RunState.STARTING),
            "attempt": 0,
            "mode": None,
            "workers": 0,
            "hosts": [],
            "step": 0,
            "epoch": 0,
            "total_steps": None,
            "loss": None,
            "grad_norm": None,
            "metrics": {},
            "evaluation": None,
            "last_checkpoint": None,
            "incidents": 0,
            "rollbacks": [],
            "redone": 0,
            "stop": None,
            "mlflow": None,
            "metrics_url": None,
        }

    @property
    def num_steps(self) -> int:
        """Steps taken so far, as the present attempt has them."""
        return int(self._values["step"])

    @property
    def num_workers(self) -> int:
        """Workers of the present attempt."""
        return int(self._values["workers"])

    @property
    def hosts(self) -> list[str]:
        """Their nodes, by world rank; empty where these are not known."""
        return list(self._values["hosts"])

    def load(self, past: Past) -> None:
        """Starts from what the ledger holds."""
        if past.last_step is not None:
            self._show_step(past.last_step)
        for kind in (Event.ATTEMPT_STARTED, Event.EVALUATION, Event.CHECKPOINT_COMMITTED):
            if kind in past.last_events:
                self._show_event(past.last_events[kind])
        self._values["incidents"] = past.num_incidents
        self._values["rollbacks"] = [rollback.to_json() for rollback in past.rollbacks]
        self._values["redone"] = past.num_redone

    def set(self, **values: Any) -> None:
        """Sets values that no record tells."""
        assert values.keys() <= self._values.keys(), f"unknown: {values.keys()}"
        self._values |= values

    def say(self, text: str) -> None:
        """Adds a message for whoever follows the run."""
        self._num_messages += 1
        self._messages.append({"number": self._num_messages, "time": self._clock(), "text": text})

    def steps(self, records: list[StepRecord], *, num_again: int) -> None:
        """Takes in steps that arrived together; `num_again` of them were known already."""
        if not records:
            return
        self._num_samples += sum(record.samples for record in records)
        self._num_taken += len(records)
        now = self._clock()
        self._arrivals.append((now, self._num_samples, self._num_taken))
        while len(self._arrivals) > 2 and now - self._arrivals[0][0] > RATE_WINDOW_S:
            self._arrivals.popleft()
        last = records[-1]
        if "step_s" in last.timing:
            self._last_step_s = (last.timing["step_s"], last.samples)
        self._values["redone"] += num_again
        self._show_step(last)

    def event(self, event: EventRecord) -> None:
        """Takes in an event."""
        if event.event == Event.ATTEMPT_STARTED:
            self._arrivals.clear()
            self._last_step_s = None
        self._show_event(event)
        if event.event == Event.INCIDENT:
            self._values["incidents"] += 1
        text = describe(event)
        if text:
            self.say(text)

    def status(self, since_message: int = 0) -> dict[str, Any]:
        """Everything at once; of the messages those with a number above `since_message`.

        `step` is the number of steps taken; `samples_per_s` and `eta_s` are None until known.
        """
        steps_per_s, samples_per_s = self._rates()
        total = self._values["total_steps"]
        eta_s = None
        if total is not None and steps_per_s:
            eta_s = max(0, total - self._values["step"]) / steps_per_s
        return {
            **self._values,
            "samples_per_s": samples_per_s,
            "eta_s": eta_s,
            "messages": [item for item in self._messages if item["number"] > since_message],
        }

    def _rates(self) -> tuple[float | None, float | None]:
        if len(self._arrivals) >= 2:
            (first_s, first_samples, first_steps), (last_s, last_samples, last_steps) = (
                self._arrivals[0],
                self._arrivals[-1],
            )
            if last_s > first_s:
                elapsed_s = last_s - first_s
                return (
                    (last_steps - first_steps) / elapsed_s,
                    (last_samples - first_samples) / elapsed_s,
                )
        if self._last_step_s is not None and self._last_step_s[0] > 0:
            step_s, samples = self._last_step_s
            return 1 / step_s, samples / step_s
        return None, None

    def _show_step(self, record: StepRecord) -> None:
        self._values |= {
            "step": record.step + 1,
            "epoch": record.epoch,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "metrics": dict(record.metrics),
        }

    def _show_event(self, event: EventRecord) -> None:
        fields = event.fields
        match event.event:
            case Event.ATTEMPT_STARTED:
                self._values |= {
                    "attempt": event.attempt,
                    "mode": fields.get("mode"),
                    "workers": fields.get("world_size", 0),
                    "hosts": fields.get("hosts", []),
                    "total_steps": fields.get("total_steps"),
                }
            case Event.EVALUATION:
                self._values["evaluation"] = {
                    "step": event.step,
                    "metrics": dict(fields.get("metrics", {})),
                    "samples": fields.get("samples"),
                }
            case Event.CHECKPOINT_COMMITTED:
                self._values["last_checkpoint"] = {"step": event.step, "time": event.time}
            case Event.ROLLED_BACK:
                self._show_rollback(event)
            case _:
                pass

    def _show_rollback(self, event: EventRecord) -> None:
        rollback = Rollback.from_json({**event.fields, "attempt": event.attempt})
        values = self._values
        values["rollbacks"] = [*values["rollbacks"], rollback.to_json()]
        values["step"] = min(values["step"], event.step)
        for name in ("evaluation", "last_checkpoint"):
            if values[name] is not None and values[name]["step"] > event.step:
                values[name] = None


def describe(event: EventRecord) -> str:
    """An event in a few words, for people; empty where there is nothing to say."""
    fields: Mapping[str, Any] = event.fields
    match event.event:
        case Event.ATTEMPT_STARTED:
            workers = int(fields.get("world_size", 0))
            return (
                f"attempt {event.attempt} starts at step {event.step}: mode {fields.get('mode')}, "
                f"{workers} worker{'' if workers == 1 else 's'}"
            )
        case Event.ATTEMPT_ENDED:
            return f"attempt {event.attempt} ended at step {event.step}: {fields.get('reason')}"
        case Event.CHECKPOINT_COMMITTED:
            return f"checkpoint at step {event.step}"
        case Event.CHECKPOINT_FAILED:
            return str(fields.get("message", ""))
        case Event.STOP_REQUESTED:
            return f"stop requested: {fields.get('reason')}"
        case Event.EVALUATION:
            metrics = ", ".join(
                f"{name} {value:.6g}" for name, value in fields.get("metrics", {}).items()
            )
            return f"evaluation at step {event.step}: {metrics}"
        case Event.NUMERICS_CHANGED:
            return f"numerics changed: {'; '.join(fields.get('differences', []))}"
        case Event.PLACEMENT_DEPENDENT:
            return f"the bits depend on placement: {'; '.join(fields.get('differences', []))}"
        case Event.RECOVERED:
            return describe_recovery(fields)
        case Event.ROLLED_BACK:
            rollback = Rollback.from_json({**fields, "attempt": event.attempt})
            return f"{rollback.describe()} ({rollback.message})"
        case Event.FORKED:
            return f"forked from {fields.get('parent')} after {event.step} steps"
        case Event.INCIDENT:
            return f"incident {fields.get('id')}: {fields.get('message')}"
        case Event.MESSAGE:
            return str(fields.get("text", ""))
        case Event.FINISHED:
            return ""


def describe_recovery(fields: Mapping[str, Any]) -> str:
    """A recovery in a line.

    Args:
        fields: of the event: `cause`, `message`, `planned`, `again_s` (from the fault, or the
            decision, to the next step), `detected_s` (to the decision; None where it was
            planned), `redone` (steps taken again), `workers` (before and after).
    """
    before, after = fields.get("workers", (0, 0))
    size = f"{after} workers" if before == after else f"{before} to {after} workers"
    detected_s = fields.get("detected_s")
    detected = "" if detected_s is None else f"noticed after {detected_s:.2f} s, "
    return (
        f"{fields.get('cause')}: {detected}training again after {fields.get('again_s', 0.0):.2f} "
        f"s, {fields.get('redone', 0)} steps redone, {size}"
    )
