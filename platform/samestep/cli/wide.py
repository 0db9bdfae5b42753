"""Tables that are printed whole: where the terminal is narrower, its lines wrap."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH: Final = 10_000


def print_whole(table: Table) -> None:
    """Prints a table without cutting what is in its cells."""
    console = Console(soft_wrap=True, highlight=False)
    options = console.options.update(max_width=MAX_WIDTH)
    console.width = max(console.width, Measurement.get(console, options, table).maximum)
    console.print(table)
