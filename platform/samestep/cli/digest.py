"""`samestep digest`: one hash for the whole state, to compare between machines."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep.checkpoint.reading import digest_of
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run_or_checkpoint


@handles_errors
def digest(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run (its newest checkpoint is taken) or a checkpoint's folder: a path or URI, "
            "or the name of a run in ./runs.",
        ),
    ],
) -> None:
    """Print the SHA-256 of weights, optimizer state and data position.

    Taken over names, dtypes, shapes and values in a canonical order (docs/checkpoints.md has it),
    after all files were verified. Equal digests mean equal bits.
    """
    place = find_run_or_checkpoint(path)
    print(f"{digest_of(place.uri)}  {place.uri}")
