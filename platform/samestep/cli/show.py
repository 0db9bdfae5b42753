"""`samestep show`: a run in short."""

from __future__ import annotations

import json
import statistics
import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.errors import handles_errors
from samestep.cli.find import find_run
from samestep.cli.options import AsJson, Run
from samestep.names import DIED
from samestep.replay.summary import FORKED, RunSummary, summarize, why_ended
from samestep.telemetry.board import describe_recovery

LAST_INCIDENTS = 10
LAST_RECOVERIES = 10


@handles_errors
def show(
    run: Run,
    as_json: AsJson = False,
) -> None:
    """Show a run in short: status, attempts, steps, loss, evaluation, incidents, checkpoints."""
    place = find_run(run)
    summary = summarize(place)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2, allow_nan=False))
    else:
        console = Console(soft_wrap=True)
        for line in _lines(summary):
            console.print(line)
        if summary.attempts:
            console.print(_attempts(summary))


def _lines(summary: RunSummary) -> list[Text]:
    lines = [
        _line("run", summary.uri),
        _line("workload", summary.spec.workload),
        _line("status", _status(summary)),
        _line("steps", _steps(summary)),
    ]
    if summary.fork is not None:
        text = f"{summary.fork.get('parent')} after {summary.fork['step']} steps"
        lines.insert(1, _line("forked from", text))
    for number, rollback in enumerate(summary.rollbacks):
        lines.append(_line("" if number else "rollbacks", rollback.describe()))
    if summary.last is not None:
        loss = "none" if summary.last.loss is None else f"{summary.last.loss:.6g}"
        metrics = {"loss": loss, **{k: f"{v:.6g}" for k, v in summary.last.metrics.items()}}
        lines.append(_line("last step", ", ".join(f"{k} {v}" for k, v in metrics.items())))
    if summary.evaluation is not None:
        metrics = summary.evaluation.get("metrics", {})
        text = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        lines.append(_line("evaluation", f"{text} (after {summary.evaluation['step']} steps)"))
    digest = (summary.result or {}).get("digest")
    if digest:
        lines.append(_line("digest", str(digest)))
    lines.append(_line("checkpoints", _checkpoints(summary)))
    best = _best(summary)
    if best:
        lines.append(_line("best", best))
    lines.append(_line("incidents", str(len(summary.incidents))))
    lines += [
        _line("", f"{incident.id}: {(incident.message.splitlines() or [''])[0]}")
        for incident in summary.incidents[-LAST_INCIDENTS:]
    ]
    if summary.avoided:
        lines.append(_line("avoided", f"{', '.join(summary.avoided)} (computed wrongly)"))
    if summary.recoveries:
        lines.append(_line("recoveries", _recoveries(summary)))
    lines += [
        _line("", f"attempt {item['attempt']} at step {item['step']}: {describe_recovery(item)}")
        for item in summary.recoveries[-LAST_RECOVERIES:]
    ]
    lines += [_line("torn", text) for text in summary.torn]
    return lines


def _line(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<12}", "bold"), value)


def _status(summary: RunSummary) -> str:
    if summary.holder is not None:
        return f"{summary.status}, held by {summary.holder.where}"
    message = str((summary.result or {}).get("message") or "")
    if summary.status == FORKED:
        message = "nobody has trained it yet"
    if summary.status == DIED:
        message = "no result, and nobody holds it; the same train command resumes it"
    return f"{summary.status}: {message}" if message else summary.status


def _steps(summary: RunSummary) -> str:
    text = str(summary.num_steps)
    if summary.total_steps is not None:
        text += f" of {summary.total_steps}"
    if summary.last is not None:
        text += f", epoch {summary.last.epoch}"
    return f"{text}, {summary.num_redone} redone" if summary.num_redone else text


def _checkpoints(summary: RunSummary) -> str:
    whole = [info for info in summary.checkpoints if info.whole]
    unfinished = len(summary.checkpoints) - len(whole)
    if not whole:
        text = "none"
    else:
        size = sum(info.num_bytes for info in whole) / 1e6
        text = f"after {', '.join(str(info.step) for info in whole)} steps ({size:.1f} MB)"
    return f"{text}; {unfinished} unfinished" if unfinished else text


def _recoveries(summary: RunSummary) -> str:
    times = sorted(float(item.get("again_s", 0.0)) for item in summary.recoveries)
    return (
        f"{len(times)}; training again after {statistics.median(times):.2f} s (median), "
        f"{times[-1]:.2f} s at most"
    )


def _best(summary: RunSummary) -> str:
    latest = summary.latest
    if latest is None or latest.ranking is None:
        return ""
    ranking, best = latest.ranking, summary.best
    if best is None:
        return (
            f"none: {ranking.metric} was NaN or never evaluated; the latest, after {latest.step} "
            "steps, stands for it"
        )
    text = f"after {best.step} steps: {ranking.metric} {ranking.score_of(best):.6g}"
    return f"{text} ({ranking.order} is best); the latest is after {latest.step}"


def _attempts(summary: RunSummary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("attempt", "mode", "workers", "steps", "redone", "started", "ended"):
        table.add_column(name, overflow="fold")
    for attempt in summary.attempts:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started_at))
        if attempt.next_step > attempt.start_step:
            steps = f"{attempt.start_step} to {attempt.next_step - 1}"
        else:
            steps = f"from {attempt.start_step}"
        table.add_row(
            str(attempt.number),
            str(attempt.fields.get("mode", "")),
            str(attempt.fields.get("world_size", "")),
            steps,
            str(attempt.num_redone),
            started,
            Text(why_ended(attempt) or ("goes on" if summary.holder else DIED)),
        )
    return table
