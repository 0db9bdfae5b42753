"""What the recorder knows of its ledger without reading all of it again."""

from __future__ import annotations

import tempfile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from recording import begin

from samestep.checkpoint.storage import Storage
from samestep.incidents.rollback import Rollback
from samestep.names import Event
from samestep.spec import parse_spec
from samestep.telemetry.board import Board
from samestep.telemetry.intake import Intake
from samestep.telemetry.ledger import read_ledger, segments, stays_after
from samestep.telemetry.past import Past, read_past
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.redo import NEW, Redo

JOB = {"workload": "digits:Digits", "batch_size": 8, "max_steps": 100, "shards": 2}
Known = dict[int, float]


def test_an_attempt_begins_without_reading_the_ledger_again(
    run: Storage, recorder: Recorder, push: Any
) -> None:
    push(recorder, begin(recorder), 1, 0, 5)
    assert run.local_path is not None
    for name in segments(run):
        (run.local_path / name).write_text("unreadable")
    assert begin(recorder, 6) == 2


class Story:
    """Attempts that come and go as drawn, written by an intake; `losses` is what is true now."""

    def __init__(self, run: Storage) -> None:
        self.intake = Intake(
            run, run_name="r", spec=parse_spec(JOB), board=Board("r"), clock=lambda: 1.0
        )
        self.losses: list[float] = []
        self._branch = 0

    def attempt(self, start: int, num_taken: int, slightly_other: bool, goes_back: bool) -> None:
        """Takes steps, with an evaluation behind each third one, and goes back at the end."""
        past = self.intake.known()
        start, values_id = min(start, past.num_steps), "b" if slightly_other else "a"
        number = len(past.attempts) + 1
        fields = {"start_step": start, "known_steps": past.num_steps, "values_id": values_id}
        self.intake.end({"reason": "restarted"})
        self.intake.begin(number, start_step=start, values_id=values_id)
        self.intake.log(Event.ATTEMPT_STARTED, start, fields)
        self.losses += [
            self._branch + step / 7 for step in range(len(self.losses), start + num_taken)
        ]
        records = []
        for step in range(start, start + num_taken):
            loss = self.losses[step] * (1 + 1e-9 * slightly_other)
            records.append(recorded(step, loss).to_json())
            if step % 3 == 2:
                records.append(evaluated(step + 1, loss).to_json())
        assert not self.intake.take("0", 1, records).differences
        if goes_back and self.losses:
            self._branch += 1
            to = start // 2
            back = Rollback(to=to, until=len(self.losses), attempt=number)
            self.intake.log(Event.ROLLED_BACK, to, back.to_json())
            del self.losses[to:]


def recorded(step: int, loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        samples=8,
        loss=loss,
        shard_losses=[loss],
        shard_weights=[8.0],
        grad_norm=1.0,
        lr=[0.1],
        ids="0",
    )


def evaluated(step: int, loss: float) -> EventRecord:
    fields = {"metrics": {"loss": loss}}
    return EventRecord(event=Event.EVALUATION, step=step, attempt=0, time=0.0, fields=fields)


def read_forwards(run: Storage, start: int) -> tuple[Known, Known]:
    """Losses and evaluations from a step on, by going through all of the ledger."""
    losses: Known = {}
    evaluations: Known = {}
    for line in read_ledger(run, start):
        stay = stays_after(line)
        if stay is not None:
            losses = {step: loss for step, loss in losses.items() if step < stay}
            evaluations = {step: loss for step, loss in evaluations.items() if step <= stay}
        elif line["type"] == "step":
            losses[line["step"]] = StepRecord.from_json(line).loss or 0.0
        elif line["event"] == Event.EVALUATION:
            event = EventRecord.from_json(line)
            evaluations[event.step] = event.fields["metrics"]["loss"]
    return losses, evaluations


def told(past: Past) -> list[Any]:
    return [
        *(past.attempts, past.num_steps, past.written, past.last_step, past.last_events),
        *(past.rollbacks, past.num_redone),
    ]


@settings(max_examples=60)
@given(
    attempts=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_the_end_of_the_ledger_tells_what_all_of_it_does(
    attempts: list[tuple[int, int, bool, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Storage.at(folder)
        story = Story(run)
        for start, num_taken, slightly_other, goes_back in attempts:
            story.attempt(start, num_taken, slightly_other, goes_back)
        past = story.intake.known()
        assert told(past) == told(read_past(run))
        for start in range(past.num_steps + 2):
            redo = Redo(checked=True, values_id="a", tolerance=0.0)
            redo.load(run, start_step=start, attempts=past.attempts)
            losses, evaluations = read_forwards(run, start)
            again = {n: redo.judge_step(recorded(n, losses.get(n, 0.0))) for n in range(20)}
            assert {n for n, judged in again.items() if judged != NEW} == losses.keys()
            assert not any(judged.differences for judged in again.values())
            again = {
                n: redo.judge_evaluation(evaluated(n, evaluations.get(n, 0.0))) for n in range(20)
            }
            assert {n for n, judged in again.items() if judged != NEW} == evaluations.keys()
            assert not any(judged.differences for judged in again.values())
