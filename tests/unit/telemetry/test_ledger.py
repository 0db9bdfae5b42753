from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import Event
from samestep.telemetry.ledger import (
    MAX_SEGMENT_BYTES,
    LedgerWriter,
    events,
    lines_around,
    read_ledger,
    segments,
    steps,
)
from samestep.telemetry.records import EventRecord, StepRecord


@pytest.fixture
def remote(tmp_path: Path) -> Storage:
    """Storage that can't append, as an object store; Arrow's own local file system behind it."""
    return Storage(root=str(tmp_path / "remote"), filesystem=fs.LocalFileSystem(), scheme="s3")


def path_of(run: Storage, name: str) -> Path:
    assert run.local_path is not None
    return run.local_path / name


def test_lines_come_back_in_the_order_of_writing(run: Storage, make_step: Any) -> None:
    writer = LedgerWriter(run, run_name="r")
    writer.append([make_step(0).to_json(), make_step(1).to_json()])
    writer.append([make_step(2).to_json()])
    assert [data["step"] for data in read_ledger(run)] == [0, 1, 2]
    assert segments(run) == ["ledger/00000001.jsonl"]


def test_each_line_is_there_as_soon_as_append_returns(run: Storage, make_step: Any) -> None:
    writer = LedgerWriter(run, run_name="r")
    writer.append([make_step(0).to_json()])
    lines = path_of(run, "ledger/00000001.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[0]) == {"type": "ledger", "format": 1, "run": "r", "segment": 1}
    assert lines[1].endswith(b"\n")


def test_a_new_writer_opens_a_segment_of_its_own(run: Storage, make_step: Any) -> None:
    LedgerWriter(run).append([make_step(0).to_json()])
    LedgerWriter(run).append([make_step(1).to_json()])
    assert segments(run) == ["ledger/00000001.jsonl", "ledger/00000002.jsonl"]
    assert list(steps(run)) == [0, 1]


def test_two_writers_never_share_a_segment(run: Storage, make_step: Any) -> None:
    first, second = LedgerWriter(run), LedgerWriter(run)
    first.append([make_step(0).to_json()])
    second.append([make_step(1).to_json()])
    first.append([make_step(2).to_json()])
    assert len(segments(run)) == 2


def test_a_writer_that_writes_nothing_leaves_no_trace(run: Storage) -> None:
    LedgerWriter(run).append([])
    assert not run.exists()
    assert list(read_ledger(run)) == []


def test_a_long_segment_is_followed_by_a_new_one(run: Storage, make_step: Any) -> None:
    writer = LedgerWriter(run)
    long = EventRecord(
        event=Event.MESSAGE, step=0, attempt=1, time=0.0, fields={"text": "x" * MAX_SEGMENT_BYTES}
    )
    writer.append([long.to_json()])
    writer.append([make_step(0).to_json()])
    writer.append([make_step(1).to_json()])
    assert len(segments(run)) == 2
    assert list(steps(run)) == [0, 1]


def test_storage_that_cannot_append_gets_a_segment_for_each_append(
    remote: Storage, make_step: Any
) -> None:
    writer = LedgerWriter(remote)
    for step in range(3):
        writer.append([make_step(step).to_json()])
    assert len(segments(remote)) == 3
    assert list(steps(remote)) == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_torn_last_line_is_left_out_and_reported(run: Storage, make_step: Any, cut: int) -> None:
    LedgerWriter(run).append([make_step(0).to_json(), make_step(1).to_json()])
    file = path_of(run, "ledger/00000001.jsonl")
    file.write_bytes(file.read_bytes()[:-cut])
    LedgerWriter(run).append([make_step(1).to_json(), make_step(2).to_json()])
    torn: list[str] = []
    assert [data["step"] for data in read_ledger(run, on_torn=torn.append)] == [0, 1, 2]
    assert len(torn) == 1
    assert "00000001.jsonl" in torn[0]


def test_a_last_line_of_zeroes_after_a_power_cut_is_torn_too(run: Storage, make_step: Any) -> None:
    LedgerWriter(run).append([make_step(0).to_json()])
    with path_of(run, "ledger/00000001.jsonl").open("ab") as file:
        file.write(b"\0\0\0\0\n")
    torn: list[str] = []
    assert [data["step"] for data in read_ledger(run, on_torn=torn.append)] == [0]
    assert len(torn) == 1


def test_damage_before_the_last_line_is_an_error_that_names_the_line(
    run: Storage, make_step: Any
) -> None:
    LedgerWriter(run).append([make_step(0).to_json(), make_step(1).to_json()])
    file = path_of(run, "ledger/00000001.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"{broken\n" + lines[2])
    with pytest.raises(StorageError, match="damaged at line 2"):
        list(read_ledger(run))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("step", "abc", "step is 'abc'"),
        ("step", -1, "step is -1"),
        ("loss", 0.5, "loss is 0.5"),
        ("lr", None, "lr is None"),
        ("ids", 7, "ids is 7"),
    ],
)
def test_a_line_that_parses_but_is_damaged_is_an_error_that_names_the_line(
    run: Storage, make_step: Any, field: str, value: object, told: str
) -> None:
    LedgerWriter(run).append([make_step(0).to_json(), make_step(1).to_json() | {field: value}])
    with pytest.raises(StorageError, match=rf"00000001\.jsonl is damaged at line 3 \({told}\)"):
        list(read_ledger(run))


def test_a_missing_field_is_an_error_that_names_the_line(run: Storage, make_step: Any) -> None:
    line = make_step(0).to_json()
    del line["ids"]
    LedgerWriter(run).append([line])
    with pytest.raises(StorageError, match=r"damaged at line 2 \(ids is missing\)"):
        list(read_ledger(run))


def test_a_step_that_is_left_out_is_an_error_wherever_reading_starts(
    run: Storage, make_step: Any
) -> None:
    LedgerWriter(run).append([make_step(0).to_json()])
    LedgerWriter(run).append([make_step(2).to_json()])
    message = r"00000002\.jsonl is damaged before line 2: it has step 2, but no line has step 1"
    for from_step in (0, 2):
        with pytest.raises(StorageError, match=message):
            list(read_ledger(run, from_step))


def test_another_format_version_is_refused(run: Storage) -> None:
    run.write("ledger/00000001.jsonl", b'{"type":"ledger","format":7}\n')
    with pytest.raises(StorageError, match="ledger format 7; this samestep reads format 1"):
        list(read_ledger(run))


def test_of_a_step_with_two_lines_the_later_counts(run: Storage, make_step: Any) -> None:
    writer = LedgerWriter(run)
    writer.append([make_step(0, loss=1.0).to_json(), make_step(1).to_json()])
    writer.append([make_step(0, loss=2.0).to_json()])
    found = steps(run)
    assert list(found) == [0, 1]
    assert found[0].loss == 2.0


def test_reading_from_a_step_leaves_out_what_came_before(run: Storage, make_step: Any) -> None:
    event = EventRecord(event=Event.MESSAGE, step=1, attempt=1, time=0.0)
    LedgerWriter(run).append(
        [make_step(0).to_json(), event.to_json(), make_step(1).to_json(), make_step(2).to_json()]
    )
    assert [(data["type"], data["step"]) for data in read_ledger(run, 2)] == [("step", 2)]
    assert list(steps(run, 1)) == [1, 2]
    assert events(run) == [event]
    assert events(run, Event.FINISHED) == []


def test_after_a_failed_append_the_next_one_opens_a_new_segment(
    run: Storage, make_step: Any
) -> None:
    writer = LedgerWriter(run)
    writer.append([make_step(0).to_json()])
    segment = path_of(run, "ledger/00000001.jsonl")
    content = segment.read_bytes()
    segment.unlink()
    segment.mkdir()
    with pytest.raises(StorageError):
        writer.append([make_step(1).to_json()])
    segment.rmdir()
    segment.write_bytes(content + b'{"type":"st')
    writer.append([make_step(1).to_json()])
    assert len(segments(run)) == 2
    assert list(steps(run)) == [0, 1]


def test_lines_around_an_incident_are_those_there_were_when_it_happened(
    run: Storage, make_step: Any
) -> None:
    def steps_from(first: int, last: int, loss: float) -> list[dict[str, Any]]:
        return [make_step(step, loss=loss).to_json() for step in range(first, last + 1)]

    def event(kind: Event, step: int, **fields: Any) -> dict[str, Any]:
        record = EventRecord(event=kind, step=step, attempt=1, time=0.0, fields=fields)
        return record.to_json()

    writer = LedgerWriter(run)
    writer.append(steps_from(0, 4, 1.0))
    writer.append([event(Event.ROLLED_BACK, 3, to=3, until=5), *steps_from(3, 5, 2.0)])
    writer.append([event(Event.INCIDENT, 7, id="odd"), make_step(6, loss=2.0).to_json()])
    writer.append([event(Event.ROLLED_BACK, 4, to=4, until=8), *steps_from(4, 9, 3.0)])
    for first in (0, 2, 5):
        lines = lines_around(run, "odd", from_step=first)
        found = [StepRecord.from_json(line) for line in lines if line["type"] == "step"]
        told = [(record.step, record.loss) for record in found]
        assert told == [(step, 1.0 if step < 3 else 2.0) for step in range(first, 7)]
