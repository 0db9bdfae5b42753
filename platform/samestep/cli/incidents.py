"""`samestep incidents`: what went wrong in a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Run
from samestep.cli.units import size_text
from samestep.cli.wide import print_whole
from samestep.errors import BundleError
from samestep.incidents.bundle import Bundle, folder_of, has_bundle
from samestep.incidents.bundle_folder import read_bundle
from samestep.incidents.record import Incident, list_incidents, read

incidents = typer.Typer(
    name="incidents",
    help="Look at what went wrong in a run.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
)


@incidents.command("list")
@handles_errors
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the incidents of a run, in order of time."""
    place = find_run(run)
    found = list_incidents(place)
    bundles = {incident.id: _bundle_of(place, incident) for incident in found}
    if as_json:
        told = [{**one.to_json(), "bundle": _as_json(bundles[one.id])} for one in found]
        print(json.dumps(told, indent=2))
    elif not found:
        print(f"no incidents in {place.uri}")
    else:
        print_whole(_table(found, bundles))


@incidents.command("show")
@handles_errors
def show(
    run: Run,
    incident_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` gives it.")],
    as_json: AsJson = False,
) -> None:
    """Show one incident whole: what was seen, the traceback, and where its evidence lies."""
    place = find_run(run)
    incident = read(place, incident_id)
    bundle = _bundle_of(place, incident)
    if as_json:
        print(json.dumps({**incident.to_json(), "bundle": _as_json(bundle)}, indent=2))
    else:
        _show(incident)
        _show_bundle(bundle, folder_of(place, incident.id).uri)


def _bundle_of(run: Storage, incident: Incident) -> Bundle | None:
    """What the incident's bundle says of itself; its files are not looked at."""
    folder = folder_of(run, incident.id)
    try:
        return read_bundle(folder) if has_bundle(folder) else None
    except BundleError as error:
        print(f"{folder.uri}: {error}", file=sys.stderr)
        return None


def _as_json(bundle: Bundle | None) -> dict[str, object] | None:
    if bundle is None:
        return None
    return {
        "bytes": bundle.num_bytes,
        "state_step": bundle.state_step,
        "state_source": str(bundle.state_source),
        "sample_steps": list(bundle.sample_steps),
        "missing": list(bundle.missing),
        "left_out": list(bundle.left_out),
    }


def _table(found: list[Incident], bundles: Mapping[str, Bundle | None]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "kind", "step", "attempt", "worker", "when", "bundle", "what"):
        table.add_column(name, no_wrap=True)
    for incident in found:
        table.add_row(
            Text(incident.id, style="bold"),
            str(incident.kind),
            str(incident.step),
            str(incident.attempt),
            "-" if incident.world_rank is None else str(incident.world_rank),
            _when(incident.time),
            _size(bundles[incident.id]),
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


def _show_bundle(bundle: Bundle | None, where: str) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if bundle is None:
        console.print(Text("\nno bundle"))
        return
    steps = len(bundle.sample_steps)
    told = [
        f"\nbundle: {where}",
        f"  {size_text(bundle.num_bytes)}, {len(bundle.files)} files",
        f"  state after {bundle.state_step} steps ({bundle.state_source})",
        f"  samples of {steps} step{'' if steps == 1 else 's'}",
        *(f"  not in it: {text}" for text in bundle.missing),
        *(f"  secret, to be given for a replay: {name}" for name in bundle.left_out),
    ]
    console.print(Text("\n".join(told)))


def _size(bundle: Bundle | None) -> str:
    return size_text(None if bundle is None else bundle.num_bytes)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
