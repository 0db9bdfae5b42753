"""`samestep train`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from samestep.checkpoint.storage import Storage
from samestep.cli.display import Display
from samestep.cli.errors import handles_errors, tell_error
from samestep.cli.options import Settings
from samestep.cluster.launch import Outcome
from samestep.cluster.launch import train as launch
from samestep.spec import Mode, load_spec, parse_override
from samestep.telemetry.programs import program


@handles_errors
def train(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.yaml")],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run (default: the job's `name`, else its folder's name). The same "
            "name again resumes it, extends it, or follows it while it is alive."
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N | MIN:MAX",
            help="Number of workers; switches the fallback of mode auto off.",
        ),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="Where the shards are computed: ddp (Ray Train's worker group), dataparallel "
            "(one Ray actor), local (this process), auto (ddp, or dataparallel on a single node "
            "without room). The bits are the same."
        ),
    ] = None,
    settings: Settings = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start over from step 0; an existing run is kept under another name.",
        ),
    ] = False,
) -> None:
    """Train a job, or go on with its run.

    Ctrl-C and SIGTERM stop at a step boundary with a checkpoint; a second Ctrl-C stops at once.
    Exit statuses: 0 done, 1 failed, 2 bad input, 3 stopped as planned, 4 budget used up, 5 in use
    by a live run.
    """
    overrides = dict(parse_override(text) for text in settings or [])
    if workers is not None:
        overrides["workers"] = workers
    if mode is not None:
        overrides["mode"] = mode.value
    spec = load_spec(job, overrides)
    folder = job.resolve().parent
    started = time.monotonic()
    with Display() as display:
        outcome = launch(
            spec,
            name=name,
            search=[folder, Path.cwd()],
            restart=restart,
            no_fallback=workers is not None or mode not in (None, Mode.AUTO),
            observer=display,
        )
    _summary(outcome, time.monotonic() - started)
    raise typer.Exit(int(outcome.exit_status))


def _summary(outcome: Outcome, seconds: float) -> None:
    console = Console(highlight=False)
    replayable = _replayable(outcome.run) if outcome.status == "failed" else None
    outcome = replace(outcome, run=_relative(outcome.run))
    is_stop = outcome.status in ("interrupted", "budget_exhausted")
    good = "bold yellow" if is_stop else "bold green"
    style = good if is_stop or outcome.status == "done" else "bold red"
    rows = [
        ("run", Text(outcome.name, style="bold")),
        ("status", Text(outcome.status, style=style)),
        ("steps", Text(str(outcome.step))),
    ]
    for name, value in (outcome.evaluation or {}).items():
        shown = f"{value:.2%}" if name == "accuracy" else f"{value:.6g}"
        rows.append((f"test {name}", Text(shown, style="bold")))
    if outcome.best is not None:
        score = f"{outcome.best['metric']} {outcome.best['score']:.6g}"
        rows.append(("best", Text(f"after {outcome.best['step']} steps: {score}")))
    if outcome.status == "done" and outcome.message:
        rows.append(("why done", Text(outcome.message)))
    rows.append(("time", Text(f"{seconds:.1f} s")))
    if outcome.digest:
        rows.append(("state", Text(f"sha256 {outcome.digest}")))
    rows.append(("directory", Text(outcome.run)))
    width = max(len(name) for name, _ in rows) + 2
    console.print()
    # Lines rather than a table, which would cut the hash where the terminal is narrow.
    for name, text in rows:
        console.print(Text(name.ljust(width)).append_text(text), soft_wrap=True)
    console.print()
    if outcome.status == "failed":
        tell_error(outcome.message)
    if outcome.status == "budget_exhausted":
        console.print(outcome.message, soft_wrap=True)
    if outcome.status == "interrupted":
        console.print("The same command again resumes, under other --workers or --mode too.")
    samestep = program("samestep")
    console.print(f"Look next: {samestep} show {outcome.run}", soft_wrap=True)
    if replayable is not None:
        console.print(f"           {samestep} replay {outcome.run} {replayable}", soft_wrap=True)
    if outcome.status == "done":
        console.print(
            f"           {samestep} digest {outcome.run}\n"
            f"           {samestep} compare {outcome.run} ANOTHER_RUN",
            soft_wrap=True,
        )


def _replayable(run: str) -> str | None:
    """The last incident that can be taken again from what was kept of it."""
    from samestep.incidents.bundle import folder_of, has_bundle
    from samestep.incidents.record import list_incidents

    place = Storage.at(run)
    kept = [one.id for one in list_incidents(place) if has_bundle(folder_of(place, one.id))]
    return kept[-1] if kept else None


def _relative(run: str) -> str:
    try:
        return str(Path(run).relative_to(Path.cwd()))
    except ValueError:
        return run
