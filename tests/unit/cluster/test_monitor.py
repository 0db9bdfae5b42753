"""Signals become a planned stop, passed on until the attempt knows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.cluster.budget import BudgetWatch
from samestep.cluster.monitor import Monitor
from samestep.errors import StorageError
from samestep.spec_budget import Budget


class Recorder:
    """A target that notes what it is asked; `away` makes it fail."""

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.away: Exception | None = None
        self.messages = [{"number": 1, "text": "one"}, {"number": 2, "text": "two"}]

    def call(self, method: str, *args: Any) -> Any:
        if self.away is not None:
            raise self.away
        if method == "request_stop":
            self.stops.append(args[0])
            return None
        return {"messages": [m for m in self.messages if m["number"] > args[0]]}


def unlimited(tmp_path: Path) -> BudgetWatch:
    return BudgetWatch(Storage.at(str(tmp_path)), Budget())


def test_a_signal_asks_for_a_stop_at_every_poll_and_names_itself(tmp_path: Path) -> None:
    recorder = Recorder()
    monitor = Monitor(recorder, lambda status: None, unlimited(tmp_path))
    with monitor.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        monitor.poll()
        monitor.poll()
    assert recorder.stops == ["SIGTERM", "SIGTERM"]


def test_a_second_ctrl_c_interrupts_at_once_and_the_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    monitor = Monitor(Recorder(), lambda status: None, unlimited(tmp_path))

    def interrupt_twice() -> None:
        with monitor.signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_is_the_first_although_the_budget_has_asked_for_a_stop_before(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    monitor = Monitor(recorder, lambda status: None, unlimited(tmp_path))
    monitor.ask_to_stop("budget")
    with monitor.signals():
        os.kill(os.getpid(), signal.SIGINT)
    monitor.poll()
    assert recorder.stops == ["budget"]


@pytest.mark.parametrize("away", [ConnectionError("away"), StorageError("no space is left")])
def test_each_message_is_shown_once_and_a_recorder_that_is_away_does_no_harm(
    tmp_path: Path, away: Exception
) -> None:
    recorder, seen = Recorder(), []
    unbounded = unlimited(tmp_path)
    monitor = Monitor(recorder, lambda status: seen.append(status["messages"]), unbounded)
    monitor.poll()
    recorder.away = away
    monitor.poll()
    recorder.away = None
    monitor.poll()
    assert [[m["text"] for m in messages] for messages in seen] == [["one", "two"], []]
