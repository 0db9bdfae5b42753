"""Errors on the command line: one red line, what to do, and the exit status that docs promise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

from samestep.cli.settle import forget_seen, settle_seen
from samestep.errors import ExitStatus, SamestepError

P = ParamSpec("P")
R = TypeVar("R")


def handles_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns samestep's exceptions into their message on standard error and their exit status.

    Other exceptions pass through: they are bugs, and their traceback is what is needed.
    """

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except SamestepError as error:
            tell_error(str(error))
            raise typer.Exit(int(error.exit_status)) from error
        except KeyboardInterrupt:
            tell_error("interrupted at once; the same command again resumes where it can")
            forget_seen()  # whoever interrupts does not wait for that either
            raise typer.Exit(int(ExitStatus.INTERRUPTED)) from None
        finally:
            settle_seen()

    return wrapped


def tell_error(message: str) -> None:
    """Writes a message to standard error, in red where that is a terminal."""
    console = Console(stderr=True, soft_wrap=True)
    console.print("error: " + message, style="red", markup=False, highlight=False)
