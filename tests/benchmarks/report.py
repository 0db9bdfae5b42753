"""Tables for people, from what is saved as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

TARGET = 1.05
AIM = 1.02
MAX_LEDGER_BYTES = 100e6
MAX_DRAIN_S = 60.0
MAX_BUNDLE_S = 2.0
MAX_REPLAY_S = 15.0
HELD_UP_TARGETS = {1: 0.2, 2: 0.1}
MAX_KILL_S = 1.0
MAX_STANDSTILL_S = {
    "node killed": 5.0,
    "node joins": 2.0,
    "node drained": 1.0,
    "link to a node cut": 12.0,
}
MAX_GROWN_S = 20.0
MAX_SNAPSHOT_SHARE = 0.01
MAX_IMAGES = 3.01
"""Three copies of the state; their headers and alignment are the rest."""


def print_steps(console: Console, found: Mapping[str, Any], bases: Sequence[str]) -> None:
    """Step times and ratios of one model at one number of shards per worker."""
    table = _table(
        f"{found['model']}, {found['shards_per_worker']} shards per worker of "
        f"{found['shard_size']} samples, {found['workers']} workers",
        "engine",
        "step, ms",
        *(f"over {_short(base)}" for base in bases),
        *(f"CPU, {_short(base)}" for base in bases),
    )
    for row in found["engines"]:
        ratios = [row["ratios"].get(base) for base in bases]
        cpu_ratios = [row["cpu_ratios"].get(base) for base in bases]
        table.add_row(
            row["engine"],
            spread_text(row["step_ms"], digits=1),
            *("" if ratio is None else spread_text(ratio) for ratio in ratios),
            *("" if ratio is None else f"{ratio['median']:.3f}" for ratio in cpu_ratios),
        )
    console.print(table)
    console.print(_verdict(found))


def print_profile(console: Console, found: Mapping[str, Any]) -> None:
    """Where the exact engine's time goes."""
    table = _table(
        f"{found['model']}, {found['shards_per_worker']} shards per worker: the exact engine's "
        "step on worker 0 under a stopwatch",
        "part",
        "ms",
        "share",
    )
    parts = found["parts_ms"]
    total = sum(parts.values())
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value:.2f}", f"{value / total:.1%}")
    table.add_row("in all", f"{total:.2f}", "")
    console.print(table)


def print_counts(console: Console, found: Iterable[Mapping[str, Any]]) -> None:
    """Extra gradient buffers and traffic of a step."""
    table = _table(
        "extra gradient buffers and bytes sent in a step, counted",
        "model",
        "workers",
        "shards",
        "extra buffers by worker",
        "MB sent by worker",
        "busiest over a ring",
        "as forecast",
    )
    for row in found:
        size, ring = row["gradient_bytes"], row["ring_sent_bytes"]
        sent = [worker["sent_bytes"] for worker in row["counted"]]
        table.add_row(
            row["model"],
            str(row["workers"]),
            str(row["shards"]),
            " ".join(f"{worker['extra_buffer_bytes'] / size:g}" for worker in row["counted"]),
            " ".join(f"{value / 1e6:.3g}" for value in sent),
            f"{max(sent) / ring:.2f}" if ring else "",
            "yes" if row["as_forecast"] else "NO",
        )
    console.print(table)


def print_dataparallel(console: Console, found: Mapping[str, Any]) -> None:
    """`dataparallel` against `ddp`."""
    table = _table(
        f"{found['model']}, {found['shards']} shards: {found['workers']} workers of ddp against "
        "one process",
        "engine",
        "step, ms",
        "over ddp",
    )
    for row in found["engines"]:
        ratio = row["ratios"].get("ddp")
        table.add_row(
            row["engine"],
            spread_text(row["step_ms"], digits=1),
            "" if ratio is None else spread_text(ratio),
        )
    console.print(table)
    if not found["gpus"]:
        console.print("nn.DataParallel: not run, this machine has no GPU")


def print_telemetry(console: Console, found: Iterable[Mapping[str, Any]], *, workers: int) -> None:
    """Step times of whole runs, by what telemetry is on."""
    table = _table(
        f"chargpt through Ray, {workers} workers: what telemetry costs",
        "telemetry",
        "step, ms",
        "over all off",
        "cores beside the workers",
        "more than all off",
    )
    for row in found:
        median, least, largest = _of(row["ratios"])
        cores, fewest, most = _of(row["beside"])
        table.add_row(
            row["telemetry"],
            f"{row['step_ms']:.1f}",
            f"{median:.3f} [{least:.3f}, {largest:.3f}]",
            f"{cores:.3f} [{fewest:.3f}, {most:.3f}]",
            f"{row['more_beside']:.3f}",
        )
    console.print(table)


def print_outage(console: Console, found: Mapping[str, Any]) -> None:
    """What waits after an outage of MLflow, and how fast it is delivered."""
    table = _table(f"{found['num_steps']:,} steps without MLflow, then into a SQLite file", "", "")
    table.add_row("ledger, MB", f"{found['ledger_bytes'] / 1e6:.1f}")
    table.add_row("points delivered", f"{found['num_points']:,}")
    table.add_row("delivered after, s", f"{found['drain_s']:.1f}")
    table.add_row("of it loading MLflow and making the file, s", f"{found['connect_s']:.1f}")
    table.add_row("CPU of the recorder, s", f"{found['cpu_s']:.1f}")
    console.print(table)
    for name, limit in (("ledger_bytes", MAX_LEDGER_BYTES), ("drain_s", MAX_DRAIN_S)):
        said = "reached" if found[name] <= limit else "MISSED"
        console.print(f"{name} at most {limit:g} is {said}")


def print_load(console: Console, found: Mapping[str, Any]) -> None:
    """What many workers cost the recorder."""
    table = _table(f"{found['num_workers']:,} workers, a message a second each", "", "")
    table.add_row("messages answered", f"{found['num_messages']:,}")
    table.add_row("CPU of the recorder's process, cores", f"{found['cores']:.2f}")
    table.add_row("memory, MB", f"{found['memory_bytes'] / 1e6:.0f}")
    table.add_row("a scrape, s (slowest)", f"{found['scrape_s']:.3f}")
    table.add_row("size of a page, MB", f"{found['page_bytes'] / 1e6:.2f}")
    console.print(table)
    limits = (("cores", 1.0), ("memory_bytes", 500e6), ("scrape_s", 1.0))
    for name, limit in limits:
        said = "reached" if found[name] <= limit else "MISSED"
        console.print(f"{name} at most {limit:g} is {said}")


def _of(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def print_checkpoints(console: Console, found: Mapping[str, Any]) -> None:
    """What a save costs the training."""
    table = _table(
        f"saves of {found['state_bytes'] / 1e6:.0f} MB, {found['workers']} workers",
        "",
        "ms",
    )
    for name, times in found["times_ms"].items():
        table.add_row(name.replace("_", " "), spread_text(times, digits=1))
    console.print(table)
    held, target = found["held_up_over_torch_save"], HELD_UP_TARGETS[found["workers"]]
    told = f"training is held up {spread_text(held)} of torch.save's time, at most {target} is "
    console.print(told + ("reached" if held["median"] <= target else "MISSED"))
    whole = spread_text(found["whole_cost_over_torch_save"])
    console.print(f"with what the step is slower that shares its time with the copy: {whole} of it")
    console.print(f"async_save holds up {spread_text(found['async_save_over_torch_save'])} of it")
    ratio = found["step_while_writing_over_step"]
    if ratio is None:
        console.print("no step fell into the time of a write")
        return
    told = f"a step while a checkpoint is written takes {spread_text(ratio)} of a normal one, at "
    said = "reached" if ratio["median"] <= TARGET else "MISSED"
    console.print(f"{told}most {TARGET} is {said}")
    mean = spread_text(found["mean_step_while_writing_over_step"])
    console.print(f"in the mean, with the step that shares its time with the copy: {mean}")


def print_snapshots(console: Console, found: Mapping[str, Any]) -> None:
    """What copies into shared memory cost the training, and the room they take."""
    share, images = found["snapshot_share"], found["memory_over_state"]
    console.print(
        f"{found['num_snapshots']} snapshots, one after {found['steps_between']} steps: "
        f"{spread_text(share, digits=4)} of the time, at most {MAX_SNAPSHOT_SHARE:g} is "
        f"{_said(share['median'], MAX_SNAPSHOT_SHARE)}"
    )
    console.print(
        f"shared memory at its most: {spread_text(images)} of the state, at most {MAX_IMAGES:g} is "
        f"{_said(images['largest'], MAX_IMAGES)}"
    )


def print_watching(
    console: Console, found: Mapping[str, Any], base: str, limits: Mapping[str, float]
) -> None:
    """What it costs to look for incidents; `limits` are of the ratios to `base`."""
    table = _table(
        f"{found['model']}, {found['workers']} workers: what watching costs",
        "beside the training",
        "step, ms",
        f"over {base}",
    )
    judged = []
    for row in found["engines"]:
        ratio = row["ratios"].get(base)
        table.add_row(
            row["engine"],
            spread_text(row["step_ms"], digits=1),
            "" if ratio is None else spread_text(ratio),
        )
        if ratio is not None:
            limit = limits[row["engine"]]
            said = "reached" if ratio["median"] <= limit else "MISSED"
            judged.append(f"{row['engine']}: at most {limit:g} is {said}")
    console.print(table)
    times, share = found["watching_ms"], found["watching_share"]
    console.print(
        f"{found['model']}: of a step judging and recording take {spread_text(times['in_line'])} "
        f"ms in line and {spread_text(times['beside'])} ms of cores beside, together "
        f"{spread_text(share)} of it"
    )
    for line in judged:
        console.print(f"{found['model']}, {line}")


def print_bundles(console: Console, found: Mapping[str, Any]) -> None:
    """How soon a bundle is whole, and what the other workers notice of it."""
    times = found["times_ms"]
    table = _table(
        f"{found['model']}, {found['workers']} workers: an incident, with a state of "
        f"{found['state_bytes'] / 1e6:.1f} MB",
        "",
        "ms",
    )
    for name, text in (
        ("bundle", "from the incident to its bundle, whole on disk"),
        ("copy", "a plain copy of the state, in memory"),
        ("torch_save", "torch.save of it, to the same disk"),
        ("held_up", "the worker that writes trains no further for"),
        ("usual", "a step of another worker, usually"),
        ("longest", "its longest one meanwhile"),
    ):
        table.add_row(text, spread_text(times[name], digits=1))
    console.print(table)
    limit_ms = 1000 * MAX_BUNDLE_S + times["copy"]["median"]
    said = "reached" if times["bundle"]["median"] <= limit_ms else "MISSED"
    told = f"{found['model']}: a bundle within {MAX_BUNDLE_S:g} s and a copy ({limit_ms:.0f} ms) is"
    console.print(f"{told} {said}")
    console.print(
        f"another worker's longest step meanwhile is {spread_text(found['longest_over_usual'])} of "
        "its usual one, the longest "
        f"of those before {spread_text(found['longest_before_over_usual'])}"
    )


def print_replays(console: Console, taken_s: Sequence[float]) -> None:
    """How long a replay takes, in a process of its own."""
    table = _table("samestep replay BUNDLE, of digits", "replays", "median, s", "least", "most")
    median, least, most = _of(taken_s)
    table.add_row(str(len(taken_s)), f"{median:.2f}", f"{least:.2f}", f"{most:.2f}")
    console.print(table)
    said = "reached" if median <= MAX_REPLAY_S else "MISSED"
    console.print(f"digits: a step replayed within {MAX_REPLAY_S:g} s is {said}")


def spread_text(spread: Mapping[str, float], *, digits: int = 3) -> str:
    """`1.010 [0.990, 1.030]`: the median over launches, the least and the largest."""
    median, least, largest = spread["median"], spread["least"], spread["largest"]
    return f"{median:.{digits}f} [{least:.{digits}f}, {largest:.{digits}f}]"


def _verdict(found: Mapping[str, Any]) -> str:
    if not found["is_judged"]:
        return f"{found['model']}: not judged, its step is too small to tell engines by"
    worst = found["worst_ratio"]
    said = "reached" if worst <= TARGET else "MISSED"
    aim = ", and so is the aim of" if worst <= AIM else "; the aim is"
    return (
        f"{found['model']}: exact is at {worst:.3f} of the faster plain script; at most {TARGET} "
        f"is {said}{aim} {AIM}"
    )


def _said(value: float | None, limit: float) -> str:
    return "reached" if value is not None and value <= limit else "MISSED"


def _short(engine: str) -> str:
    return engine.removeprefix("plain, ")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def print_recovery(console: Console, found: Mapping[str, Any]) -> None:
    """How long training stood still, by whose it is and what happened."""
    table = _table(
        f"{found['model']}, 2 workers: seconds without a new step after a fault",
        "",
        "faults",
        "median",
        "least",
        "most",
    )
    for name, times in found["held_up_s"].items():
        known = [value for value in times if value is not None]
        if not known:  # a peer that never came back
            continue
        median, least, most = _of(known)
        row = (f"{name}: worker killed", str(len(known)))
        table.add_row(*row, f"{median:.2f}", f"{least:.2f}", f"{most:.2f}")
    for what, (seconds, redone, _) in found["others_s"].items():
        value = "-" if seconds is None else f"{seconds:.2f}"
        table.add_row(f"samestep: {what} ({redone} steps redone)", "1", value, value, value)
    console.print(table)
    ours = statistics.median(found["held_up_s"]["samestep"])
    console.print(f"{found['model']}: {found['redone']} steps redone over all kills")
    console.print(f"a killed worker: at most {MAX_KILL_S:g} s is {_said(ours, MAX_KILL_S)}")
    for what, (seconds, _, grown_s) in found["others_s"].items():
        if what in MAX_STANDSTILL_S:
            limit = MAX_STANDSTILL_S[what]
            console.print(f"{what}: at most {limit:g} s is {_said(seconds, limit)}")
        if grown_s is not None:
            told = f"{what}: trains with more workers after {grown_s:.1f} s, at most"
            console.print(f"{told} {MAX_GROWN_S:g} is {_said(grown_s, MAX_GROWN_S)}")
    for name, times in found["held_up_s"].items():
        if name != "samestep" and times:
            theirs = statistics.median(times)
            console.print(f"median {ours:.2f} s, {ours / theirs:.2f} of {name}'s {theirs:.2f} s")
