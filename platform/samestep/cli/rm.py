"""`samestep rm`: removes a run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import Run
from samestep.cli.settle import settle_seen
from samestep.errors import ExitStatus, InputError
from samestep.replay.removal import remove_run, require_removable
from samestep.replay.summary import summarize


@handles_errors
def rm(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Remove a run for good: ledger, checkpoints, incidents, logs and the workload's own files.

    MLflow keeps what it was told. Exit statuses: 0 removed, 1 kept (the answer was no), 2 no run
    directory, 5 alive.
    """
    place = find_run(run)
    require_removable(place)
    if not yes and not _confirmed(place.uri, _what(place)):
        print("kept")
        raise typer.Exit(int(ExitStatus.FAILED))
    settle_seen()  # nobody could later
    remove_run(place)
    Console(soft_wrap=True, highlight=False).print(f"removed {place.uri}", markup=False)


def _what(place: Storage) -> str:
    summary = summarize(place)
    num_whole = sum(info.whole for info in summary.checkpoints)
    return f"{summary.status}, {summary.num_steps} steps, {num_whole} checkpoints"


def _confirmed(uri: str, what: str) -> bool:
    try:
        return typer.confirm(f"Remove {uri} ({what}) for good?")
    except typer.Abort as error:
        raise InputError("nobody answered; give --yes to remove it without asking") from error
