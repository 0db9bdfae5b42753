"""Arguments and options that several commands take, described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's directory (path or URI), or a name in ./runs."),
]
RunA = Annotated[
    str,
    typer.Argument(metavar="RUN_A", help="A run's directory (path or URI), or a name in ./runs."),
]
RunB = Annotated[str, typer.Argument(metavar="RUN_B", help="The other run.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=value",
        help="Sets a field of the job, e.g. --set epochs=3 --set checkpoint.keep=5; may be given "
        "several times.",
    ),
]
Code = Annotated[
    list[Path] | None,
    typer.Option(
        "--code",
        metavar="FOLDER",
        help="Folder in which the workload is found, instead of where the run found it or the "
        "working directory. May be given several times.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]
