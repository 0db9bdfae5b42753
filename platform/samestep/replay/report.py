"""The page about an incident: whole in itself, opens from a file, loads nothing from anywhere.

All text goes through `escape`: samples, messages and tracebacks may hold anything. Last of all the
job's secrets are taken out.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape, unescape
from typing import Any, Final

from samestep.incidents.record import Incident
from samestep.incidents.redaction import Redaction
from samestep.names import Event
from samestep.replay.alone import Sample
from samestep.replay.deep import Deep, describe_alone
from samestep.replay.report_chart import Mark, line_chart, pixels
from samestep.replay.report_style import STYLE
from samestep.replay.shown import Shown
from samestep.replay.source import Eventful, Source
from samestep.replay.telling import describe
from samestep.replay.trace import Seen
from samestep.replay.verdict import Replayed, Verdict
from samestep.telemetry.records import EventRecord, StepRecord

STEPS_BEFORE: Final = 200
STEPS_AFTER: Final = 40
MAX_ROWS: Final = 400
_VERDICTS: Final = {
    Verdict.REPRODUCED: ("good", "reproduced"),
    Verdict.WITHIN_TOLERANCE: ("fair", "reproduced within tolerance"),
    Verdict.NOT_REPRODUCED: ("bad", "not reproduced"),
}
_BETWEEN_TAGS: Final = re.compile(r"(?<=>)[^<>]+(?=<)")
_QUIET: Final = (Event.EVALUATION, Event.MESSAGE)
"""Events that are no marks of their own: there may be many."""


def page_of(found: Replayed, source: Source, deep: Deep | None, *, target: str) -> str:
    """The page, as HTML.

    Args:
        found: what came of the replay.
        source: of it.
        deep: what a closer look found; None: nobody looked.
        target: what to give `samestep replay` for it.
    """
    incident = found.incident
    kind = incident.kind.replace("_", " ") if incident is not None else "replay"
    title = f"{kind} at step {found.step}"
    body = [
        f"<h1>{escape(title)} {_badge(found.verdict)}</h1>",
        f'<p class="lead">{escape(_paragraph(found, source))}</p>',
        _timeline(found, source),
        _section("Verdict", _lines(describe(found)) + _values(found)),
        _section("Audit", _audit(found)),
        _section("Where it comes from", _findings(deep)) if deep is not None else "",
        _section("Samples", _samples(deep)) if deep is not None else "",
        _section("Stacks", _stacks(found)),
        _section("Tensors", _traces(deep)) if deep is not None else "",
        _section("Environment", _environment(found, source)),
        _section("Again", _again(target)),
    ]
    content = "\n".join(part for part in body if part)
    return _PAGE.format(
        title=escape(title), style=STYLE, body=_without_secrets(content, Redaction(source.spec))
    )


def _without_secrets(content: str, redaction: Redaction) -> str:
    """Takes them out of the texts between the tags: what was taken again knows the whole job."""
    return _BETWEEN_TAGS.sub(lambda found: escape(redaction.text(unescape(found.group()))), content)


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _paragraph(found: Replayed, source: Source) -> str:
    """What happened, in words."""
    incident, told = found.incident, source.provenance
    workers = told.get("world_size")
    of = f"a run of {source.spec.workload}" + (f" on {workers} workers" if workers else "")
    if incident is None:
        return f"Step {found.step} of {of}, taken again in one process."
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(incident.time))
    where = "" if incident.world_rank is None else f" on worker {incident.world_rank}"
    where += f" ({incident.host})" if incident.host else ""
    first = incident.message.splitlines()[0].rstrip(".") if incident.message else ""
    policy = incident.seen.get("policy")
    return (
        f"At step {incident.step} of {of}, in attempt {incident.attempt}{where}, {when}: {first}."
        + (f" The job's policy for it is {policy}." if policy else "")
    )


def _timeline(found: Replayed, source: Source) -> str:
    window = range(max(0, found.step - STEPS_BEFORE), found.step + STEPS_AFTER + 1)
    records = {step: r for step, r in source.records().items() if step in window}
    at_step = found.at_step
    if at_step is not None and at_step.found is not None:
        known = records.get(found.step, at_step.found)
        records[found.step] = replace(known, grad_norm=at_step.grad_norm)
    if not records:
        return ""
    happened = source.events() if isinstance(source, Eventful) else ()
    marks = [Mark(step=found.step, text="the step", is_step=True)]
    marks += [
        Mark(step=event.step, text=_event(event))
        for event in happened
        if event.step in window and event.event not in _QUIET
    ]
    charts = []
    for title, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
        values: dict[int, float | None] = {found.step: None}
        values |= {step: getattr(record, name) for step, record in records.items()}
        charts.append(line_chart(title, dict(sorted(values.items())), marks))
    told = [[str(mark.step), mark.text] for mark in marks if not mark.is_step]
    return _section(
        "The run around it",
        "".join(charts)
        + '<p class="note">The vertical line is the step; triangles are events; a cross is a value '
        "that is not finite.</p>" + (_table(("steps taken", "event"), told) if told else ""),
    )


def _event(event: EventRecord) -> str:
    fields = event.fields
    text = event.event.replace("_", " ")
    for name in ("message", "reason", "kind", "mode"):
        if fields.get(name):
            text += f", {name}: {str(fields[name]).splitlines()[0]}"
    return f"{text} (attempt {event.attempt})"


def _values(found: Replayed) -> str:
    rows = [
        [str(item.step), name, *(_value(r, name) for r in (item.recorded, item.found))]
        for item in found.steps[-3:]
        for name in ("loss", "grad_norm", "skipped")
        if item.recorded is not None or item.found is not None
    ]
    rows += [
        [str(item.step), "differs", line, ""]
        for item in found.steps
        for line in item.differences[:20]
    ][:40]
    return _table(("step", "quantity", "in the run", "taken again"), rows) if rows else ""


def _value(record: StepRecord | None, name: str) -> str:
    if record is None:
        return "not known"
    value = getattr(record, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None and name == "grad_norm" and record.skipped and record.loss is not None:
        return "nan"  # of a step that is left out a record does not tell it
    return "-" if value is None else f"{value:.9g}"


def _audit(found: Replayed) -> str:
    audited = found.audited
    if audited is None:
        return ""
    rows = [["here", "", "", audited.digest, ""]]
    rows += [
        [
            f"worker {claim.world_rank}",
            claim.host,
            claim.when,
            claim.digest,
            "the same" if claim.digest == audited.digest else "another",
        ]
        for claim in (*audited.audit.disputed, *audited.audit.repeats)
    ]
    classes = ["broken-row" if row[-1] == "another" else "" for row in rows]
    head = ("computed by", "on", "when", "digest of the gradient", "against here")
    return _table(head, rows, classes)


def _findings(deep: Deep) -> str:
    lines = []
    if deep.first is not None:
        lines.append(f"First: {deep.first}.")
    for trace in deep.traces:
        if trace.raised is not None:
            inside = f" inside {trace.inside}" if trace.inside else ""
            lines.append(f"Shard {trace.shard} raises {trace.raised}{inside}.")
    if not lines:
        lines.append("Every value is finite, and none stands out.")
    return _lines([*lines, *deep.notes])


def _traces(deep: Deep) -> str:
    parts = []
    for trace in deep.traces:
        is_first = deep.first is not None and deep.first.shard == trace.shard
        parts.append(
            _folded(
                f"Shard {trace.shard}: what came by, in order",
                _tensors(trace.seen, deep.first.seen if deep.first and is_first else None),
                is_open=is_first,
            )
        )
    parts += [
        _folded(f"Step {trace.step}, shard {trace.shard}", _tensors(trace.seen, None))
        for trace in deep.before
    ]
    parts.append(_folded("Weights before the step", _tensors(deep.weights, None)))
    return "".join(parts)


def _tensors(seen: Sequence[Seen], first: Seen | None) -> str:
    rows, classes = [], []
    for item in seen[:MAX_ROWS]:
        s = item.stats
        rows.append(
            [
                str(item.kind),
                item.name,
                item.module,
                "x".join(map(str, s.shape)) or "number",
                *(_short(value) for value in (s.mean, s.std, s.min, s.max)),
                f"{s.share_not_finite:.1%}" if s.num_not_finite else "",
            ]
        )
        classes.append("first" if item is first else "broken-row" if s.num_not_finite else "")
    more = len(seen) - MAX_ROWS
    head = ("", "name", "module", "shape", "mean", "std", "min", "max", "not finite")
    return _table(head, rows, classes) + (f"<p>and {more} more</p>" if more > 0 else "")


def _samples(deep: Deep) -> str:
    return _lines(describe_alone(deep.alone)) + "".join(_sample(shown) for shown in deep.shown)


def _sample(shown: Shown) -> str:
    sample = shown.sample
    numbers = [
        [path, _shape_of(stats.shape), _short(stats.min), _short(stats.max), _list(values)]
        for path, stats, values in shown.numbers
    ]
    picture = pixels(shown.picture, side=max(1, 192 // max(1, len(shown.picture))))
    text = f"<pre>{escape(shown.text)}</pre>" if shown.text else ""
    return (
        f'<div class="sample"><h3>{escape(_name(sample))}</h3>{picture}{text}'
        + (_table(("tensor", "shape", "min", "max", "first values"), numbers) if numbers else "")
        + "</div>"
    )


def _name(sample: Sample) -> str:
    return f"Sample {sample.id} (shard {sample.shard}, place {sample.place})"


def _shape_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _list(values: Iterable[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _stacks(found: Replayed) -> str:
    incident = found.incident
    parts = []
    if incident is not None and incident.traceback:
        parts.append(_folded("In the run", _pre(incident.traceback), is_open=True))
    for rank, told in sorted(_workers(incident).items()):
        head = f"Worker {rank}: {told.get('place', '')}"
        parts.append(_folded(head, _pre(str(told.get("stacks", "")))))
    if found.raised is not None:
        parts.append(_folded("Taken again", _pre(found.raised.traceback), is_open=True))
    if found.stacks:
        parts.append(_folded("Taken again", _pre(found.stacks), is_open=True))
    return "".join(parts)


def _workers(incident: Incident | None) -> Mapping[str, Mapping[str, Any]]:
    told = incident.seen.get("workers", {}) if incident is not None else {}
    return told if isinstance(told, Mapping) else {}


def _environment(found: Replayed, source: Source) -> str:
    if found.numerics:
        lines = ["The numerics differ, in the run against here:", *found.numerics]
    else:
        lines = ["The numerics are those of the run."]
    if found.surroundings:
        lines += ["Code and packages differ, in the run against here:", *found.surroundings]
    told = {
        key: value for key, value in source.provenance.items() if value not in (None, "", [], {})
    }
    return _lines(lines) + (
        _folded("Where the run comes from", _pre(json.dumps(told, indent=2, default=str)))
        if told
        else ""
    )


def _again(target: str) -> str:
    commands = [f"samestep replay {target}", f"samestep replay {target} --deep --break"]
    return _pre("\n".join(commands))


def _badge(verdict: Verdict) -> str:
    style, text = _VERDICTS[verdict]
    return f'<span class="badge {style}">{text}</span>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _folded(title: str, content: str, *, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(title)}</summary>{content}</details>"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for number, row in enumerate(rows):
        style = f' class="{classes[number]}"' if classes and classes[number] else ""
        body.append(f"<tr{style}>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
