"""`samestep checkpoints`: what a run can be resumed from, and whether it still can."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Run
from samestep.cli.units import age_text, size_text
from samestep.errors import ExitStatus
from samestep.replay.checkpoints import CheckpointLine, checkpoint_lines

_STYLE = {"whole": "green", "being written": "cyan", "unfinished": "yellow"}


@handles_errors
def checkpoints(
    run: Run,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file, and compare with the manifests.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, size, age, status, and which is the best and the latest.

    Damaged ones are told with what is wrong. Nothing is changed. Exit statuses: 0; 1 when a
    checkpoint is damaged (those that were set aside before don't count); 2 no run directory.
    """
    place = find_run(run)
    found = checkpoint_lines(place, verify=verify)
    if as_json:
        print(json.dumps([line.to_json() for line in found], indent=2, allow_nan=False))
    elif found:
        console = Console(soft_wrap=True, highlight=False)
        console.print(_table(found, time.time()))
        for line in found:
            if line.reason:
                console.print(f"step {line.step}: {line.reason}", style="red", markup=False)
    else:
        print(f"no checkpoints in {place.uri}")
    if any(line.status == "damaged" for line in found):
        raise typer.Exit(int(ExitStatus.FAILED))


def _table(found: list[CheckpointLine], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "size", "age", "status", "which"):
        right = name in ("step", "size", "age")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for line in found:
        which = [
            name for name, is_it in (("latest", line.is_latest), ("best", line.is_best)) if is_it
        ]
        table.add_row(
            "-" if line.step is None else str(line.step),
            size_text(line.num_bytes),
            "-" if line.created_s is None else age_text(now_s - line.created_s),
            Text(line.status, style=_STYLE.get(line.status, "red")),
            ", ".join(which),
        )
    return table
