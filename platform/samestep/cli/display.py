"""The live display of a run: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Final, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_INTERVAL_S: Final = 2.0


class Display:
    """An observer for `samestep.train`; may be called from several threads.

    Args:
        console: where to write.
        monotonic: clock in seconds.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Its own output goes past whoever copies sys.stdout into a worker's log.
        self._console = console or Console(highlight=False, file=sys.stdout)
        self._streams = sys.stdout, sys.stderr
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._shown_at = 0.0
        self._shown_step = -1

    def __enter__(self) -> Display:
        """Takes over what is printed meanwhile, where there is a live display to print above."""
        self._streams = sys.stdout, sys.stderr
        if self._console.is_terminal:
            sys.stdout = cast(TextIO, _Above(self, sys.stdout))
            sys.stderr = cast(TextIO, _Above(self, sys.stderr))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Above):
                stream.finish()
        sys.stdout, sys.stderr = self._streams
        with self._lock:
            self._stop_live()

    def __call__(self, status: dict[str, Any]) -> None:
        """Shows a status of the recorder, a worker's line (`output`), or makes room (`paused`)."""
        with self._lock:
            if "output" in status:
                self._console.print(Text(status["output"]), soft_wrap=True)
                return
            for message in status["messages"]:
                self._console.print(Text(message["text"], style="dim"), soft_wrap=True)
            if status.get("paused"):
                self._stop_live()
            elif self._console.is_terminal:
                self._show_live(status)
            else:
                self._show_plain(status)

    def _show_live(self, status: dict[str, Any]) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(_panel(status))

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_plain(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown_at < PLAIN_INTERVAL_S or status["step"] == self._shown_step:
            return
        self._shown_at, self._shown_step = now, status["step"]
        cells = [f"{name} {value}" for name, value in cells_of(status)]
        self._console.print("  ".join(cells), soft_wrap=True)
        sys.stdout.flush()


class _Above:
    """A stream whose lines are shown above the live display."""

    def __init__(self, display: Display, inner: TextIO) -> None:
        self._display = display
        self._inner = inner
        self._partial = ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._display({"output": line, "messages": []})
        return len(text)

    def finish(self) -> None:
        """Shows a last line that has no end."""
        if self._partial:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def cells_of(status: dict[str, Any]) -> list[tuple[str, str]]:
    """What the display shows of a status, as (name, text)."""
    total = status["total_steps"]
    cells = [
        ("step", f"{status['step']}/{total}" if total else str(status["step"])),
        ("epoch", str(status["epoch"])),
        ("loss", number(status["loss"])),
    ]
    metrics = dict(status["metrics"])
    evaluation = (status["evaluation"] or {}).get("metrics", {})
    cells += [(name, number(value)) for name, value in metrics.items()]
    cells += [(f"test {name}", number(value)) for name, value in evaluation.items()]
    workers = status["workers"]
    cells += [
        ("samples/s", number(status["samples_per_s"], digits=0)),
        ("workers", f"{workers} ({status['mode']})" if status["mode"] else "starting"),
        ("left", duration(status["eta_s"])),
    ]
    return cells


def _panel(status: dict[str, Any]) -> Table:
    cells = Table.grid(padding=(0, 2))
    shown = cells_of(status)
    cells.add_row(*(Text(name, style="cyan", no_wrap=True) for name, _ in shown))
    cells.add_row(*(Text(text, style="bold", no_wrap=True) for _, text in shown))
    # Rows of a grid, because a bar by itself ends without a line break.
    panel = Table.grid()
    panel.add_row(Text.assemble((str(status["run"]), "bold green"), "  ", str(status["state"])))
    panel.add_row(
        ProgressBar(total=status["total_steps"] or None, completed=status["step"], width=60)
    )
    panel.add_row(cells)
    return panel


def number(value: float | None, digits: int = 4) -> str:
    """A value for people; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds for people; a dash where there is nothing to tell."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
