"""`samestep fork`: a new run that goes on from a step of another one."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import Code, Run
from samestep.errors import InputError, SpecError
from samestep.exact import numerics
from samestep.names import SPEC_FILE
from samestep.spec import JobSpec, differing_fields, field_at, load_spec, parse_override
from samestep.telemetry.identity import read_spec
from samestep.telemetry.programs import program

if TYPE_CHECKING:
    from samestep.replay.fork import Fork


@handles_errors
def fork(
    run: Run,
    at: Annotated[int, typer.Option(metavar="STEP", min=0, help="Steps to take over from RUN.")],
    name: Annotated[str, typer.Option(help="Name of the new run, which lies beside RUN.")],
    skip_steps: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A:B",
            help="Leave out the batches of steps A to B - 1; may be given several times.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="a.b=value",
            help="Changes a field of the job from there on; may be given several times.",
        ),
    ] = None,
    code: Code = None,
) -> None:
    """Make a new run that goes on from RUN after STEP steps; nothing of RUN is changed.

    Where RUN has no checkpoint there, the steps from the one before are taken again in this
    process. The new run holds RUN's steps so far, and the command that is printed trains it on.
    Exit statuses: 0 made, 2 bad input, 1 the steps could not be taken again as they were.
    """
    place = find_run(run)
    spec = read_spec(place)
    if "torch" not in sys.modules:  # in force only where torch comes after it
        os.environ.update(numerics.environment(spec))
    from samestep.replay.evaluate import search_folders
    from samestep.replay.fork import fork_run

    folders = [folder.resolve() for folder in code or []]
    folders = folders or [*search_folders(place), Path.cwd()]
    made = fork_run(
        place,
        step=at,
        name=name,
        skip=[_range(text) for text in skip_steps or []],
        overrides=dict(parse_override(text) for text in settings or []),
        search=folders,
    )
    _show(made, folders)


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise InputError(
            f"--skip-steps takes A:B, the first step and one past the last, got {text!r}"
        )
    return int(match[1]), int(match[2])


def _show(made: Fork, folders: list[Path]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    lines = [f"{made.name}: forked from {made.parent} after {made.step} steps"]
    if made.num_taken:
        lines.append(f"{made.num_taken} steps were taken again, as the ledger has them")
    if made.numerics:
        lines += ["within tolerance, since the numerics differ in:"]
        lines += [f"  {line}" for line in made.numerics]
    if made.digest is not None:
        lines.append(f"state: sha256 {made.digest}")
    if made.changes:
        lines += ["its job differs in:", *(f"  {line}" for line in made.changes)]
    lines += [
        "train it on with:",
        f"  {train_command(made.run.uri, made.spec, made.name, folders)}",
    ]
    for line in lines:
        console.print(line, markup=False)


def train_command(uri: str, spec: JobSpec, name: str, folders: list[Path]) -> str:
    """The command that trains a run on whose job may lie in no file as it is by now."""
    from samestep.cluster.launch import run_uri

    found = _job_file(spec, folders)
    if found is None and "://" in uri:
        file, there, prefix = "JOB.yaml", spec, ""
    elif found is None:  # its own file tells all, but not where the workload is
        file, there, prefix = f"{uri}/{SPEC_FILE}", spec, f"cd {shlex.quote(str(folders[0]))} && "
    else:
        file, there, prefix = _short(found[0]), found[1], ""
    words = [program("samestep"), "train", file, "--name", name]
    for path, value in _settings(there, spec):
        words += ["--set", f"{path}={json.dumps(value)}"]
    if prefix or run_uri(there, name) != uri:
        words += ["--set", f"storage={uri.rpartition('/')[0]}"]
    return prefix + shlex.join(words)


def _settings(there: JobSpec, spec: JobSpec) -> Iterator[tuple[str, object]]:
    """What to set so that a job file gives a job, as far as what it computes goes."""
    paths = [line.partition(":")[0] for line in differing_fields(there, spec)]
    for path in [*paths, "epochs", "max_steps"]:
        value, before = field_at(spec, path), field_at(there, path)
        if isinstance(value, dict) and before.keys() <= value.keys():
            changed = ((key, value[key]) for key in value if before.get(key) != value[key])
            yield from ((f"{path}.{key}", inner) for key, inner in changed)
        elif value != before:
            yield path, value


def _job_file(spec: JobSpec, folders: list[Path]) -> tuple[Path, JobSpec] | None:
    """The job file that is nearest to a job, in the folders of its workload."""
    found: list[tuple[int, Path, JobSpec]] = []
    for folder in folders:
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
            try:
                there = load_spec(path)
            except SpecError:
                continue
            if there.workload == spec.workload:
                found.append((len(differing_fields(there, spec)), path, there))
    if not found:
        return None
    _, path, there = min(found, key=lambda item: item[0])
    return path, there


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
