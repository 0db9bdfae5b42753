"""`samestep drill`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.cli.errors import handles_errors
from samestep.cli.options import AsJson, Settings
from samestep.cli.wide import print_whole
from samestep.errors import ExitStatus
from samestep.names import RunState
from samestep.scratch import scratch_folder
from samestep.spec import load_spec, parse_override

if TYPE_CHECKING:
    from samestep.cluster.drilled import RoundResult
    from samestep.cluster.strikes import Strike


@handles_errors
def drill(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.yaml")],
    faults: Annotated[
        str,
        typer.Option(
            metavar="FILE|random:SEED",
            help="A YAML list such as `- {fault: kill_worker, step: 20, worker: 1}`, or a seed "
            "from which each round draws one to three faults.",
        ),
    ] = "random:0",
    rounds: Annotated[int, typer.Option(min=1, help="Runs under faults.")] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, max=16, help="Ray nodes of one slot each, on this machine.")
    ] = 3,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT",
            help="Drills on this Ray cluster instead, whose nodes are left alone. Its runs lie, "
            "and stay, in a folder of the job's storage.",
        ),
    ] = None,
    settings: Settings = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keeps runs and output there (default: a folder that is removed)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a job once undisturbed and then under faults, and see whether the weights are the same.

    It starts Ray nodes of its own on this machine and ends them, or uses a cluster (--address).
    Faults: kill_worker, kill_all_workers, terminate_worker, terminate_all_workers, freeze_worker,
    kill_recorder, kill_driver, stop_driver; on nodes of its own also kill_node, drain_node,
    cut_node, add_node. Exit statuses: 0 every run ended with the same weights, 1 one did not end, 2
    bad input, 11 the weights differ.
    """
    from samestep.cluster.drill import Drill
    from samestep.cluster.strikes import parse_faults

    spec = load_spec(job, dict(parse_override(text) for text in settings or []))
    asked = parse_faults(faults)
    console = Console(soft_wrap=True, highlight=False, stderr=as_json)
    with scratch_folder("drill") as temporary:
        place = folder.resolve() if folder is not None else temporary
        place.mkdir(parents=True, exist_ok=True)
        made = Drill(
            spec,
            job_folder=job.resolve().parent,
            folder=place,
            num_nodes=nodes,
            address=address,
            say=lambda line: console.print(escape(line)),
        )
        results = made.run((asked, rounds) if isinstance(asked, int) else [asked] * rounds)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2, default=_plain))
    else:
        console.print()
        print_whole(_table(results))
    raise typer.Exit(int(_status(results, rounds)))


def _plain(strike: Strike) -> dict[str, Any]:
    return strike.model_dump(mode="json")


def _status(results: list[RoundResult], rounds: int) -> ExitStatus:
    if len(results) <= rounds or any(result.status != RunState.DONE for result in results):
        return ExitStatus.FAILED
    return ExitStatus.DONE if all(result.same for result in results) else ExitStatus.DIFFERENT


def _table(results: list[RoundResult]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    of_run = ("run", "status", "weights", "attempts", "redone", "s")
    for name in (*of_run, "fault", "held up, s", "redone after"):
        table.add_column(name, no_wrap=True)
    for result in results:
        same = "same" if result.same else "DIFFERENT" if result.digest else "none"
        row = [
            result.name,
            result.status,
            f"{result.digest[:8]} {same}",
            str(result.attempts),
            str(result.redone),
            f"{result.wall_s:.1f}",
        ]
        struck = [
            (
                f"{one.strike.fault} at {one.at_step}",
                "-" if one.held_up_s is None else f"{one.held_up_s:.2f}",
                str(one.redone),
            )
            for one in result.struck
        ] or [("none", "-", "-")]
        for number, cost in enumerate(struck):
            table.add_row(*(row if number == 0 else [""] * len(row)), *cost)
    return table
