from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from recording import take_over

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, StorageError
from samestep.names import RunState
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.node_load import NodeLoad
from samestep.telemetry.outlet import Outlet, Outlets
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.sink import RunInfo, StartOver
from samestep.telemetry.spool import START, Line, Position

SPEC = parse_spec({"workload": "a:B", "batch_size": 8, "shards": 2, "max_steps": 100})


class Fake:
    """A sink that keeps what it gets; fails and waits as it is told."""

    name = "fake"
    interval_s = 0.0

    def __init__(self, position: Position = START, failures: Sequence[BaseException] = ()) -> None:
        self.position = position
        self.failures = list(failures)
        self.steps: list[int] = []
        self.shown: list[int] = []
        self.reported: list[int] = []
        self.num_takes = 0
        self.closed = threading.Event()
        self.abandoned = threading.Event()
        self.taking = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def started(self, info: RunInfo) -> Position:
        self.info = info
        return self.position

    def take(self, lines: Sequence[Line], *, more: bool) -> None:
        self.num_takes += 1
        self.taking.set()
        self.gate.wait(30)
        if self.failures and lines:
            raise self.failures.pop(0)
        self.steps += [line.record.step for line in lines if isinstance(line.record, StepRecord)]

    def live(self, record: StepRecord) -> None:
        self.shown.append(record.step)

    def wants(self, report: WorkerReport) -> bool:
        return report.node is not None

    def reports(self, found: Sequence[WorkerReport], num_dropped: int) -> None:
        self.reported += [report.world_rank for report in found]

    def status(self) -> dict[str, Any]:
        return {"metrics_url": "http://here"}

    def explain(self, error: BaseException) -> str:
        return f"fake fails: {error}"

    def wait_until_seen(self) -> bool:
        self.seen_after = len(self.steps)
        return True

    def close(self) -> None:
        self.closed.set()

    def abandon(self) -> None:
        self.abandoned.set()


class Refusing(Fake):
    def started(self, info: RunInfo) -> Position:
        raise InputError("not like this")


Open = Callable[..., Recorder]


@pytest.fixture
def open_recorder(run: Storage) -> Iterator[Open]:
    opened: list[Recorder] = []

    def make(*sinks: Fake, **options: Any) -> Recorder:
        recorder = Recorder(run.uri, run="r", spec_yaml=dump_spec(SPEC), sinks=sinks, **options)
        opened.append(recorder)
        return recorder

    yield make
    for recorder in opened:
        recorder.close()


@pytest.fixture
def tell(make_step: Callable[..., StepRecord]) -> Callable[[Recorder, int, int], None]:
    def steps(recorder: Recorder, start: int, stop: int) -> None:
        attempt = recorder.begin_attempt({"start_step": start, "mode": "ddp", "world_size": 1})
        records = [make_step(step).to_json() for step in range(start, stop)]
        recorder.push(attempt, "0", 1, records)

    return steps


def test_what_reaches_the_ledger_reaches_the_sink_in_order(open_recorder: Open, tell: Any) -> None:
    sink = Fake()
    recorder = open_recorder(sink)
    tell(recorder, 0, 1200)
    assert recorder.drain() == []
    assert sink.steps == list(range(1200))
    assert sink.shown[-1] == 1199


def test_steps_taken_again_are_shown_but_not_delivered_again(
    open_recorder: Open, tell: Any
) -> None:
    sink = Fake()
    recorder = open_recorder(sink)
    tell(recorder, 0, 5)
    tell(recorder, 2, 4)
    assert recorder.drain() == []
    assert sink.steps == [0, 1, 2, 3, 4]
    assert sink.shown[-1] == 3


def test_a_failure_is_told_once_and_what_failed_is_delivered_again(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    sink = Fake(failures=[OSError("first"), OSError("second")])
    recorder = open_recorder()
    tell(recorder, 0, 3)
    outlet = Outlet(sink, RunInfo(run=run, name="r", spec=SPEC), first_backoff_s=0.01)
    try:
        while not outlet.drain(5, failing_timeout_s=5):
            assert len(sink.failures) < 2
        assert sink.steps == [0, 1, 2]
        notes = outlet.notes()
        assert notes == ["fake fails: first", "fake is back after 0 s"]
    finally:
        outlet.close(5)


def test_a_failure_that_lasts_is_told_again_ever_more_rarely_and_tried_without_an_end(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    away_min = 100  # a try each minute, as the clock of this test has it
    sink = Fake(failures=[OSError("away")] * away_min)
    recorder = open_recorder()
    tell(recorder, 0, 3)
    outlet = Outlet(
        sink,
        RunInfo(run=run, name="r", spec=SPEC),
        num_lines=4,
        monotonic=lambda: 60.0 * (away_min - len(sink.failures)),
        first_backoff_s=0.001,
    )
    try:
        while not outlet.drain(5, failing_timeout_s=5):
            assert sink.num_takes <= away_min
        assert sink.steps == [0, 1, 2]
        assert outlet.notes() == [
            "fake fails: away",
            *(
                f"for {m} min now, with 4 records waiting: fake fails: away"
                for m in (10, 20, 40, 80)
            ),
            "fake is back after 5940 s",
        ]
    finally:
        outlet.close(5)


def test_a_sink_may_ask_for_everything_again(open_recorder: Open, tell: Any, run: Storage) -> None:
    recorder = open_recorder()
    tell(recorder, 0, 3)
    sink = Fake(position=Position(segment=9), failures=[])

    def begin(info: RunInfo) -> Position:
        sink.failures = [StartOver()]
        return START

    sink.started = begin  # type: ignore[method-assign]
    outlet = Outlet(sink, RunInfo(run=run, name="r", spec=SPEC))
    try:
        assert outlet.drain(5, failing_timeout_s=5)
        assert sink.steps == [0, 1, 2]
        assert outlet.notes() == []
    finally:
        outlet.close(5)


def test_a_sink_that_hangs_holds_up_neither_records_nor_the_end(
    open_recorder: Open, tell: Any
) -> None:
    sink, other = Fake(), Fake()
    other.name = "other"
    sink.gate.clear()
    recorder = open_recorder(sink, other)
    assert sink.taking.wait(10)
    tell(recorder, 0, 50)
    assert recorder.status()["step"] == 50
    assert recorder.drain(0.3, 0.1)[0] == "fake"
    assert sink.steps == []
    sink.gate.set()
    assert recorder.drain() == []
    assert sink.steps == other.steps == list(range(50))


def test_each_sink_has_a_backlog_of_its_own_that_outlives_the_recorder(
    open_recorder: Open, tell: Any
) -> None:
    hanging, quick = Fake(), Fake()
    hanging.name, quick.name = "hanging", "quick"
    recorder = open_recorder(hanging, quick)
    tell(recorder, 0, 3)
    assert recorder.drain() == []
    assert quick.info.waiting() == {"hanging": 0, "quick": 0}
    hanging.gate.clear()
    hanging.taking.clear()
    tell(recorder, 3, 5)
    assert hanging.taking.wait(10)
    assert recorder.drain(0.3, 0.1) == ["hanging"]
    # An end, a start and two steps.
    assert quick.info.waiting() == {"hanging": 4, "quick": 0}
    hanging.gate.set()
    assert recorder.drain() == []
    recorder.close()
    # Nothing was delivered to this one: all lines but the headers wait.
    again = Fake(failures=[OSError("away")] * 9)
    recorder = open_recorder(again)
    assert again.info.waiting() == {"fake": 8}
    assert recorder.drain() == ["fake"]
    assert again.info.waiting() == {"fake": 8}


def test_an_end_keeps_the_run_until_its_sinks_have_got_it(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    from samestep.telemetry.lease import holder

    sink = Fake()
    recorder = open_recorder(sink)
    tell(recorder, 0, 3)
    result = {"status": "done", "step": 3, "digest": "", "evaluation": None, "message": ""}
    recorder.finish(1, result)
    held = holder(run)
    assert held is not None
    assert held.alive
    recorder.close()
    assert sink.closed.is_set()
    assert sink.steps == [0, 1, 2]
    after = holder(run)
    assert after is None or not after.alive
    assert recorder.status()["state"] == RunState.DONE


def test_a_run_that_another_took_over_is_delivered_by_the_other_alone(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    failing, quick = Fake(failures=[OSError("away")] * 9), Fake()
    recorder = open_recorder(failing, quick)
    tell(recorder, 0, 3)
    assert recorder.drain() == ["fake"]
    take_over(run, recorder)
    assert failing.abandoned.wait(30)  # at its next try, while the recorder lives
    num_takes = failing.num_takes, quick.num_takes
    recorder.close()
    assert (failing.num_takes, quick.num_takes) == num_takes
    assert quick.abandoned.is_set()
    assert not failing.closed.is_set()
    assert not quick.closed.is_set()


def test_where_storage_can_not_say_whose_the_run_is_the_sinks_leave_it_alone(
    run: Storage, open_recorder: Open, tell: Any
) -> None:
    sink = Fake()
    recorder = open_recorder(sink)
    tell(recorder, 0, 3)
    assert recorder.drain() == []
    assert run.local_path is not None
    aside = run.local_path.rename(f"{run.root}-aside")
    run.local_path.write_text("in the way")
    assert recorder._tenure._lease is not None
    recorder._tenure._lease._renewed_at = -math.inf  # it must ask
    with pytest.raises(StorageError):  # the lease can't be given back
        recorder.close()
    assert sink.abandoned.is_set()
    assert not sink.closed.is_set()
    run.local_path.unlink()
    aside.rename(run.local_path)


def test_a_sink_that_refuses_the_start_frees_the_run_and_ends_the_others(
    open_recorder: Open,
) -> None:
    first = Fake()
    with pytest.raises(InputError, match="not like this"):
        open_recorder(first, Refusing())
    assert first.closed.wait(5)
    open_recorder()


def test_the_status_of_a_run_tells_what_its_sinks_say(open_recorder: Open) -> None:
    sink = Fake()
    recorder = open_recorder(sink, about={"k": "v"})
    sink.info.say("a word")
    status = recorder.status()
    assert status["metrics_url"] == "http://here"
    assert [item["text"] for item in status["messages"]] == ["a word"]
    assert sink.info.about == {"k": "v"}
    assert sink.info.returning is False


def test_reports_that_a_sink_wants_reach_it_without_a_look_at_the_ledger(
    open_recorder: Open, tell: Any
) -> None:
    sink = Fake()
    recorder = open_recorder(sink)
    tell(recorder, 0, 3)
    assert recorder.drain() == []
    num_takes = sink.num_takes
    node = NodeLoad(host="a", cpu_percent=1.0, memory_bytes=1, memory_limit_bytes=2)
    report = WorkerReport(
        attempt=1,
        world_rank=0,
        num_steps=1,
        num_samples=1,
        own_s=0.1,
        host_bytes=1,
        host_limit_bytes=2,
    )
    for told in (report, replace(report, world_rank=1, node=node)):
        assert recorder.report(told.to_json())
    assert recorder.drain() == []
    assert sink.reported == [1]
    assert sink.num_takes == num_takes


def test_without_sinks_there_is_nothing_to_wait_for(run: Storage) -> None:
    outlets = Outlets([], RunInfo(run=run, name="r", spec=SPEC))
    assert not outlets
    assert outlets.drain(1, 1) == []
