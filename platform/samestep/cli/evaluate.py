"""`samestep evaluate`: a checkpoint's metrics, computed anew."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Code, Run
from samestep.errors import ExitStatus
from samestep.exact import numerics
from samestep.telemetry.identity import read_spec

if TYPE_CHECKING:
    from samestep.replay.evaluate import Evaluated

_STATUS = {
    "equal": ExitStatus.DONE,
    "not_in_ledger": ExitStatus.DONE,
    "within_tolerance": ExitStatus.EQUAL_WITHIN_TOLERANCE,
    "different": ExitStatus.DIFFERENT,
}


@handles_errors
def evaluate(
    run: Run,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="latest|best|STEP",
            help="Which checkpoint: the newest, the best by checkpoint.best.metric, or that after "
            "STEP steps.",
        ),
    ] = "latest",
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint in this process, and compare with what the ledger says of its step.

    Exit statuses: 0 equal bit for bit (or the run did not evaluate at that step), 10 equal within
    tolerance (the numerics differ), 11 different, 2 bad input, 1 the workload raised.
    """
    place = find_run(run)
    spec = read_spec(place)
    # In force only where torch comes after it.
    late = numerics.settings_not_in_force(spec) if "torch" in sys.modules else []
    if not late:
        os.environ.update(numerics.environment(spec))
    from samestep.checkpoint.reading import choose
    from samestep.replay.evaluate import evaluate_checkpoint, search_folders
    from samestep.replay.summary import plain

    choice = choose(place, checkpoint)
    if choice.warning is not None:
        Console(stderr=True, soft_wrap=True).print(choice.warning, markup=False)
    folders = [folder.resolve() for folder in code or []]
    found = evaluate_checkpoint(
        place,
        choice.step,
        search=folders or [*search_folders(place), Path.cwd()],
    )
    if as_json:
        print(json.dumps(plain(asdict(found)), indent=2, allow_nan=False))
    else:
        _show(found, late)
    raise typer.Exit(int(_STATUS[found.agreement]))


def _show(found: Evaluated, late: list[str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, value in found.metrics.items():
        shown = f"{value:.2%}" if name == "accuracy" else f"{value:.6g}"
        table.add_row(name, Text(shown, style="bold"), Text(value.hex(), style="dim"))
    console.print(f"checkpoint after {found.step} steps, {found.num_samples:,} samples")
    console.print(table)
    for line in _verdict(found):
        console.print(line, markup=False)
    for line in late if found.differences else []:
        console.print(line, markup=False)


def _verdict(found: Evaluated) -> list[str]:
    lines = {
        "equal": ["equal bit for bit to the evaluation in the ledger"],
        "not_in_ledger": ["the run did not evaluate after this step: nothing to compare with"],
        "within_tolerance": [f"within {found.tolerance} of the evaluation in the ledger"],
        "different": ["different from the evaluation in the ledger"],
    }[found.agreement]
    if found.differences:
        lines += ["in the ledger against now:", *(f"  {line}" for line in found.differences)]
    if found.numerics:
        lines += ["the numerics differ in:", *(f"  {line}" for line in found.numerics)]
    return lines
