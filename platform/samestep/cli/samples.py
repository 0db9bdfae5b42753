"""`samestep samples`: which samples a step took."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Code, Run
from samestep.replay.samples import samples_of_step


@handles_errors
def samples(
    run: Run,
    step: Annotated[int, typer.Option(min=0, help="Number of the step, counted from 0.")],
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """List the sample ids (indices into the dataset) of a step, by shard.

    They are computed from the job and checked against the digest in the ledger.
    """
    folders = [folder.resolve() for folder in code or []]
    found = samples_of_step(find_run(run), step, search=folders)
    if as_json:
        data = {"step": found.step, "epoch": found.epoch, "shards": found.shards}
        print(json.dumps({**data, "digest": found.digest}))
        return
    count = sum(map(len, found.shards))
    print(f"step {found.step}, epoch {found.epoch}: {count} samples, as the ledger has it")
    for number, ids in enumerate(found.shards):
        print(f"shard {number}: {' '.join(map(str, ids)) or 'empty'}")
