"""`samestep pack`: a bundle as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from samestep.checkpoint.storage import Storage
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.units import size_text
from samestep.errors import BundleError
from samestep.incidents.bundle import folder_of, has_bundle
from samestep.incidents.packing import pack as pack_bundle
from samestep.incidents.record import list_incidents


@handles_errors
def pack(
    bundle: Annotated[
        str,
        typer.Argument(
            metavar="BUNDLE",
            help="The folder of a bundle, or a run (then name the incident).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    incident_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The incident, as `incidents list` has it.")
    ] = None,
) -> None:
    """Make one file of an incident's bundle, to be sent and replayed elsewhere.

    Every file of the bundle is verified first. The same bundle always gives the same bytes.
    Exit statuses: 0 written, 2 no such bundle, it is damaged, or FILE exists.
    """
    folder = _folder(bundle, incident_id)
    found = pack_bundle(folder, out)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{out}: {found.kind} at step {found.step}, {len(found.files)} files, "
        f"{size_text(out.stat().st_size)}",
        markup=False,
    )
    for text in found.missing:
        console.print(f"not in it: {text}", markup=False)


def _folder(text: str, incident_id: str | None) -> Storage:
    if incident_id is None:
        folder = Storage.at(text)
        if has_bundle(folder):
            return folder
    run = find_run(text)
    having = [
        incident.id for incident in list_incidents(run) if has_bundle(folder_of(run, incident.id))
    ]
    if incident_id is None:
        raise BundleError(
            f"{run.uri} is a run: name an incident that has a bundle; these do: "
            f"{', '.join(having) or 'none'}"
        )
    if incident_id not in having:
        raise BundleError(
            f"incident {incident_id!r} of {run.uri} has no bundle; these do: "
            f"{', '.join(having) or 'none'}"
        )
    return folder_of(run, incident_id)
