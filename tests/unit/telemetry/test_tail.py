from __future__ import annotations

from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.telemetry.ledger import LedgerWriter
from samestep.telemetry.tail import LedgerTail


def test_each_line_comes_once_over_all_segments(run: Storage, make_step: Any) -> None:
    tail = LedgerTail(run)
    assert tail.new_lines() == []
    LedgerWriter(run).append([make_step(0).to_json(), make_step(1).to_json()])
    assert [line["step"] for line in tail.new_lines()] == [0, 1]
    writer = LedgerWriter(run)
    writer.append([make_step(2).to_json()])
    assert [line["step"] for line in tail.new_lines()] == [2]
    assert tail.new_lines() == []
    writer.append([make_step(3).to_json()])
    assert [line["step"] for line in tail.new_lines()] == [3]


def test_a_line_comes_when_it_is_whole(run: Storage, make_step: Any) -> None:
    LedgerWriter(run).append([make_step(0).to_json(), make_step(1).to_json()])
    assert run.local_path is not None
    path = run.local_path / "ledger" / "00000001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    tail = LedgerTail(run)
    assert [line["step"] for line in tail.new_lines()] == [0]
    path.write_bytes(whole)
    assert [line["step"] for line in tail.new_lines()] == [1]
