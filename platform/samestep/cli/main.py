"""The command line: one command per module, thin: parse, call, show."""

from __future__ import annotations

import typer

from samestep.cli.check import check
from samestep.cli.compare import compare
from samestep.cli.digest import digest
from samestep.cli.samples import samples
from samestep.cli.show import show
from samestep.cli.train import train

app = typer.Typer(
    name="samestep",
    help="Elastic PyTorch training on Ray that takes the same step at any size.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, check, show, compare, digest, samples):
    app.command()(command)


def main() -> None:
    """Runs the command line."""
    app()
