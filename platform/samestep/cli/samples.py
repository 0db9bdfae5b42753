"""`samestep samples`: which samples a step took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.replay.samples import samples_of_step


@handles_errors
def samples(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's directory, or a name in ./runs."),
    ],
    step: Annotated[int, typer.Option(min=0, help="Number of the step, counted from 0.")],
    search: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder in which the workload is found, where it gives an order of its own; "
            "default: where the run found it. May be given several times."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="As one JSON object, for scripts.")
    ] = False,
) -> None:
    """List the sample ids (indices into the dataset) of a step, by shard.

    They are computed from the job and checked against the digest in the ledger.
    """
    folders = [folder.resolve() for folder in search or []]
    found = samples_of_step(find_run(run), step, search=folders)
    if as_json:
        data = {"step": found.step, "epoch": found.epoch, "shards": found.shards}
        print(json.dumps({**data, "digest": found.digest}))
        return
    count = sum(map(len, found.shards))
    print(f"step {found.step}, epoch {found.epoch}: {count} samples, as the ledger has it")
    for number, ids in enumerate(found.shards):
        print(f"shard {number}: {' '.join(map(str, ids)) or 'empty'}")
