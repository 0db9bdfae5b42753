"""`samestep logs`: what the workers printed and logged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import Run
from samestep.replay.logs import WorkerLog, choose_logs, follow, lines_of


@handles_errors
def logs(
    run: Run,
    worker: Annotated[
        int | None, typer.Option(min=0, help="Only this worker (its world rank); default: all.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="This attempt; default: the last one.")
    ] = None,
    follow_on: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Go on with what comes, into later attempts too, until the run ends.",
        ),
    ] = False,
) -> None:
    """Show what the workers printed and logged; of several workers each line says whose it is."""
    place = find_run(run)
    if follow_on:
        lines = follow(place, attempt=attempt, world_rank=worker)
    else:
        lines = _lines(place, choose_logs(place, attempt=attempt, world_rank=worker))
    named = worker is None
    try:
        for log, line in lines:
            print(f"worker {log.world_rank} | {line}" if named else line, flush=follow_on)
    except KeyboardInterrupt:  # the usual end of following
        return
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()


def _lines(place: Storage, chosen: list[WorkerLog]) -> Iterator[tuple[WorkerLog, str]]:
    for log in chosen:
        for line in lines_of(place, log):
            yield log, line
