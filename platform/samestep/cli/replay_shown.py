"""What came of a replay on the terminal, as JSON, and as a page beside its incident."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.replay_target import Target
from samestep.cli.wide import print_whole
from samestep.errors import InputError
from samestep.replay.deep import Deep, deep_json, describe_deep
from samestep.replay.report_delivery import deliver
from samestep.replay.telling import as_json as plain_data
from samestep.replay.telling import describe, what_if_json, what_if_rows
from samestep.replay.verdict import Replayed, Verdict
from samestep.replay.what_if import WhatIf

_STYLE: Final = {
    Verdict.REPRODUCED: "green",
    Verdict.WITHIN_TOLERANCE: "yellow",
    Verdict.NOT_REPRODUCED: "red",
}


def tell(
    found: Replayed,
    closer: Deep | None,
    other: WhatIf | None,
    more: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Prints it all; `more` are lines to add to the verdict."""
    if as_json:
        data = plain_data(found) | {"more": list(more)}
        data |= {"deep": deep_json(closer)} if closer is not None else {}
        data |= {"what_if": what_if_json(other)} if other is not None else {}
        print(json.dumps(data, indent=2, allow_nan=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    first, *rest = describe(found)
    console.print(first, style=_STYLE[found.verdict], markup=False)
    lines = [*rest, *more]
    if found.stacks:
        lines += ["", found.stacks]
    if closer is not None:
        lines += ["", *describe_deep(closer)]
    for line in lines:
        console.print(line, markup=False)
    if other is not None:
        console.print(f"\nwhat if {', '.join(other.changes)}:", markup=False)
        table = Table("", "as it was", "changed", box=None, pad_edge=False, header_style="bold")
        for row in what_if_rows(other):
            table.add_row(*map(Text, row))
        print_whole(table)


def write_report(path: Path, page: str, target: Target) -> None:
    """Writes the page to a file, and with the run where it is that of one of its incidents.

    Raises:
        InputError: the file can't be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"can't write {path}: {error.strerror or error}") from error
    notes = [f"report: {path}"]
    if target.run is not None and target.incident_id is not None:
        notes += deliver(target.run, target.incident_id, page)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for note in notes:
        console.print(note, markup=False)
