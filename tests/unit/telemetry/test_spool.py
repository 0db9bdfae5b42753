from __future__ import annotations

from collections.abc import Callable

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.names import Event
from samestep.telemetry.ledger import LedgerWriter
from samestep.telemetry.past import read_past
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.spool import START, Line, Position, Spool

MakeStep = Callable[..., StepRecord]


def steps_of(lines: list[Line]) -> list[int]:
    return [line.record.step for line in lines]


def segment(run: Storage, number: int) -> str:
    return f"ledger/{number:08d}.jsonl"


def test_a_ledger_that_is_not_there_yet_has_no_lines(run: Storage) -> None:
    assert Spool(run).read(10) == []


def test_lines_come_in_order_over_segments_and_again_until_they_are_passed(
    run: Storage, make_step: MakeStep
) -> None:
    for start in (0, 3):
        LedgerWriter(run).append([make_step(s).to_json() for s in range(start, start + 3)])
    spool = Spool(run)
    assert steps_of(spool.read(4)) == [0, 1, 2, 3]
    lines = spool.read(4)
    assert steps_of(lines) == [0, 1, 2, 3]
    spool.seek(lines[-1].position)
    assert steps_of(spool.read(4)) == [4, 5]


def test_a_position_leads_to_the_next_line_in_another_process(
    run: Storage, make_step: MakeStep
) -> None:
    LedgerWriter(run).append([make_step(s).to_json() for s in range(5)])
    for line in Spool(run).read(5):
        assert steps_of(Spool(run, line.position).read(9)) == list(range(line.record.step + 1, 5))


def test_lines_longer_than_a_chunk_are_read(run: Storage, make_step: MakeStep) -> None:
    event = EventRecord(
        event=Event.MESSAGE, step=1, attempt=1, time=1.0, fields={"text": "x" * 5000}
    )
    LedgerWriter(run).append([make_step(0).to_json(), event.to_json(), make_step(1).to_json()])
    lines = Spool(run, chunk_bytes=64).read(9)
    assert [type(line.record) for line in lines] == [StepRecord, EventRecord, StepRecord]


def test_a_line_under_way_is_left_until_it_is_whole(run: Storage, make_step: MakeStep) -> None:
    LedgerWriter(run).append([make_step(s).to_json() for s in range(2)])
    path = run.local_path / segment(run, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    spool = Spool(run)
    lines = spool.read(9)
    spool.seek(lines[-1].position)
    assert steps_of(lines) == [0]
    assert spool.read(9) == []
    path.write_bytes(whole)
    assert steps_of(spool.read(9)) == [1]


@pytest.mark.parametrize("end", [b'{"type":"st', b'{"type":"st\n'])
def test_a_line_that_a_dead_writer_left_unfinished_is_passed_over(
    run: Storage, make_step: MakeStep, end: bytes
) -> None:
    LedgerWriter(run).append([make_step(0).to_json()])
    run.append(segment(run, 1), end)
    LedgerWriter(run).append([make_step(1).to_json()])
    assert steps_of(Spool(run).read(9)) == [0, 1]


def test_damage_in_the_middle_is_told_with_its_place(run: Storage, make_step: MakeStep) -> None:
    LedgerWriter(run).append([make_step(0).to_json()])
    run.append(segment(run, 1), b"garbage\n{}\n")
    LedgerWriter(run).append([make_step(1).to_json()])
    with pytest.raises(StorageError, match=r"00000001\.jsonl is damaged before byte"):
        Spool(run).read(9)


def test_an_hour_at_ten_steps_a_second_waits_in_under_100_mb_and_is_read_in_parts(
    run: Storage, make_step: MakeStep
) -> None:
    values = [1 / (3 + number) for number in range(8)]
    names = ("step", "data_wait", "exchange_wait", *(f"part{number}" for number in range(8)))
    long = {
        "loss": values[0],
        "shard_losses": values,
        "shard_weights": values,
        "grad_norm": values[1],
        "lr": values[:2],
        "metrics": {"accuracy": values[2], "perplexity": values[3]},
        "timing": {f"{name}_s": values[4] for name in names},
        "attempt": 12,
        "time": 1796005719.727123,
    }
    num_steps = 360
    LedgerWriter(run).append([make_step(s, **long).to_json() for s in range(num_steps)])
    assert run.size_bytes("ledger") * 36_000 / num_steps < 100e6
    spool, found = Spool(run, chunk_bytes=2**14), []
    while lines := spool.read(100):
        assert len(lines) <= 100
        found += steps_of(lines)
        spool.seek(lines[-1].position)
    assert found == list(range(num_steps))


def test_a_position_tells_how_many_lines_are_behind_it(run: Storage, make_step: MakeStep) -> None:
    for start in (0, 3):
        LedgerWriter(run).append([make_step(s).to_json() for s in range(start, start + 3)])
    spool, found = Spool(run), []
    while lines := spool.read(2):
        found += [line.position.num_lines for line in lines]
        spool.seek(lines[-1].position)
    assert found == [1, 2, 3, 4, 5, 6]
    assert spool.position.num_lines == read_past(run).num_lines


def test_positions_are_ordered_as_the_lines_are() -> None:
    assert START < Position(segment=1, offset_bytes=90) < Position(segment=2)
