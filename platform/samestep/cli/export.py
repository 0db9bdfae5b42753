"""`samestep export`: the weights of a checkpoint for plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run_or_checkpoint
from samestep.cli.units import size_text
from samestep.replay.export import export_weights


@handles_errors
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run or a checkpoint's folder: a path or URI, or the name of a run in ./runs.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="F", help="The safetensors file to write.")],
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="latest|best|STEP",
            help="Which checkpoint: the newest, the best by checkpoint.best.metric, or that after "
            "STEP steps.",
        ),
    ] = "latest",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write the weights of a checkpoint as plain safetensors, which need no samestep to be loaded.

    The model takes them by `model.load_state_dict(safetensors.torch.load_file(F))`: parameters and
    persistent buffers under the model's own keys, tied ones under each. Where the job keeps
    averages of the weights (ema), those are written, as they are what is evaluated. Exit statuses:
    0 written, 2 no such checkpoint, it is damaged, or the file exists.
    """
    place = find_run_or_checkpoint(run)
    found = export_weights(place.uri, out, checkpoint=checkpoint, force=force)
    console = Console(soft_wrap=True, highlight=False)
    what = "averages of weights" if found.averages else "weights"
    console.print(
        f"{out}: {what} after {found.step} steps, {found.num_tensors} tensors, "
        f"{size_text(found.num_bytes)}",
        markup=False,
    )
    if found.left_out:
        console.print(
            f"left out, being no tensors: {', '.join(found.left_out)}; load the file with "
            "strict=False",
            markup=False,
        )
