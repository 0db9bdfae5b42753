"""`samestep watch`: a run in a terminal, live, from its directory alone."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from samestep.cli.chart import chart
from samestep.cli.display import duration, number
from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import Run
from samestep.names import TimePart
from samestep.replay.watching import Watching

INTERVAL_S: Final = 1.0
CHART_HEIGHT: Final = 8
MAX_WIDTH: Final = 100
NUM_EVENTS: Final = 8
COLORS: Final = {
    TimePart.KEPT: "green",
    TimePart.REDONE: "red",
    TimePart.STARTING: "yellow",
    TimePart.WAITING: "magenta",
    TimePart.DATA: "blue",
    TimePart.COMMUNICATION: "cyan",
    TimePart.CHECKPOINT: "bright_blue",
    TimePart.EVALUATION: "bright_green",
    TimePart.IDLE: "bright_black",
}


@handles_errors
def watch(
    run: Run,
    once: Annotated[
        bool, typer.Option("--once", help="Show what there is now and end, as outside a terminal.")
    ] = False,
) -> None:
    """Watch a run: loss, throughput, workers, where its time goes, events; until it ends.

    Ctrl-C ends the watching and leaves the run alone.
    """
    place = find_run(run)
    watching = Watching(place)
    watching.read()
    console = Console(highlight=False)
    width = min(MAX_WIDTH, console.width)
    if once or not console.is_terminal:
        console.print(picture(watching, width=width, now=time.time()))
    else:
        _follow(watching, console, width)


def _follow(watching: Watching, console: Console, width: int) -> None:
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(picture(watching, width=width, now=time.time()), refresh=True)
                if watching.is_over:
                    return
                time.sleep(INTERVAL_S)
                watching.read()
    except KeyboardInterrupt:  # the usual end of watching
        return


def picture(watching: Watching, *, width: int, now: float) -> RenderableType:
    """Everything at a moment.

    Args:
        watching: the run.
        width: characters of a line.
        now: seconds since the epoch.
    """
    not_finite = watching.losses.num_not_finite
    heading = "loss" if not not_finite else f"loss ({not_finite} steps not finite)"
    curve = chart(watching.losses.all_points, width=width, height=CHART_HEIGHT)
    return Group(
        _head(watching, width),
        Text(heading, style="cyan"),
        *(Text(line, no_wrap=True) for line in curve),
        _values(watching, now),
        Text(),
        _time(watching, width, now),
        Text(),
        *_events(watching),
    )


def _head(watching: Watching, width: int) -> RenderableType:
    """Name, status and how far it is."""
    workers = f"{watching.num_workers} worker{'' if watching.num_workers == 1 else 's'}"
    told = f"attempt {watching.attempt}, {watching.mode}, {workers}" if watching.attempt else ""
    total = watching.total_steps
    steps = f"step {watching.num_steps}" + (f" of {total}" if total else "")
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(watching.name, style="bold green"), watching.status, told, steps)
    # In a grid, because a bar by itself ends without a line break.
    body = Table.grid()
    body.add_row(head)
    if total:
        body.add_row(ProgressBar(total=total, completed=watching.num_steps, width=width))
    return body


def _values(watching: Watching, now: float) -> Columns:
    """The last step, the last evaluation, speed and safety."""
    last, cells = watching.last, []
    if last is not None:
        cells += [("loss", number(last.loss)), ("epoch", str(last.epoch))]
        cells += [(name, number(value)) for name, value in last.metrics.items()]
    if watching.evaluation is not None:
        cells += [(f"test {n}", number(value)) for n, value in watching.evaluation[1].items()]
    cells += [
        ("samples/s", number(watching.samples_per_s(), digits=0)),
        ("left", duration(None if watching.is_over else watching.left_s())),
        ("redone", str(watching.num_redone)),
        ("incidents", str(watching.num_incidents)),
    ]
    if watching.last_checkpoint is not None:
        step, at = watching.last_checkpoint
        cells.append(("checkpoint", f"step {step}, {duration(max(0.0, now - at))} ago"))
    told = [Text.assemble((f"{name} ", "cyan"), (text, "bold")) for name, text in cells]
    return Columns(told, padding=(0, 3))


def _time(watching: Watching, width: int, now: float) -> RenderableType:
    """A bar of the parts of the time, and what each is."""
    accounting = watching.accounting
    wall_s = accounting.wall_s
    goodput = accounting.goodput(None if watching.is_over else now)
    if goodput is None:
        return Text("time: nothing yet", style="cyan")
    parts = [(part, s) for part, s in accounting.seconds.items() if s > 0]
    bar, legend, shown, spent = Text(), [], 0, 0.0
    for part, seconds in parts:
        spent += seconds
        end = round(spent / wall_s * width)  # rounding in the sum: the bar has its full length
        bar.append("█" * (end - shown), style=COLORS[part])
        shown = end
        text = f"{part} {duration(seconds)} ({seconds / wall_s:.0%})"
        legend.append(Text.assemble(("■ ", COLORS[part]), text))
    title = Text.assemble(("time ", "cyan"), duration(wall_s), f", goodput {goodput:.0%}")
    return Group(title, bar, Columns(legend, padding=(0, 3)))


def _events(watching: Watching) -> list[Text]:
    return [
        Text.assemble((time.strftime("%H:%M:%S ", time.localtime(at)), "dim"), text)
        for at, text in list(watching.events)[-NUM_EVENTS:]
    ]
