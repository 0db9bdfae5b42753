"""`samestep runs`: what lies in a storage folder."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import RUNS
from samestep.cli.options import AsJson
from samestep.cli.settle import settle
from samestep.cli.units import age_text, size_text
from samestep.cli.wide import print_whole
from samestep.errors import InputError
from samestep.names import SPEC_FILE
from samestep.replay.listing import RunLine, list_runs

_STYLE = {
    "done": "green",
    "running": "cyan",
    "starting": "cyan",
    "interrupted": "yellow",
    "budget_exhausted": "yellow",
}


@handles_errors
def runs(
    storage: Annotated[
        str,
        typer.Argument(metavar="STORAGE", help="The folder or URI that holds run directories."),
    ] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List the runs of a storage folder, the one that started last at the end.

    A run that is alive is running (or starting); one that has no result, and whose process is
    gone, died: the same train command resumes it.
    """
    place = Storage.at(storage)
    if place.exists(SPEC_FILE):
        raise InputError(
            f"{place.uri} is a run itself: look at it with samestep show, or give the folder above"
        )
    if storage != RUNS and not place.exists():
        raise InputError(f"there is no storage folder {place.uri}")
    found = list_runs(place)
    if as_json:
        print(json.dumps([line.to_json() for line in found], indent=2, allow_nan=False))
    elif not found:
        print(f"no runs in {place.uri}")
    else:
        print_whole(_table(found, time.time()))
    settle(place.child(line.name) for line in found if not line.alive)


def _table(found: list[RunLine], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "status", "steps", "loss", "evaluation", "best", "age", "size"):
        right = name in ("steps", "loss", "age", "size")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for line in found:
        steps = str(line.steps) if line.total_steps is None else f"{line.steps}/{line.total_steps}"
        evaluation = ", ".join(f"{name} {value:.4g}" for name, value in line.evaluation.items())
        table.add_row(
            Text(line.name, style="bold"),
            Text(line.status, style=_STYLE.get(line.status, "red")),
            steps,
            "-" if line.loss is None else f"{line.loss:.4g}",
            Text(evaluation or "-"),
            Text(_best(line.best)),
            "-" if line.started_s is None else age_text(now_s - line.started_s),
            size_text(line.num_bytes),
        )
    return table


def _best(best: dict[str, Any] | None) -> str:
    return "-" if best is None else f"{best['metric']} {best['score']:.4g} at {best['step']}"
