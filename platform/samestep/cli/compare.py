"""`samestep compare`: are two runs the same, bit for bit?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import RunA, RunB
from samestep.errors import ExitStatus
from samestep.replay.compare import Comparison, Verdict, compare_runs

_STATUS = {
    Verdict.IDENTICAL: ExitStatus.DONE,
    Verdict.WITHIN_TOLERANCE: ExitStatus.EQUAL_WITHIN_TOLERANCE,
    Verdict.DIFFERENT: ExitStatus.DIFFERENT,
}
_STYLE = {
    Verdict.IDENTICAL: "green",
    Verdict.WITHIN_TOLERANCE: "yellow",
    Verdict.DIFFERENT: "red",
}


@handles_errors
def compare(
    run_a: RunA,
    run_b: RunB,
    through: Annotated[
        int | None,
        typer.Option(
            min=0, help="Compare up to this step, and don't mind that one run went further."
        ),
    ] = None,
) -> None:
    """Compare the ledgers, evaluations and checkpoints of two runs.

    Exit status: 0 identical, 10 equal within tolerance (their numerics differ), 11 different,
    2 nothing to compare.
    """
    found = compare_runs(find_run(run_a), find_run(run_b), through=through)
    console = Console(soft_wrap=True)
    first, *rest = describe(found)
    console.print(first, style=_STYLE[found.verdict], markup=False, highlight=False)
    for line in rest:
        console.print(line, markup=False, highlight=False)
    raise typer.Exit(int(_STATUS[found.verdict]))


def describe(found: Comparison) -> list[str]:
    """What was found, in lines; the first one says it all."""
    lines = [_headline(found)]
    if found.first is not None and found.identical_through is not None:
        lines.append(f"identical through step {found.identical_through}")
    if found.first is not None and found.verdict is Verdict.WITHIN_TOLERANCE:
        lines.append(f"first difference at step {found.first.step}: {found.first.quantity}")
    for title, items in (
        ("the jobs differ in", found.spec),
        ("the numerics differ in", found.numerics),
        ("for information, they also differ in", found.informational),
        ("noted in the ledgers", found.notes),
    ):
        if items:
            lines += [f"{title}:", *(f"  {item}" for item in items)]
    if found.verdict is Verdict.DIFFERENT and found.first is not None and not found.numerics:
        lines.append("the numerics do not differ: the same bits were to be expected")
    return lines


def _headline(found: Comparison) -> str:
    compared = f"{found.num_compared} steps, {found.evaluations_compared} evaluations"
    if found.verdict is Verdict.WITHIN_TOLERANCE:
        last = found.first_step + found.num_compared - 1
        return f"equal within {found.tolerance:g} through step {last} ({compared})"
    if found.first is not None:
        return f"different at step {found.first.step}: {found.first.quantity}"
    weights = "no common checkpoint" if found.digest is None else f"weights {found.digest[:16]}…"
    if found.digest_step is not None and found.digest_step != (found.identical_through or 0) + 1:
        weights += f" after {found.digest_step} steps"
    text = f"identical through step {found.identical_through} ({weights}; {compared})"
    if found.verdict is Verdict.IDENTICAL:
        return text
    longer, extra = ("a", found.only_in_a) if found.only_in_a else ("b", found.only_in_b)
    return f"{text}, but run {longer} has {extra} steps that the other has not (--through STEP)"
