"""The command line: one command per module, thin: parse, call, show."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

COMMANDS: Final = (
    *("init", "check", "train", "evaluate", "drill"),
    *("runs", "show", "watch", "logs", "ui", "incidents", "checkpoints", "compare", "digest"),
    *("replay", "bisect", "samples", "pack", "export", "fork", "rm"),
)


class CommandsOnDemand(TyperGroup):
    """Loads the module of a command when it is asked for.

    A command that looks back needs torch, and a command that computes must set the environment
    before torch is loaded.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        found = getattr(import_module(f"samestep.cli.{cmd_name}"), cmd_name)
        if isinstance(found, typer.Typer):  # a command with commands of its own
            return typer.main.get_group(found)
        one = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        one.command(cmd_name)(found)
        return typer.main.get_command(one)


app = typer.Typer(
    name="samestep",
    cls=CommandsOnDemand,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def samestep() -> None:
    """Elastic PyTorch training on Ray that takes the same step at any size."""


def main() -> None:
    """Runs the command line."""
    app()
