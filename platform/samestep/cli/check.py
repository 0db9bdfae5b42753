"""`samestep check`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from samestep.cli.errors import handles_errors
from samestep.cli.options import AsJson, Settings
from samestep.errors import SpecError
from samestep.exact import numerics
from samestep.spec import JobSpec, load_spec, parse_override

if TYPE_CHECKING:
    from samestep.engine.report import LossInfo, ParametersInfo, Report, ScheduleInfo, TensorInfo

MAX_NAMES = 8


@handles_errors
def check(
    job: Annotated[
        Path | None, typer.Argument(help="The job file.", metavar="JOB.yaml", show_default=False)
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON schema of job files, and nothing else."),
    ] = False,
) -> None:
    """Check a job before it runs: takes one dry step on one shard, and writes nothing.

    Prints what goes in and out (shapes, dtypes, devices), parameters by class, memory, how the
    data is cut, what each number of workers costs, the numerics, and what will not be exact.
    Exit statuses: 0 fine (warnings allowed), 1 the workload's own code raised, 2 the job would
    be refused or is not exact.
    """
    if schema:
        print(json.dumps(JobSpec.model_json_schema(), indent=2))
        return
    if job is None:
        raise SpecError("give a job file: samestep check JOB.yaml (or --schema)")
    spec = load_spec(job, dict(parse_override(text) for text in settings or []))
    # In force only where torch comes after it.
    late = numerics.settings_not_in_force(spec) if "torch" in sys.modules else []
    if not late:
        os.environ.update(numerics.environment(spec))
    from samestep.engine.inspect import inspect_job

    # What the workload prints must not get between the JSON.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        report = inspect_job(spec, [job.resolve().parent, Path.cwd()], not_in_force=late)
    if as_json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _show(spec, report)
    if report.exit_status:
        raise typer.Exit(int(report.exit_status))


def _show(spec: JobSpec, report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text.assemble((spec.workload, "bold"), f", {spec.shards} shards"))
    if report.schedule is not None:
        _section(console, "data", _facts(_schedule(report.schedule)))
    if report.batch is not None:
        batch = report.batch
        title = f"batch of shard 0: {batch.type} of {batch.num_samples} samples"
        _section(console, title, _tensors(batch.tensors))
    if report.loss is not None:
        _section(console, "loss of shard 0", _facts(_loss(report.loss)))
    if report.evaluation is not None:
        facts = [(name, f"{value:.6g}") for name, value in report.evaluation.items()]
        _section(console, "evaluation, first batch, after one step on one shard", _facts(facts))
    if report.parameters is not None:
        _section(console, "parameters", _facts(_parameters(report.parameters)))
    if report.buffers:
        _section(console, "buffers", _tensors(report.buffers))
    _show_cost(console, spec, report)
    if report.modes is not None and report.modes.not_training:
        told = _names(report.modes.not_training)
        _section(console, "modules in eval mode at step 0", Text(told))
    _section(console, "numerics", _facts(_numerics(report)))
    _show_findings(console, report)


def _show_cost(console: Console, spec: JobSpec, report: Report) -> None:
    memory = report.memory
    if memory is not None:
        facts = [
            ("model", _bytes(memory.model_bytes)),
            ("buffers", _bytes(memory.buffer_bytes)),
            ("gradients", _bytes(memory.gradient_bytes)),
            ("optimizer", _bytes(memory.optimizer_bytes)),
        ]
        _section(console, "memory of each worker, activations aside", _facts(facts))
    if report.forecasts and spec.reduction == "exact":
        _section(console, "workers", _workers(spec, report))


def _show_findings(console: Console, report: Report) -> None:
    console.print()
    for title, style, lines in (
        ("warning", "yellow", report.warnings),
        ("not exact", "bold red", report.not_exact),
        ("refused", "bold red", report.refused),
    ):
        for line in lines:
            console.print(Text.assemble((f"{title}: ", style), line))
    if not (report.refused or report.not_exact):
        console.print(Text("fine", style="bold green") + Text(": the dry step found no obstacle"))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(body)


def _facts(facts: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(name), Text(value))
    return table


def _tensors(tensors: tuple[TensorInfo, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("name", "shape", "dtype", "device", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left", no_wrap=True)
    for info in tensors:
        shape = " x ".join(map(str, info.shape)) or "scalar"
        row = (info.name or "(the batch)", shape, info.dtype, info.device, f"{info.num_bytes:,}")
        table.add_row(*map(Text, row))
    return table


def _schedule(schedule: ScheduleInfo) -> list[tuple[str, str]]:
    samples = f"{schedule.dataset_size:,}"
    if schedule.epoch_size != schedule.dataset_size:
        samples += f", of which an epoch visits {schedule.epoch_size:,}"
    if schedule.left_out:
        samples += f", {schedule.left_out} left out by drop_last"
    facts = [
        ("samples", samples),
        ("steps", f"{schedule.total_steps:,} in all, {schedule.steps_per_epoch:,} in an epoch"),
        ("samples per shard", _sizes(schedule.shard_sizes)),
    ]
    if schedule.last_shard_sizes != schedule.shard_sizes:
        facts.append(("in an epoch's last step", _sizes(schedule.last_shard_sizes)))
    evaluation = "none" if schedule.evaluation_size is None else f"{schedule.evaluation_size:,}"
    return [*facts, ("evaluation samples", evaluation)]


def _sizes(sizes: tuple[int, ...]) -> str:
    """`16 (shards 0 to 2), 15 (shard 3)`."""
    parts, start = [], 0
    for place, size in enumerate(sizes):
        if place + 1 < len(sizes) and sizes[place + 1] == size:
            continue
        where = f"shard {start}" if start == place else f"shards {start} to {place}"
        parts.append(f"{size} ({where})")
        start = place + 1
    return ", ".join(parts)


def _loss(loss: LossInfo) -> list[tuple[str, str]]:
    shape = " x ".join(map(str, loss.tensor.shape)) or "scalar"
    whose = "given by the workload" if loss.own_weight else "its samples"
    norm = "none" if loss.grad_norm is None else f"{loss.grad_norm:.6g}"
    return [
        ("loss", f"{loss.value:.6g}, {shape} of {loss.tensor.dtype} on {loss.tensor.device}"),
        ("weight", f"{loss.weight:g} ({whose}); a full shard has {loss.nominal_weight:g}"),
        *((f"metric {name}", f"{value:.6g}") for name, value in loss.metrics.items()),
        ("gradient norm", norm),
        ("learning rate", ", ".join(f"{rate:g}" for rate in loss.learning_rates)),
    ]


def _parameters(parameters: ParametersInfo) -> list[tuple[str, str]]:
    facts = []
    for name, infos in (("trainable", parameters.trainable), ("frozen", parameters.frozen)):
        num_elements = sum(_numel(info.shape) for info in infos)
        names = _names([info.name for info in infos])
        count = f"{num_elements:,} in {len(infos)} tensors"
        facts.append((name, f"{count}: {names}" if names else count))
    tied = "; ".join(" = ".join(group) for group in parameters.tied[:MAX_NAMES])
    if len(parameters.tied) > MAX_NAMES:
        tied += f"; and {len(parameters.tied) - MAX_NAMES} more"
    facts.append(("tied", tied or "none"))
    if parameters.unused is not None:
        facts.append(("not used by shard 0", _names(parameters.unused) or "none"))
    if parameters.not_optimized:
        facts.append(("not in the optimizer", _names(parameters.not_optimized)))
    return facts


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _workers(spec: JobSpec, report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("workers", "shards each", "extra gradient buffers", "staging", "sent per step"):
        table.add_column(name, justify="right")
    table.add_column("against a ring", justify="right")
    for found in report.forecasts:
        sizes = sorted({worker.num_shards for worker in found.workers})
        extra = max(worker.num_extra_buffers for worker in found.workers)
        extra_bytes = max(worker.extra_buffer_bytes for worker in found.workers)
        within = spec.workers.min <= found.num_workers <= spec.workers.max
        table.add_row(
            str(found.num_workers),
            " or ".join(map(str, sizes)),
            f"{extra} ({_bytes(extra_bytes)})" if extra else "none",
            _bytes(max(worker.staging_bytes for worker in found.workers)),
            _bytes(found.sent_bytes),
            f"{found.traffic_factor:g}x" if found.num_workers > 1 else "",
            style=("yellow" if found.is_costly else "") if within else "dim",
        )
    return table


def _numerics(report: Report) -> list[tuple[str, str]]:
    entries = {**report.numerics.get("binding", {}), **report.numerics.get("informational", {})}
    return [(name, str(value)) for name, value in entries.items() if value not in (None, "")]


def _names(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _bytes(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "not computed"
    if num_bytes < 10_000:
        return f"{num_bytes:,} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if num_bytes < 1000 * size or unit == "GB":
            return f"{num_bytes / size:,.1f} {unit}"
    raise AssertionError("every size has a unit")
