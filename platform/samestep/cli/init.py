"""`samestep init`: a folder to start from."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.errors import handles_errors
from samestep.cli.scaffold import write_scaffold


@handles_errors
def init(
    name: Annotated[
        Path,
        typer.Argument(metavar="NAME", help="The new folder; its name becomes the run's."),
    ],
) -> None:
    """Write a small working workload to start from: its job file, data, a test and a README.

    It trains as it is, in seconds. A folder that holds something already is refused.
    """
    command = _command()
    made = write_scaffold(name, command="samestep")
    print(f"{name}: {', '.join(made.files)}")
    print(made.data)
    print("\nNext:")
    print(f"  cd {shlex.quote(str(name))}")
    print(f"  {command} check job.yaml      # what goes in and out, by one dry step")
    print(f"  {command} train job.yaml      # trains it")
    print(f"  {command} evaluate {made.folder.name}      # its metrics, computed anew")


def _command() -> str:
    """How this command line can be called from any folder."""
    called = Path(sys.argv[0])
    if called.name == "samestep":
        on_path = shutil.which("samestep")
        if on_path is not None and Path(on_path).samefile(called):
            return "samestep"
        if called.exists():
            return shlex.quote(str(called.absolute()))
    return f"{shlex.quote(sys.executable)} -m samestep"
