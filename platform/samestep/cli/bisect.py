"""`samestep bisect`: where two runs part that should be equal."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Code, RunA, RunB
from samestep.errors import ExitStatus
from samestep.exact import numerics
from samestep.replay.apart import progress_here
from samestep.telemetry.identity import read_spec


@handles_errors
def bisect(
    run_a: RunA,
    run_b: RunB,
    code: Code = None,
    code_b: Annotated[
        list[Path] | None,
        typer.Option(help="The same for the other run, where its code is another."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: the kind that the runs had.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the first step, shard and tensor in which two runs differ.

    Both are taken again, in this process, from their nearest checkpoints to the first step whose
    records differ, and from older ones where these differ already. Exit statuses: 0 the runs are
    identical, 11 they differ, 2 nothing to compare.
    """
    places = find_run(run_a), find_run(run_b)
    spec = read_spec(places[0])
    # In force only where torch comes after it.
    if "torch" not in sys.modules:
        os.environ.update(numerics.environment(spec))
    from samestep.cli.devices import device_of
    from samestep.exact.seeds import global_generators_kept
    from samestep.replay.bench import Place
    from samestep.replay.bisect import bisect_runs
    from samestep.replay.bisect_told import describe_bisected
    from samestep.replay.summary import plain

    where = device_of(device, spec.resources.gpu)
    search_a = [folder.resolve() for folder in code or []] or [Path.cwd()]
    search_b = [folder.resolve() for folder in code_b or []] or search_a
    with global_generators_kept():
        found = bisect_runs(
            *places,
            places=(
                Place(search=search_a, device=where, progress=progress_here()),
                Place(search=search_b, device=where, progress=progress_here()),
            ),
        )
    if as_json:
        print(json.dumps(plain(asdict(found)), indent=2, allow_nan=False, default=str))
    else:
        console = Console(soft_wrap=True, highlight=False)
        first, *rest = describe_bisected(found)
        console.print(first, style="green" if found.is_equal else "red", markup=False)
        for line in rest:
            console.print(line, markup=False)
    raise typer.Exit(int(ExitStatus.DONE if found.is_equal else ExitStatus.DIFFERENT))
