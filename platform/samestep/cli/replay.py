"""`samestep replay`: a step of a run taken again, in this process."""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from samestep.cli.errors import handles_errors
from samestep.cli.options import AsJson, Code
from samestep.cli.replay_target import Target, find_target
from samestep.errors import CannotReplayError, ExitStatus
from samestep.exact import numerics
from samestep.names import IncidentKind
from samestep.replay.apart import NotedProgress, is_apart, progress_here, run_apart
from samestep.spec import changed_spec, parse_override

if TYPE_CHECKING:
    from samestep.replay.bench import Place
    from samestep.replay.source import Source
    from samestep.replay.taking import Taker
    from samestep.replay.verdict import Compared

_MAY_END = (IncidentKind.CRASH, IncidentKind.HANG)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What was asked for beside the step itself."""

    num_after: int
    breaks: bool
    deep: bool
    changes: Mapping[str, object]
    report: Path | None
    as_json: bool


@handles_errors
def replay(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A bundle (folder, or file made by `samestep pack`), or a run: its directory "
            "(path or URI), or a name in ./runs.",
        ),
    ],
    incident_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Of a run: the incident, as `incidents list` gives it."
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Of a run: the step, whether or not it had an incident."),
    ] = None,
    from_: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            metavar="STEPS",
            help="Of a run: start from the checkpoint after so many steps; default: the newest "
            "whole one at or before the step.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Go on so many steps behind it (needs the run's data).")
    ] = 0,
    break_: Annotated[
        bool,
        typer.Option(
            "--break",
            help="Stop in pdb right before the step, with model, optimizer, batch, batches, "
            "shard, shards, state, step and workload at hand.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: the kind that the run had.")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Then look closer: which module or parameter is the first with values that are "
            "not finite or stand out, and which samples do it alone.",
        ),
    ] = False,
    code: Code = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUE",
            help="Then take the step under a changed job too (args.lr=0.01, clip_norm=1, or "
            "optimizer.lr=0.01 for an option of the optimizer), and show both. May be given "
            "several times: all changes together.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="A value of the job that is another here, or that was left out of the bundle.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Intra-op threads; default: those of the run, as bits need it."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page about it to this file: whole in itself, for any browser."),
    ] = None,
    still: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Of a crash or hang: how long it may stand still until it counts as hanging.",
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Take a step of a run again, in this process, and compare it with what was recorded.

    Nothing of the run is changed. Exit statuses: 0 reproduced bit for bit, 10 within tolerance
    (the numerics differ), 11 not reproduced, 12 can't be replayed here, 2 bad input.
    """
    found = find_target(target, incident_id=incident_id, at=at, from_step=from_)
    overrides = dict(parse_override(text) for text in set_ or [])
    if threads is not None:
        overrides["threads"] = threads
    spec = changed_spec(found.spec, overrides)
    folders = [folder.resolve() for folder in code or []] or [Path.cwd()]
    asked = _Asked(
        num_after=steps,
        breaks=break_,
        deep=deep or report is not None,
        changes=dict(parse_override(text) for text in what_if or []),
        report=report,
        as_json=as_json,
    )
    if found.kind in _MAY_END and not (is_apart() or break_):
        _apart(found, _arguments(context.params), asked, still)
    # In force only where torch comes after it.
    late = numerics.settings_not_in_force(spec) if "torch" in sys.modules else []
    if not late:
        os.environ.update(numerics.environment(spec))
    from samestep.cli.devices import device_of
    from samestep.replay.bench import Place
    from samestep.replay.source import Altered

    progress = progress_here()
    place = Place(search=folders, device=device_of(device, spec.resources.gpu), progress=progress)
    try:
        with found.opened() as source:
            _require_secrets(source, overrides)
            spec = changed_spec(source.spec, overrides)
            _replay(Altered(source, spec=spec), place, asked, found, late)
    finally:
        if isinstance(progress, NotedProgress):
            progress.over()


def _replay(source: Source, place: Place, asked: _Asked, target: Target, late: list[str]) -> None:
    from samestep.cli.replay_shown import tell, write_report
    from samestep.exact.seeds import global_generators_kept
    from samestep.replay.deep import look_closer
    from samestep.replay.report import page_of
    from samestep.replay.verdict import STATUS, take_again
    from samestep.replay.what_if import what_if

    # What the workload prints must not end up within the JSON.
    printed = redirect_stdout(sys.stderr) if asked.as_json else nullcontext()
    with numerics.GlobalsKept(), global_generators_kept(), printed:
        try:
            found, taker = take_again(
                source,
                place,
                num_after=asked.num_after,
                before_step=_debug if asked.breaks else lambda taker: None,
                on_step=lambda step: _show_step(step, source.step, asked),
                on_compared=lambda compared: _note_compared(place, compared),
            )
        except bdb.BdbQuit:
            Console(stderr=True).print("left in the debugger, before the step was through")
            raise typer.Exit(int(ExitStatus.INTERRUPTED)) from None
        closer = other = None
        try:
            if asked.deep:
                closer = look_closer(taker, found, source, place)
        finally:
            taker.close()
        if asked.changes:
            if found.before is None:
                raise CannotReplayError("the step was not reached, so nothing can be changed at it")
            other = what_if(source, found.before, place, asked.changes, num_after=asked.num_after)
    tell(found, closer, other, late if found.numerics else [], as_json=asked.as_json)
    if asked.report is not None:
        write_report(asked.report, page_of(found, source, closer, target=target.told), target)
    raise typer.Exit(int(STATUS[found.verdict]))


def _apart(target: Target, arguments: list[str], asked: _Asked, still_s: float) -> None:
    """Lets another process take the step: it may not outlive it."""
    ended = run_apart(arguments, still_s=still_s)
    if ended.status is not None:
        raise typer.Exit(ended.status)
    from samestep.cli.replay_shown import tell, write_report
    from samestep.replay.ended import judge_ended
    from samestep.replay.report import page_of
    from samestep.replay.verdict import STATUS

    looked = {"--deep": asked.deep and asked.report is None, "--what-if": bool(asked.changes)}
    more = [
        f"{name} is left out: it looks at steps that come to an end"
        for name, is_asked in looked.items()
        if is_asked
    ]
    with target.opened() as source:
        assert source.incident is not None, "only an incident has a kind"
        found = judge_ended(source.incident, ended)
        tell(found, None, None, more, as_json=asked.as_json)
        if asked.report is not None:
            page = page_of(found, source, None, target=target.told)
            write_report(asked.report, page, target)
    raise typer.Exit(int(STATUS[found.verdict]))


def _require_secrets(source: Source, given: Mapping[str, object]) -> None:
    lacking = [path for path in getattr(source, "left_out", ()) if path not in given]
    if lacking:
        options = " ".join(f"--set {path}=VALUE" for path in lacking)
        raise CannotReplayError(
            f"the bundle does not hold secret values of the job: {', '.join(lacking)}; give them "
            f"with {options}"
        )


def _arguments(given: Mapping[str, Any]) -> list[str]:
    """The command line that gives the same options."""
    made = ["replay", given["target"], *filter(None, [given["incident_id"]])]
    single = {"at": "--at", "from_": "--from", "steps": "--steps", "device": "--device"}
    single |= {"threads": "--threads", "report": "--report"}
    several = {"code": "--code", "what_if": "--what-if", "set_": "--set"}
    for name, option in single.items():
        if given[name] is not None:
            made += [option, str(given[name])]
    for name, option in several.items():
        for value in given[name] or []:
            made += [option, str(value)]
    return made + [
        option for name, option in (("deep", "--deep"), ("as_json", "--json")) if given[name]
    ]


def _note_compared(place: Place, compared: Compared) -> None:
    """Tells who watches, for the next step may end this process."""
    from samestep.replay.ended import compared_to_json

    if isinstance(place.progress, NotedProgress):
        place.progress.say(compared_to_json(compared))


def _show_step(step: int, last_step: int, asked: _Asked) -> None:
    """On a terminal: how far it is, where there are many steps before the one that is meant."""
    if sys.stderr.isatty() and not asked.breaks and step < last_step:
        print(f"\rstep {step} of {last_step}", end="", file=sys.stderr, flush=True)
    elif sys.stderr.isatty() and step == last_step:
        print("\r", end="", file=sys.stderr, flush=True)


def _debug(taker: Taker) -> None:
    """Stops in pdb, with what people want to look at in its own names."""
    model, optimizer, workload, step = (
        taker.parts.model,
        taker.parts.optimizer,
        taker.workload,
        taker.step,
    )
    state = taker.state()
    if taker.is_behind:
        print(
            f"after the update of step {step - 1}, before what follows it: model, optimizer, "
            "workload and state; c goes on, q leaves"
        )
        pdb.Pdb().set_trace()
        return
    shards = taker.plans(step)
    batches = [taker.batch(shard) if shard.ids else None for shard in shards]
    shard, batch = shards[0], batches[0]
    print(
        f"before step {step}: model, optimizer, workload, state, and of shard 0 of {len(shards)} "
        "shard and batch (all: shards, batches); c takes the step, q leaves"
    )
    pdb.Pdb().set_trace()
    del model, optimizer, workload, state, shard, batch
