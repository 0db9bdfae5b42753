"""What the display shows, in a terminal and elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from samestep.cli.display import Display

STATUS: dict[str, Any] = {
    "run": "digits",
    "state": "running",
    "mode": "ddp",
    "workers": 2,
    "step": 30,
    "epoch": 1,
    "total_steps": 345,
    "loss": 0.25,
    "metrics": {"accuracy": 0.9},
    "evaluation": {"step": 23, "metrics": {"accuracy": 0.875, "loss": 0.5}},
    "samples_per_s": 1234.4,
    "eta_s": 83.0,
    "messages": [],
}


def shown(*statuses: dict[str, Any], terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=terminal, color_system=None)
    with Display(console) as display:
        for status in statuses:
            display(status)
    return file.getvalue()


def test_elsewhere_a_status_is_one_plain_line_with_every_cell() -> None:
    lines = shown(STATUS, terminal=False).splitlines()
    assert lines == [
        "step 30/345  epoch 1  loss 0.2500  accuracy 0.9000  test accuracy 0.8750  "
        "test loss 0.5000  samples/s 1234  workers 2 (ddp)  left 1:23"
    ]


def test_the_same_step_is_not_shown_twice_as_a_line() -> None:
    assert len(shown(STATUS, STATUS, terminal=False).splitlines()) == 1


def test_a_terminal_shows_head_bar_and_cells_in_lines_of_their_own() -> None:
    text = shown(STATUS, terminal=True)
    lines = [line for line in text.splitlines() if "30/345" in line]
    assert lines
    assert all("━" not in line for line in lines)
    assert "test loss" in text


def test_messages_and_lines_of_workers_are_printed_and_a_pause_gives_the_terminal_free() -> None:
    message = {**STATUS, "messages": [{"number": 1, "text": "checkpoint at step 100"}]}
    text = shown(
        message,
        {"output": "[worker pid=7] [bold]hello[/bold]", "messages": []},
        {"paused": True, "messages": []},
        terminal=False,
    )
    assert "checkpoint at step 100" in text
    assert "[worker pid=7] [bold]hello[/bold]" in text
