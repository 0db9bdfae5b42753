"""What is printed while the display lives stands above it, and nothing of it stays behind."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

from rich.console import Console

from samestep.cli.display import Display

STATUS: dict[str, Any] = {
    "run": "a",
    "state": "running",
    "step": 3,
    "total_steps": 10,
    "epoch": 0,
    "loss": 0.5,
    "metrics": {},
    "evaluation": None,
    "samples_per_s": 100.0,
    "workers": 1,
    "mode": "local",
    "eta_s": 7.0,
    "messages": [],
}


def test_what_the_workload_prints_in_this_process_is_shown_line_by_line() -> None:
    screen = io.StringIO()
    before = sys.stdout, sys.stderr
    with Display(Console(file=screen, force_terminal=True, width=80)) as display:
        display(STATUS)
        sys.stdout.write("from the ")
        assert "from the" not in screen.getvalue()
        sys.stdout.write("workload\n")
        assert "from the workload" in screen.getvalue()
        sys.stderr.write("no end")
    assert (sys.stdout, sys.stderr) == before
    assert "no end" in screen.getvalue()


def test_without_a_terminal_prints_go_their_own_way() -> None:
    screen = io.StringIO()
    before = sys.stdout
    with Display(Console(file=screen, width=80)) as display:
        assert sys.stdout is before
        display(STATUS)
    assert "step 3/10" in screen.getvalue()


SHOWN = {
    **STATUS,
    "metrics": {"accuracy": 0.75},
    "evaluation": {"metrics": {"accuracy": 0.5}},
    "workers": 2,
    "mode": "ddp",
}
CELLS = {
    "step": "3/10",
    "epoch": "0",
    "loss": "0.5000",
    "accuracy": "0.7500",
    "test accuracy": "0.5000",
    "samples/s": "100",
    "workers": "2 (ddp)",
    "left": "0:07",
}


def test_a_line_and_a_panel_hold_all_that_a_user_looks_for() -> None:
    line, panel = io.StringIO(), io.StringIO()
    with Display(Console(file=line, width=80)) as display:
        display(SHOWN)
    with Display(Console(file=panel, force_terminal=True, width=120)) as display:
        display(SHOWN)
        assert display._live is not None
        display._live.refresh()
    assert line.getvalue() == "  ".join(f"{name} {text}" for name, text in CELLS.items()) + "\n"
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", panel.getvalue()).splitlines()
    names, values = next((row, rows[n + 1]) for n, row in enumerate(rows) if "samples/s" in row)
    assert re.split(r" {2,}", names.strip()) == list(CELLS)
    assert re.split(r" {2,}", values.strip()) == list(CELLS.values())
