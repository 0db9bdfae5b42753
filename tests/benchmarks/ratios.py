"""From times of alternating rounds to ratios with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Times = dict[str, list[float | None]]
"""Seconds by name of the engine, one per round; None where it was left out."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, least and largest of a number over launches."""

    median: float
    least: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.least:.3f}, {self.largest:.3f}]"

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """The spread of one number per launch."""
    return Spread(median=statistics.median(values), least=min(values), largest=max(values))


def paired_ratio(launches: Sequence[Times], name: str, base: str) -> Spread | None:
    """Of each launch the median over rounds of `name`'s time over `base`'s in the same round.

    Returns:
        Its spread over launches; None where there was no round with both.
    """
    ratios = [
        [
            a / b
            for a, b in zip(times[name], times[base], strict=True)
            if a is not None and b is not None
        ]
        for times in launches
    ]
    return spread([statistics.median(of_launch) for of_launch in ratios]) if all(ratios) else None


def median_ms(launches: Sequence[Times], name: str) -> Spread:
    """Of each launch the median step time in milliseconds: for orientation, not for comparing."""
    return spread(
        [1000 * statistics.median(t for t in times[name] if t is not None) for times in launches]
    )


def step_rows(launches: Sequence[dict[str, Times]], bases: Sequence[str]) -> list[dict[str, Any]]:
    """A row per engine: its step time, and its ratios to each of `bases` but itself.

    Args:
        launches: of each the times by kind, `wall_s` and `cpu_s`.
        bases: names of engines.
    """
    wall = [launch["wall_s"] for launch in launches]
    cpu = [launch["cpu_s"] for launch in launches]

    def ratios(times: Sequence[Times], name: str) -> dict[str, Any]:
        found = {base: paired_ratio(times, name, base) for base in bases if base != name}
        return {base: ratio.to_json() for base, ratio in found.items() if ratio is not None}

    return [
        {
            "engine": name,
            "step_ms": median_ms(wall, name).to_json(),
            "ratios": ratios(wall, name),
            "cpu_ratios": ratios(cpu, name),
        }
        for name in wall[0]
    ]


def save_rows(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each launch's saves, and what holds training up over `torch.save`.

    Args:
        launches: of each, seconds by what they are of: `held_up_s`, `torch_save_s`,
            `async_save_s`, `save_and_step_s` (a save with the step that shares its time with the
            copy), `step_s` and `step_while_writing_s`; and `state_bytes`.
    """

    def medians(name: str) -> list[float]:
        return [statistics.median(launch[name]) for launch in launches]

    def over(name: str, base: str) -> dict[str, float]:
        pairs = zip(medians(name), medians(base), strict=True)
        return spread([a / b for a, b in pairs]).to_json()

    kinds = (
        *("held_up_s", "save_and_step_s", "torch_save_s", "async_save_s"),
        *("step_s", "step_while_writing_s"),
    )
    costs = [
        (with_copy - step) / plain
        for with_copy, step, plain in zip(
            medians("save_and_step_s"), medians("step_s"), medians("torch_save_s"), strict=True
        )
    ]
    is_seen = all(launch["step_while_writing_s"] for launch in launches)
    return {
        "state_bytes": launches[0]["state_bytes"],
        "times_ms": {
            name.removesuffix("_s"): spread([1000 * t for t in medians(name)]).to_json()
            for name in kinds
            if is_seen or name != "step_while_writing_s"
        },
        "held_up_over_torch_save": over("held_up_s", "torch_save_s"),
        "whole_cost_over_torch_save": spread(costs).to_json(),
        "async_save_over_torch_save": over("async_save_s", "torch_save_s"),
        "step_while_writing_over_step": (
            over("step_while_writing_s", "step_s") if is_seen else None
        ),
        "mean_step_while_writing_over_step": (
            spread(
                [
                    statistics.mean(launch["step_while_writing_s"])
                    / statistics.mean(launch["step_s"])
                    for launch in launches
                ]
            ).to_json()
            if is_seen
            else None
        ),
    }


def snapshot_row(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Share of the time that snapshots took, and their memory over the state, over launches."""
    shares = [launch["snapshot_share"] for launch in launches]
    images = [launch["shared_memory_bytes"] / launch["state_bytes"] for launch in launches]
    return {
        "num_snapshots": sum(launch["num_snapshots"] for launch in launches),
        "steps_between": launches[0]["steps_between"],
        "snapshot_share": spread(shares).to_json(),
        "memory_over_state": spread(images).to_json(),
    }


def watching_row(launches: Sequence[dict[str, Any]], base: str) -> dict[str, Any]:
    """What watching takes of a step by its own clocks, over launches, and its share of the step.

    Args:
        launches: of each the times as in `step_rows`, and `watching_s`.
        base: name of the engine that nobody watches.
    """
    shares = [
        1000 * sum(launch["watching_s"].values()) / median_ms([launch["wall_s"]], base).median
        for launch in launches
    ]
    return {
        "watching_ms": {
            part: spread([1000 * launch["watching_s"][part] for launch in launches]).to_json()
            for part in launches[0]["watching_s"]
        },
        "watching_share": spread(shares).to_json(),
    }


def bundle_row(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spreads over the incidents of all launches, of which each is as `bundles` gives it."""

    def values(name: str) -> list[float]:
        return [value for launch in launches for value in launch[name]]

    def over_usual(name: str) -> dict[str, float]:
        pairs = zip(values(name), values("usual_s"), strict=True)
        return spread([a / b for a, b in pairs]).to_json()

    kinds = ("bundle_s", "copy_s", "torch_save_s", "held_up_s", "usual_s", "longest_s")
    return {
        "state_bytes": launches[0]["state_bytes"],
        "times_ms": {
            name.removesuffix("_s"): spread([1000 * t for t in values(name)]).to_json()
            for name in kinds
        },
        "longest_over_usual": over_usual("longest_s"),
        "longest_before_over_usual": over_usual("longest_usual_s"),
    }
