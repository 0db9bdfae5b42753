"""`samestep incidents`: what went wrong in a run."""

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
from samestep.cli.settle import settle
from samestep.cli.wide import print_whole
from samestep.incidents.record import Incident, list_incidents, read

RUN = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or a name in ./runs.")]


AS_JSON = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]

incidents = typer.Typer(
    name="incidents",
    help="Look at what went wrong in a run.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
)


@incidents.command("list")
@handles_errors
def list_(run: RUN, as_json: AS_JSON = False) -> None:
    """List the incidents of a run, in order of time."""
    place = find_run(run)
    found = list_incidents(place)
    if as_json:
        print(json.dumps([incident.to_json() for incident in found], indent=2))
    elif not found:
        print(f"no incidents in {place.uri}")
    else:
        print_whole(_table(found))
    settle([place])


@incidents.command("show")
@handles_errors
def show(
    run: RUN,
    incident_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` gives it.")],
    as_json: AS_JSON = False,
) -> None:
    """Show one incident whole: what was seen, the traceback, and where its evidence lies."""
    place = find_run(run)
    incident = read(place, incident_id)
    if as_json:
        print(json.dumps(incident.to_json(), indent=2))
    else:
        _show(incident)
    settle([place])


def _table(found: list[Incident]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "kind", "step", "attempt", "worker", "when", "what"):
        table.add_column(name, no_wrap=True)
    for incident in found:
        table.add_row(
            Text(incident.id, style="bold"),
            str(incident.kind),
            str(incident.step),
            str(incident.attempt),
            "-" if incident.world_rank is None else str(incident.world_rank),
            _when(incident.time),
            Text((incident.message.splitlines() or [""])[0]),
        )
    return table


def _show(incident: Incident) -> None:
    console = Console(soft_wrap=True, highlight=False)
    worker = "" if incident.world_rank is None else f", worker {incident.world_rank}"
    host = f" on {incident.host}" if incident.host else ""
    console.print(Text(incident.id, style="bold"))
    console.print(
        f"{incident.kind} at step {incident.step}, attempt {incident.attempt}{worker}{host}, "
        f"{_when(incident.time)}"
    )
    console.print(Text(f"\n{incident.message}"))
    if incident.seen:
        console.print(Text("\nseen:\n" + json.dumps(dict(incident.seen), indent=2)))
    if incident.traceback:
        console.print(Text(f"\n{incident.traceback}"))
    for path in incident.evidence:
        console.print(Text(f"evidence: {path}"))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
